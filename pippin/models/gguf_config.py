"""The hub's config.json, made from a GGUF file's metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pippin.errors import ModelInvalid, UnsupportedModel
from pippin.models import gguf_blocks
from pippin.models.gguf_file import GgufFile, GgufTensor
from pippin.models.tensor import FloatArray

_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "deepseek2": ("DeepseekV3ForCausalLM", "deepseek_v3"),
}
"""GGUF architecture to the hub's class and model type."""
SUPPORTED = tuple(_CLASSES)
_TOKENS = ("bos", "eos", "padding", "unknown")


@dataclass(frozen=True, slots=True)
class Metadata:
    """A GGUF file's metadata with the architecture's prefix taken care of."""

    path: str
    architecture: str
    values: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelInvalid(
                f"{self.path}: metadata has no {self.architecture}.{key}",
                hint="convert the model with a present llama.cpp, or choose another file",
            )
        return value

    def count(self, key: str) -> int:
        """A number that must be there and positive."""
        return self._positive(key, self.need(key))

    def uniform(self, key: str) -> int:
        """A count that may be given per layer and must be the same in all."""
        value = self.need(key)
        if not isinstance(value, list):
            return self._positive(key, value)
        if len(set(value)) != 1:
            raise UnsupportedModel(
                f"{self.path}: {self.architecture}.{key} differs between layers",
                hint="use the model's safetensors instead of a GGUF file",
            )
        return self._positive(key, value[0])

    def _positive(self, key: str, value: Any) -> int:
        if not isinstance(value, int) or value < 1:
            raise ModelInvalid(
                f"{self.path}: {self.architecture}.{key} is {value!r}", hint="fetch the file again"
            )
        return value

    def dense(self, name: str) -> FloatArray:
        return gguf_blocks.read_float32(self.tensors[name])


def read_metadata(files: list[GgufFile]) -> Metadata:
    """Of a model in one file or split over several (the first has the metadata)."""
    first = files[0]
    architecture = first.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelInvalid(
            f"{first.path}: metadata has no general.architecture",
            hint="this is not a language model's GGUF file",
        )
    tensors: dict[str, GgufTensor] = {}
    for file in files:
        tensors.update(file.tensors)
    return Metadata(str(first.path), architecture, first.metadata, tensors)


