"""The hub's config.json, made from a GGUF file's metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pippin.errors import ModelInvalid, UnsupportedModel
from pippin.models import gguf_blocks
from pippin.models.gguf_file import GgufFile, GgufTensor
from pippin.models.tensor import DenseTensor, FloatArray

_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
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

    def uniform(self, key: str) -> Any:
        """A value that may be given per layer and must be the same in all."""
        value = self.need(key)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise UnsupportedModel(
                f"{self.path}: {self.architecture}.{key} differs between layers",
                hint="use the model's safetensors instead of a GGUF file",
            )
        return value[0]

    def dense(self, name: str) -> FloatArray:
        tensor = gguf_blocks.read(self.tensors[name])
        if not isinstance(tensor, DenseTensor):
            raise ModelInvalid(f"{self.path}: {name} is quantised, which it must not be")
        return tensor.to_float32()


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
    hidden = meta.need("embedding_length")
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": meta.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": meta.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.uniform("attention.head_count_kv")
        if meta.get("attention.head_count_kv") is not None
        else heads,
        "head_dim": meta.get("attention.key_length", hidden // heads),
        "intermediate_size": meta.uniform("feed_forward_length"),
        "max_position_embeddings": meta.need("context_length"),
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
        value = meta.values.get(f"tokenizer.ggml.{token}_token_id")
        if value is not None:
            config[f"{key}_token_id"] = value
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
        scaling = {
            "type": "longrope",
            "rope_type": "longrope",
            "long_factor": meta.dense("rope_factors_long.weight").tolist(),
            "short_factor": meta.dense("rope_factors_short.weight").tolist(),
        }
        return scaling
    kind = meta.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    factor = meta.need("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "type": "linear", "factor": factor}
    if kind == "yarn":
        yarn = {"rope_type": "yarn", "type": "yarn", "factor": factor}
        return yarn | {"original_max_position_embeddings": original or meta.need("context_length")}
    raise UnsupportedModel(f"{meta.path}: rope scaling {kind!r} is not supported")


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
        "num_experts": meta.need("expert_count"),
        "num_experts_per_tok": meta.need("expert_used_count"),
        "moe_intermediate_size": meta.need("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma3(meta: Metadata, config: dict[str, Any]) -> None:
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": meta.need("attention.sliding_window"),
        "query_pre_attn_scalar": config["head_dim"],
        # llama.cpp has these two numbers in its code, not in the file.
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
    }
    del config["hidden_act"]


def _phi3(meta: Metadata, config: dict[str, Any]) -> None:
    rotary = meta.get("rope.dimension_count", config["head_dim"])
    config |= {
        "sliding_window": meta.get("attention.sliding_window"),
        "partial_rotary_factor": rotary / config["head_dim"],
        "pad_token_id": config.get("pad_token_id", 32000),
    }


_EXTRA = {"qwen3moe": _qwen3moe, "gemma3": _gemma3, "phi3": _phi3}
