"""Builds a stage: transformers describes the model, the checkpoint fills our layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN

from pippin.backends.description import is_latent, kv_groups
from pippin.backends.torch.batch import Batch
from pippin.backends.torch.kv import Pool, Scratch
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
from pippin.backends.torch.rope import Rope, pairs_from_halves, uses_pairs
from pippin.backends.torch.weights import Weights
from pippin.errors import ModelInvalid
from pippin.types.model import KVGroup

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


_EMBEDDING = "model.embed_tokens.weight"


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
            batch.rotations.append(rope.rotation(batch))
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
        scratch = Scratch()
        for layer in self.layers:
            attention = layer.attention
            attention.pool = Pool(
                attention.pool_heads,
                num_blocks[attention.group],
                block_size,
                attention.pool_width,
                self.dtype,
                device,
                scratch,
            )


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
    ropes = [Rope(rotary, config, kind, weights.device, weights.dtype) for kind in rope_types]
    layers = [
        _layer(
            inner.layers[i], f"model.layers.{i}", config, weights, group_of[i], _rope_of(config, i)
        )
        for i in range(first, last)
    ]
    is_last = last == config.num_hidden_layers
    norm = _norm(inner.norm, "model.norm", weights) if is_last else None
    scale = getattr(inner.embed_tokens, "scalar_embed_scale", None)
    return StageModel(
        config=config,
        groups=groups,
        layers=layers,
        ropes=ropes,
        dtype=weights.dtype,
        embedding=weights.dense(_EMBEDDING) if first == 0 else None,
        embedding_scale=None
        if scale is None
        else torch.tensor(scale, dtype=weights.dtype, device=weights.device),
        norm=norm,
        head=None if norm is None else _head(config, weights, norm),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
    )


def _skeleton(config: Any, dtype: torch.dtype) -> Any:
    """The model without weights, in the dtypes that it wants."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _head(config: Any, weights: Weights, norm: RMSNorm) -> Linear:
    name = "lm_head.weight"
    if not weights.has(name):
        if not getattr(config, "tie_word_embeddings", True):
            raise ModelInvalid(f"the checkpoint has no weight {name}")
        name = _EMBEDDING
    biases = ("lm_head.bias",) if weights.has("lm_head.bias") else ()
    return weights.linear((name,), biases, columns=_fold(norm, weights))


def _fold(norm: RMSNorm, weights: Weights) -> torch.Tensor | None:
    """The norm's weight, where it is multiplied into the linear behind: only float32 loses nothing
    by that."""
    return norm.fold() if weights.dtype == torch.float32 else None


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
    attention_norm = _norm(module.input_layernorm, f"{prefix}.input_layernorm", weights)
    attention: AttentionBlock
    if is_latent(config):
        attention = load_latent(module.self_attn, attention_prefix, weights, group, rope)
    else:
        attention = _attention(
            module.self_attn, attention_prefix, config, weights, group, rope, attention_norm
        )
    post_norm = mlp_post_norm = None
    mlp_norm_name = "post_attention_layernorm"
    if "pre_feedforward_layernorm" in names:
        mlp_norm_name = "pre_feedforward_layernorm"
        post_norm = _norm(
            module.post_attention_layernorm, f"{prefix}.post_attention_layernorm", weights
        )
        mlp_post_norm = _norm(
            module.post_feedforward_layernorm, f"{prefix}.post_feedforward_layernorm", weights
        )
    mlp_norm = _norm(getattr(module, mlp_norm_name), f"{prefix}.{mlp_norm_name}", weights)
    return Layer(
        attention_norm=attention_norm,
        attention=attention,
        output=_linear(module.self_attn, attention_prefix, ("o_proj",), weights),
        mlp_norm=mlp_norm,
        mlp=_mlp(module.mlp, f"{prefix}.mlp", config, weights, mlp_norm),
        attention_post_norm=post_norm,
        mlp_post_norm=mlp_post_norm,
    )


def _attention(
    module: Any,
    prefix: str,
    config: Any,
    weights: Weights,
    group: int,
    rope: int,
    norm: RMSNorm,
) -> Attention:
    parts = ("qkv_proj",) if hasattr(module, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    heads, kv_heads, width = (
        config.num_attention_heads,
        config.num_key_value_heads,
        module.head_dim,
    )
    uses_rope = getattr(module, "use_rope", True)
    order = torch.arange(heads + kv_heads)[:, None] * width + torch.arange(width)
    order = order.reshape(-1)
    if uses_rope and uses_pairs(weights.dtype):
        order = pairs_from_halves(heads + kv_heads, width, rotary_dim)
    values = torch.arange(kv_heads * width) + len(order)
    scale: float = module.scaling
    row_scale = None
    if weights.dtype == torch.float32 and not hasattr(module, "q_norm"):
        # Scores are scaled through the queries' weights.
        row_scale = torch.ones((heads + 2 * kv_heads) * width)
        row_scale[: heads * width] = scale
        scale = 1.0
    qk_norm = None
    if hasattr(module, "q_norm"):
        norms = [weights.dense(f"{prefix}.{n}.weight", torch.float32) for n in ("q_norm", "k_norm")]
        weight = torch.cat((norms[0].expand(heads, -1), norms[1].expand(kv_heads, -1)))
        weight = (weight.reshape(-1)[order.to(weight.device)]).view(-1, width)
        qk_norm = RMSNorm(weight + _weight_offset(module.q_norm), _eps(module.q_norm))
    return Attention(
        qkv=_linear(
            module,
            prefix,
            parts,
            weights,
            columns=_fold(norm, weights),
            rows=torch.cat((order, values)),
            row_scale=row_scale,
        ),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        scale=scale,
        group=group,
        rope=rope if uses_rope else None,
        qk_norm=qk_norm,
        sinks=weights.dense(f"{prefix}.sinks") if hasattr(module, "sinks") else None,
    )


def _linear(
    module: Any, prefix: str, parts: tuple[str, ...], weights: Weights, **changes: Any
) -> Linear:
    biases = tuple(
        f"{prefix}.{part}.bias" for part in parts if getattr(module, part).bias is not None
    )
    return weights.linear([f"{prefix}.{part}.weight" for part in parts], biases, **changes)


def _mlp(
    module: Any, prefix: str, config: Any, weights: Weights, norm: RMSNorm
) -> GatedMLP | ModuleMLP:
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
        gate_up=_linear(module, prefix, parts, weights, columns=_fold(norm, weights)),
        down=_linear(module, prefix, ("down_proj",), weights),
        act=ACT2FN[activation],
    )


def _norm(module: Any, prefix: str, weights: Weights) -> RMSNorm:
    weight = weights.dense(f"{prefix}.weight", torch.float32)
    return RMSNorm(weight + _weight_offset(module), _eps(module))


def _weight_offset(norm: Any) -> float:
    """Gemma's norms multiply by 1 + weight."""
    return 1.0 if type(norm).__name__.startswith("Gemma") else 0.0


def _eps(norm: Any) -> float:
    eps: float | None = getattr(norm, "variance_epsilon", None)
    return float(norm.eps) if eps is None else eps
