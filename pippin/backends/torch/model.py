"""Builds a stage: transformers describes the model, the checkpoint fills our layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

from pippin.backends.torch.batch import Batch
from pippin.backends.torch.kv import Pool
from pippin.backends.torch.layers import (
    Attention,
    AttentionBlock,
    GatedMLP,
    Layer,
    ModuleMLP,
    RMSNorm,
)
from pippin.backends.torch.linear import Linear
from pippin.backends.torch.mla import load_latent
from pippin.backends.torch.rope import Rope
from pippin.backends.torch.weights import Weights
from pippin.errors import ModelInvalid, UnsupportedModel
from pippin.types.model import KVGroup, KVKind

#: Architectures whose layers are known to be described fully by what ``_layer`` reads.
SUPPORTED = (
    "deepseek_v3",
    "gemma3_text",
    "gpt_oss",
    "llama",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)


@dataclass(slots=True)
class StageModel:
    """Layers [first, last) with the embedding on the first stage and the head on the last."""

    config: Any
    groups: tuple[KVGroup, ...]
    """Of the whole model, with the layers of this stage only."""
    layers: list[Layer]
    ropes: list[Rope]
    dtype: torch.dtype
    embedding: torch.Tensor | None
    embedding_scale: torch.Tensor | None
    norm: RMSNorm | None
    head: Linear | None
    logit_softcap: float | None

    def forward(self, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor | None:
        """Logits [rows, vocab] of the wanted rows on the last stage (None where no row is wanted),
        the residual stream [T, hidden_size] on others."""
        if self.embedding is not None:
            hidden = nn.functional.embedding(batch.token_ids, self.embedding)
            if self.embedding_scale is not None:
                hidden = hidden * self.embedding_scale
        assert hidden is not None
        for rope in self.ropes:
            cos, sin = rope.angles(batch)
            batch.ropes.append((cos[:, None].to(self.dtype), sin[:, None].to(self.dtype)))
        if self.head is None or self.norm is None:
            for layer in self.layers:
                hidden = layer(hidden, batch)
            return hidden
        wanted: torch.Tensor | slice = slice(0, 0) if batch.wanted is None else batch.wanted
        for layer in self.layers[:-1]:
            hidden = layer(hidden, batch)
        hidden = self.layers[-1](hidden, batch, wanted)
        if batch.wanted is None:
            return None
        logits = self.head(self.norm(hidden))
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    def allocate(self, num_blocks: tuple[int, ...], block_size: int, device: torch.device) -> None:
        """Make the layers' pools."""
        for layer in self.layers:
            attention = layer.attention
            attention.pool = Pool(
                attention.pool_heads,
                num_blocks[attention.group],
                block_size,
                attention.pool_width,
                self.dtype,
                device,
            )


def read_config(raw: dict[str, Any]) -> Any:
    """transformers' configuration of a checkpoint's config.json.

    Raises ``UnsupportedModel`` for an architecture that is not run here.
    """
    kind = raw.get("model_type")
    if kind not in SUPPORTED:
        named = ", ".join(raw.get("architectures") or ()) or kind or "without a model_type"
        raise UnsupportedModel(
            f"architecture {named} is not supported",
            hint=f"supported model types: {', '.join(SUPPORTED)}",
        )
    plain = {k: v for k, v in raw.items() if k not in ("quantization_config", "quantization")}
    try:
        return AutoConfig.for_model(**plain)
    except (TypeError, ValueError, KeyError, StrictDataclassError) as error:
        raise ModelInvalid(f"config.json does not describe a {kind} model: {error}") from error


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Per layer, its attention window where it is shorter than the context."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    count: int = config.num_hidden_layers
    if window is None or window >= config.max_position_embeddings:
        return (None,) * count
    if kinds is None:
        return (window,) * count
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def kv_groups(
    config: Any, first: int, last: int, bytes_per_token_layer: int
) -> tuple[tuple[KVGroup, ...], dict[int, int]]:
    """The model's groups (only their layers of [first, last)), and each layer's group."""
    windows = layer_windows(config)
    distinct = sorted(set(windows), key=lambda w: (w is not None, w))
    latent = is_latent(config)
    groups = []
    for window in distinct:
        layers = tuple(i for i in range(first, last) if windows[i] == window)
        kind = KVKind.WINDOW if window else KVKind.LATENT if latent else KVKind.FULL
        groups.append(KVGroup(kind, layers, bytes_per_token_layer * len(layers), window))
    return tuple(groups), {i: distinct.index(windows[i]) for i in range(first, last)}


def is_latent(config: Any) -> bool:
    return getattr(config, "kv_lora_rank", None) is not None


def build(config: Any, weights: Weights, first: int, last: int) -> StageModel:
    """Load layers [first, last) of the model that ``config`` describes."""
    skeleton = _skeleton(config, weights.dtype)
    inner = skeleton.model
    if is_latent(config):
        width = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        width = 2 * config.num_key_value_heads * inner.layers[0].self_attn.head_dim
    itemsize = weights.dtype.itemsize
    groups, group_of = kv_groups(config, first, last, width * itemsize)
    rope_types = _rope_types(config)
    rotary = type(inner.rotary_emb)(config=config)
    ropes = [Rope(rotary, config, kind, weights.device) for kind in rope_types]
    layers = [
        _layer(
            inner.layers[i], f"model.layers.{i}", config, weights, group_of[i], _rope_of(config, i)
        )
        for i in range(first, last)
    ]
    is_last = last == config.num_hidden_layers
    embedding, head = _ends(skeleton, weights, first == 0, is_last)
    scale = getattr(inner.embed_tokens, "scalar_embed_scale", None)
    return StageModel(
        config=config,
        groups=groups,
        layers=layers,
        ropes=ropes,
        dtype=weights.dtype,
        embedding=embedding,
        embedding_scale=None
        if scale is None
        else torch.tensor(scale, dtype=weights.dtype, device=weights.device),
        norm=_norm(inner.norm, "model.norm", weights) if is_last else None,
        head=head,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
    )