def make_config(meta: Metadata) -> dict[str, Any]:
    """Contents of the hub's config.json. Raises ``UnsupportedModel`` for other architectures."""
    if meta.architecture not in _CLASSES:
        raise UnsupportedModel(
            f"{meta.path}: GGUF architecture {meta.architecture!r} is not supported",
            hint=f"supported: {', '.join(SUPPORTED)}",
        )
    name, model_type = _CLASSES[meta.architecture]
    if "token_embd.weight" not in meta.tensors:
        raise ModelInvalid(f"{meta.path}: there is no token_embd.weight")
    heads = meta.uniform("attention.head_count")
    hidden = meta.count("embedding_length")
    layers = meta.count("block_count")
    if layers > len(meta.tensors):
        raise ModelInvalid(
            f"{meta.path}: {len(meta.tensors)} tensors cannot make {layers} layers",
            hint="fetch the whole file again",
        )
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": meta.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.uniform("attention.head_count_kv")
        if meta.get("attention.head_count_kv") is not None
        else heads,
        "head_dim": meta.get("attention.key_length", hidden // heads),
        "intermediate_size": meta.uniform("feed_forward_length"),
        "max_position_embeddings": meta.count("context_length"),
        "rms_norm_eps": meta.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in meta.tensors,
        # The activations' type is not recorded; bfloat16 has the range that Gemma needs.
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in meta.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in meta.tensors,
    }
    for token in _TOKENS:
        key = {"padding": "pad", "unknown": "unk"}.get(token, token)
        # None where the file has none: the defaults of a hub class are another model's.
        config[f"{key}_token_id"] = meta.values.get(f"tokenizer.ggml.{token}_token_id")
    scaling = _rope_scaling(meta, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    extra = _EXTRA.get(meta.architecture)
    if extra is not None:
        extra(meta, config)
    return config


def _rope_scaling(meta: Metadata, config: dict[str, Any]) -> dict[str, Any] | None:
    original = meta.get("rope.scaling.original_context_length")
    if "rope_freqs.weight" in meta.tensors:
        return _llama3_scaling(meta, config)
    if "rope_factors_long.weight" in meta.tensors:
        config["original_max_position_embeddings"] = original
        return {
            "type": "longrope",
            "rope_type": "longrope",
            "long_factor": meta.dense("rope_factors_long.weight").tolist(),
            "short_factor": meta.dense("rope_factors_short.weight").tolist(),
            "original_max_position_embeddings": original,
        }
    if meta.get("rope.scale_linear", 1.0) != 1.0:  # Written before there were types.
        factor = meta.need("rope.scale_linear")
        return {"type": "linear", "rope_type": "linear", "factor": factor}
    kind = meta.get("rope.scaling.type")
    # Phi's short models name longrope without giving factors.
    if kind in (None, "none", "longrope"):
        return None
    factor = meta.need("rope.scaling.factor")
    if kind == "linear":
        return {"type": "linear", "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn_scaling(meta, factor, original or meta.count("context_length"))
    raise UnsupportedModel(
        f"{meta.path}: rope scaling {kind!r} is not supported",
        hint="use the model's safetensors instead of a GGUF file",
    )


def _yarn_scaling(meta: Metadata, factor: float, original: int) -> dict[str, Any]:
    scaling = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    for key, name in (
        ("attention_factor", "yarn_attn_factor"),
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
    ):
        value = meta.get(f"rope.scaling.{name}")
        if value is not None:
            scaling[key] = value
    return scaling


def _llama3_scaling(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3.1's scaling, found from the frequency divisors that GGUF keeps instead.

    The largest divisor is the factor; the other three numbers are the same in all published models
    and are checked by computing the divisors again.
    """
    found = meta.dense("rope_freqs.weight")
    scaling = {
        "rope_type": "llama3",
        "factor": float(found.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = llama3_divisors(scaling, config["head_dim"], config["rope_theta"])
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-3):
        raise UnsupportedModel(
            f"{meta.path}: rope_freqs.weight is not Llama 3.1's rope scaling",
            hint="use the model's safetensors instead of a GGUF file",
        )
    return scaling


def llama3_divisors(scaling: dict[str, Any], head_dim: int, theta: float) -> FloatArray:
    """What each of the ``head_dim / 2`` frequencies is divided by. Source: transformers'
    ``modeling_rope_utils``."""
    frequency = 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    wavelength = 2 * np.pi / frequency
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    divisors = 1 / ((1 - smooth) / factor + smooth)
    return np.asarray(divisors, dtype=np.float32)


def _qwen3moe(meta: Metadata, config: dict[str, Any]) -> None:
    config |= {
        "num_experts": meta.count("expert_count"),
        "num_experts_per_tok": meta.count("expert_used_count"),
        "moe_intermediate_size": meta.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma3(meta: Metadata, config: dict[str, Any]) -> None:
    layers, window = config["num_hidden_layers"], meta.get("attention.sliding_window")
    pattern = meta.get("attention.sliding_window_pattern", 6 if window else 1)
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "layer_types": _layer_types(layers, pattern),
        # llama.cpp has these in its code: the 27B model alone scales by another number, and older
        # files do not record the local layers' rope.
        "query_pre_attn_scalar": config["head_dim"]
        if layers != 62
        else config["hidden_size"] // config["num_attention_heads"],
        "rope_local_base_freq": meta.get("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
    }
    del config["hidden_act"]


def _layer_types(layers: int, pattern: int | list[bool]) -> list[str]:
    """``pattern``: every how many layers one is full; or whether each layer has a window."""
    if isinstance(pattern, list):
        windowed = [bool(item) for item in pattern[:layers]]
    else:
        windowed = [(layer + 1) % pattern != 0 for layer in range(layers)]
    return ["sliding_attention" if item else "full_attention" for item in windowed]


def _phi3(meta: Metadata, config: dict[str, Any]) -> None:
    rotary = meta.get("rope.dimension_count", config["head_dim"])
    config |= {
        # Phi-4's files say 0 for "no window".
        "sliding_window": meta.get("attention.sliding_window") or None,
        "partial_rotary_factor": rotary / config["head_dim"],
    }


def _smollm3(meta: Metadata, config: dict[str, Any]) -> None:
    layers = config["num_hidden_layers"]
    # In llama.cpp's code, not in the file: every fourth layer has no rope.
    config["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(layers)]


def _gpt_oss(meta: Metadata, config: dict[str, Any]) -> None:
    pattern = meta.get("attention.sliding_window_pattern", 2)
    config |= {
        "num_local_experts": meta.count("expert_count"),
        "num_experts_per_tok": meta.count("expert_used_count"),
        "intermediate_size": meta.count("expert_feed_forward_length"),
        "sliding_window": meta.need("attention.sliding_window"),
        "layer_types": _layer_types(config["num_hidden_layers"], pattern),
        "swiglu_limit": 7.0,
    }
    if "rope_scaling" in config:
        config["rope_scaling"] |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}


def _deepseek2(meta: Metadata, config: dict[str, Any]) -> None:
    if meta.get("expert_gating_func", 1) != 2:
        raise UnsupportedModel(
            f"{meta.path}: DeepSeek V2 models (softmax gating) are not supported as GGUF",
            hint="DeepSeek V3, R1 and Kimi K2 files are; or use the model's safetensors",
        )
    rope = meta.count("rope.dimension_count")
    experts = meta.count("expert_count")
    # The groups of DeepSeek V3 are not recorded in older files; its descendants have none.
    groups, used = (8, 4) if experts == 256 else (1, 1)
    config |= {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": meta.get("attention.q_lora_rank"),
        "kv_lora_rank": meta.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        # Files for absorbed attention give the lengths of the latent as key_length.
        "qk_nope_head_dim": meta.get("attention.key_length_mla", config["head_dim"]) - rope,
        "v_head_dim": meta.get("attention.value_length_mla", meta.get("attention.value_length")),
        "n_routed_experts": experts,
        "n_shared_experts": meta.need("expert_shared_count"),
        "num_experts_per_tok": meta.count("expert_used_count"),
        "moe_intermediate_size": meta.count("expert_feed_forward_length"),
        "first_k_dense_replace": meta.get("leading_dense_block_count", 0),
        "routed_scaling_factor": meta.get("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.get("expert_weights_norm", False),
        "n_group": meta.get("expert_group_count", groups),
        "topk_group": meta.get("expert_group_used_count", used),
        "rope_interleave": True,
    }
    del config["head_dim"]
    multiplier = meta.get("rope.scaling.yarn_log_multiplier")
    if multiplier is not None and "rope_scaling" in config:
        # Both are equal in all published models; llama.cpp keeps a tenth of the second.
        mscale = round(10 * multiplier, 4)
        config["rope_scaling"] |= {"mscale": mscale, "mscale_all_dim": mscale}


_EXTRA = {
    "qwen3moe": _qwen3moe,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
}
