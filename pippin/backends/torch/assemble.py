"""Builds one layer of ours from a layer of transformers (its structure) and a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from transformers.activations import ACT2FN

from pippin.backends.description import is_latent
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
from pippin.backends.torch.weights import Weights


def assemble(
    module: Any,
    prefix: str,
    config: Any,
    weights: Weights,
    *,
    group: int,
    rope: int,
    rotary_dim: int,
) -> Layer:
    """``module``: a decoder layer on the meta device, called ``prefix`` in the checkpoint.

    ``group`` is its KV group, ``rope`` the number of its rope, which turns ``rotary_dim`` columns
    of a head.
    """
    names = {name for name, _ in module.named_children()}
    attention_prefix = f"{prefix}.self_attn"
    attention_norm = load_norm(module.input_layernorm, f"{prefix}.input_layernorm", weights)
    attention: AttentionBlock
    if is_latent(config):
        attention = load_latent(module.self_attn, attention_prefix, weights, group, rope)
    else:
        attention = _attention(
            module.self_attn,
            attention_prefix,
            config,
            weights,
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
        output=_linear(module.self_attn, attention_prefix, ("o_proj",), weights),
        mlp_norm=mlp_norm,
        mlp=_mlp(module.mlp, f"{prefix}.mlp", config, weights),
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
    rotary_dim: int,
) -> Attention:
    parts = ("qkv_proj",) if hasattr(module, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    heads, kv_heads, width = (
        config.num_attention_heads,
        config.num_key_value_heads,
        module.head_dim,
    )
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
        qkv=_linear(
            module,
            prefix,
            parts,
            weights,
            rows=rows,
        ),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        scale=module.scaling,
        group=group,
        rope=rope if uses_rope else None,
        qk_norm=qk_norm,
        sinks=weights.dense(f"{prefix}.sinks", torch.float32) if hasattr(module, "sinks") else None,
        kernels=kernels,
    )


def _linear(
    module: Any, prefix: str, parts: tuple[str, ...], weights: Weights, **changes: Any
) -> Linear:
    biases = tuple(
        f"{prefix}.{part}.bias" for part in parts if getattr(module, part).bias is not None
    )
    return weights.linear([f"{prefix}.{part}.weight" for part in parts], biases, **changes)


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
    kernels = weights.kernels
    if kernels is not None and (
        activation not in ACTIVATIONS or not kernels.fits(weights.dtype, config.intermediate_size)
    ):
        kernels = None
    return GatedMLP(
        gate_up=_linear(module, prefix, parts, weights),
        down=_linear(module, prefix, ("down_proj",), weights),
        act=ACT2FN[activation],
        kernels=kernels,
        kernel_act=ACTIVATIONS.get(activation, 0),
    )


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
