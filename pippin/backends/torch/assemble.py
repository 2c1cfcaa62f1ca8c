"""Builds one layer of ours from a layer of transformers (its structure) and a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from transformers.activations import ACT2FN

from pippin.backends.description import is_latent
from pippin.backends.shard import Span
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
from pippin.backends.torch.native.ops import ACTIVATIONS
from pippin.backends.torch.rope import pairs_from_halves, uses_pairs
from pippin.backends.torch.shard import Cut, FeedForward
from pippin.backends.torch.weights import Part, Weights


def assemble(
    module: Any,
    prefix: str,
    config: Any,
    weights: Weights,
    cut: Cut,
    *,
    group: int,
    rope: int,
    rotary_dim: int,
) -> Layer:
    """``module``: a decoder layer on the meta device, called ``prefix`` in the checkpoint.

    ``cut``: this rank's part of it.
    ``group`` is its KV group, ``rope`` the number of its rope, which turns ``rotary_dim`` columns
    of a head.
    """
    names = {name for name, _ in module.named_children()}
    attention_prefix = f"{prefix}.self_attn"
    attention_norm = load_norm(module.input_layernorm, f"{prefix}.input_layernorm", weights)
    attention: AttentionBlock
    if is_latent(config):
        attention = load_latent(module.self_attn, attention_prefix, weights, cut, group, rope)
    else:
        attention = _attention(
            module.self_attn,
            attention_prefix,
            weights,
            cut,
            group,
            rope,
            rotary_dim,
        )
    post_norm = mlp_post_norm = None
    mlp_norm_name = "post_attention_layernorm"
    if "pre_feedforward_layernorm" in names:
        mlp_norm_name = "pre_feedforward_layernorm"
        post_norm = load_norm(
            module.post_attention_layernorm, f"{prefix}.post_attention_layernorm", weights
        )
        mlp_post_norm = load_norm(
            module.post_feedforward_layernorm, f"{prefix}.post_feedforward_layernorm", weights
        )
    mlp_norm = load_norm(getattr(module, mlp_norm_name), f"{prefix}.{mlp_norm_name}", weights)
    return Layer(
        attention_norm=attention_norm,
        attention=attention,
        output=_output(module.self_attn, attention_prefix, attention, weights, cut),
        mlp_norm=mlp_norm,
        mlp=_mlp(module.mlp, f"{prefix}.mlp", config, weights, cut),
        attention_post_norm=post_norm,
        mlp_post_norm=mlp_post_norm,
    )


def _attention(
    module: Any,
    prefix: str,
    weights: Weights,
    cut: Cut,
    group: int,
    rope: int,
    rotary_dim: int,
) -> Attention:
    shard, width = cut.shard, module.head_dim
    heads, kv_heads = shard.heads.count, shard.kv_heads.count
    kernels = weights.kernels
    if kernels is not None and not kernels.fits_head(weights.dtype, width):
        kernels = None
    uses_rope = getattr(module, "use_rope", True)
    order = rows = None
    if uses_rope and uses_pairs(weights.dtype):
        order = pairs_from_halves(heads + kv_heads, width, rotary_dim)
        rows = torch.cat((order, torch.arange(kv_heads * width) + len(order)))
    qk_norm = None
    if hasattr(module, "q_norm"):
        norms = [weights.dense(f"{prefix}.{n}.weight", torch.float32) for n in ("q_norm", "k_norm")]
        weight = torch.cat((norms[0].expand(heads, -1), norms[1].expand(kv_heads, -1)))
        if order is not None:
            weight = weight.reshape(-1)[order.to(weight.device)].view(-1, width)
        weight = weight + _weight_offset(module.q_norm)
        qk_norm = RMSNorm(weight, _eps(module.q_norm), kernels)
    return Attention(
        qkv=_qkv(module, prefix, weights, cut, rows),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        scale=module.scaling,
        group=group,
        rope=rope if uses_rope else None,
        qk_norm=qk_norm,
        sinks=weights.dense(cut.rows(f"{prefix}.sinks", [shard.heads])[0], torch.float32)
        if hasattr(module, "sinks")
        else None,
        kernels=kernels,
    )


def _qkv(module: Any, prefix: str, weights: Weights, cut: Cut, rows: torch.Tensor | None) -> Linear:
    width = module.head_dim
    queries, keys = cut.shard.heads.times(width), cut.shard.kv_heads.times(width)
    if hasattr(module, "qkv_proj"):
        all_queries = module.config.num_attention_heads * width
        all_keys = module.config.num_key_value_heads * width
        values = keys.shift(all_queries + all_keys)
        spans = {"qkv_proj": [queries, keys.shift(all_queries), values]}
    else:
        spans = {"q_proj": [queries], "k_proj": [keys], "v_proj": [keys]}
    return weights.linear(*_row_parts(module, prefix, spans, cut), rows=rows)


def _row_parts(
    module: Any, prefix: str, spans: dict[str, list[Span]], cut: Cut
) -> tuple[list[Part], list[Part]]:
    """Weights and biases of projections that are cut along their outputs."""
    parts: list[Part] = []
    biases: list[Part] = []
    for name, own in spans.items():
        parts += cut.rows(f"{prefix}.{name}.weight", own)
        if getattr(module, name).bias is not None:
            biases += cut.rows(f"{prefix}.{name}.bias", own)
    return parts, biases


def _column_linear(
    module: Any, prefix: str, name: str, span: Span, weights: Weights, cut: Cut
) -> Linear:
    """A projection that is cut along its inputs, without the sum."""
    has_bias = getattr(module, name).bias is not None
    biases = cut.bias([f"{prefix}.{name}.bias"] if has_bias else [])
    return weights.linear([cut.columns(f"{prefix}.{name}.weight", span)], biases)


def _output(
    module: Any, prefix: str, attention: AttentionBlock, weights: Weights, cut: Cut
) -> Linear:
    span = cut.shard.heads.times(attention.value_width)
    return cut.summed(_column_linear(module, prefix, "o_proj", span, weights, cut))


def _mlp(module: Any, prefix: str, config: Any, weights: Weights, cut: Cut) -> FeedForward:
    names = {name for name, _ in module.named_children()}
    fused = "gate_up_proj" in names
    if not fused and not {"gate_proj", "up_proj", "down_proj"} <= names:
        return _experts(module, prefix, config, weights, cut)
    width = module.down_proj.in_features
    span = cut.shard.columns(width)
    if fused:
        spans = {"gate_up_proj": [span, span.shift(width)]}
    else:
        spans = {"gate_proj": [span], "up_proj": [span]}
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    kernels = weights.kernels
    if kernels is not None and (
        activation not in ACTIVATIONS or not kernels.fits(weights.dtype, span.count)
    ):
        kernels = None
    return GatedMLP(
        gate_up=weights.linear(*_row_parts(module, prefix, spans, cut)),
        down=cut.summed(_column_linear(module, prefix, "down_proj", span, weights, cut)),
        act=ACT2FN[activation],
        kernels=kernels,
        kernel_act=ACTIVATIONS.get(activation, 0),
    )


def _experts(module: Any, prefix: str, config: Any, weights: Weights, cut: Cut) -> FeedForward:
    """A mixture of experts, on transformers' own module."""
    weights.fill(module, prefix, cut.choose)
    return cut.summed_block(ModuleMLP(module.eval()))


def load_norm(module: Any, prefix: str, weights: Weights) -> RMSNorm:
    weight = weights.dense(f"{prefix}.weight", torch.float32)
    kernels = weights.kernels
    if kernels is not None and not kernels.fits(weights.dtype, len(weight)):
        kernels = None
    return RMSNorm(weight + _weight_offset(module), _eps(module), kernels)


def _weight_offset(norm: Any) -> float:
    """Gemma's norms multiply by 1 + weight."""
    return 1.0 if type(norm).__name__.startswith("Gemma") else 0.0


def _eps(norm: Any) -> float:
    eps: float | None = getattr(norm, "variance_epsilon", None)
    return float(norm.eps) if eps is None else eps