def _skeleton(config: Any, dtype: torch.dtype) -> Any:
    """The model without weights, in the dtypes that it wants."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _ends(
    skeleton: Any, weights: Weights, is_first: bool, is_last: bool
) -> tuple[torch.Tensor | None, Linear | None]:
    name = "model.embed_tokens.weight"
    tied = not weights.has("lm_head.weight")
    embedding = weights.dense(name) if is_first else None
    if not is_last:
        return embedding, None
    if tied and not getattr(skeleton.config, "tie_word_embeddings", True):
        raise ModelInvalid("the checkpoint has no weight lm_head.weight")
    biases = ("lm_head.bias",) if weights.has("lm_head.bias") else ()
    return embedding, weights.linear((name if tied else "lm_head.weight",), biases)


def _rope_types(config: Any) -> list[str | None]:
    """Layer types with rope parameters of their own; [None] where all layers share them."""
    parameters = config.rope_parameters
    kinds = set(getattr(config, "layer_types", None) or ())
    return sorted(kinds & set(parameters)) or [None]


def _rope_of(config: Any, layer: int) -> int:
    kinds = _rope_types(config)
    return 0 if kinds == [None] else kinds.index(config.layer_types[layer])


def _layer(module: Any, prefix: str, config: Any, weights: Weights, group: int, rope: int) -> Layer:
    names = {name for name, _ in module.named_children()}
    attention_prefix = f"{prefix}.self_attn"
    attention: AttentionBlock
    if is_latent(config):
        attention = load_latent(module.self_attn, attention_prefix, weights, group, rope)
    else:
        attention = _attention(module.self_attn, attention_prefix, config, weights, group, rope)
    post_norm = mlp_post_norm = None
    mlp_norm = "post_attention_layernorm"
    if "pre_feedforward_layernorm" in names:
        mlp_norm = "pre_feedforward_layernorm"
        post_norm = _norm(
            module.post_attention_layernorm, f"{prefix}.post_attention_layernorm", weights
        )
        mlp_post_norm = _norm(
            module.post_feedforward_layernorm, f"{prefix}.post_feedforward_layernorm", weights
        )
    return Layer(
        attention_norm=_norm(module.input_layernorm, f"{prefix}.input_layernorm", weights),
        attention=attention,
        output=_linear(module.self_attn, attention_prefix, ("o_proj",), weights),
        mlp_norm=_norm(getattr(module, mlp_norm), f"{prefix}.{mlp_norm}", weights),
        mlp=_mlp(module.mlp, f"{prefix}.mlp", config, weights),
        attention_post_norm=post_norm,
        mlp_post_norm=mlp_post_norm,
    )


def _attention(
    module: Any, prefix: str, config: Any, weights: Weights, group: int, rope: int
) -> Attention:
    parts = ("qkv_proj",) if hasattr(module, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    has_norms = hasattr(module, "q_norm")
    return Attention(
        qkv=_linear(module, prefix, parts, weights),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=module.head_dim,
        scale=module.scaling,
        group=group,
        rope=rope if getattr(module, "use_rope", True) else None,
        q_norm=_norm(module.q_norm, f"{prefix}.q_norm", weights) if has_norms else None,
        k_norm=_norm(module.k_norm, f"{prefix}.k_norm", weights) if has_norms else None,
        sinks=weights.dense(f"{prefix}.sinks") if hasattr(module, "sinks") else None,
    )


def _linear(module: Any, prefix: str, parts: tuple[str, ...], weights: Weights) -> Linear:
    biases = tuple(
        f"{prefix}.{part}.bias" for part in parts if getattr(module, part).bias is not None
    )
    return weights.linear([f"{prefix}.{part}.weight" for part in parts], biases)


def _mlp(module: Any, prefix: str, config: Any, weights: Weights) -> GatedMLP | ModuleMLP:
    names = {name for name, _ in module.named_children()}
    if "gate_up_proj" in names:
        parts: tuple[str, ...] = ("gate_up_proj",)
    elif {"gate_proj", "up_proj", "down_proj"} <= names:
        parts = ("gate_proj", "up_proj")
    else:
        weights.fill(module, prefix)
        return ModuleMLP(module.eval())
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    return GatedMLP(
        gate_up=_linear(module, prefix, parts, weights),
        down=_linear(module, prefix, ("down_proj",), weights),
        act=ACT2FN[activation],
    )


def _norm(module: Any, prefix: str, weights: Weights) -> RMSNorm:
    weight = weights.dense(f"{prefix}.weight", torch.float32)
    if type(module).__name__.startswith("Gemma"):
        weight = weight + 1.0
    eps = getattr(module, "variance_epsilon", None)
    return RMSNorm(weight, module.eps if eps is None else eps)
