"""Which GGUF tensors make up which hub parameter, per architecture.

llama.cpp's converter renames, permutes, shifts, stacks and splits the parameters of the hub's
models; a ``Recipe`` undoes that for one parameter. Names follow gguf-py's ``tensor_mapping.py``,
the changes llama.cpp's ``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.models.quant import Tensor
from pippin.models.tensor import DenseTensor

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one hub parameter."""

    sources: tuple[str, ...]
    """GGUF tensor names."""
    expert: int | None = None
    """Part of the first axis of each source, where experts are stacked."""
    combine: Callable[[list[Tensor]], Tensor] | None = None
    """From the sources to the parameter; None: there is one, taken as it is."""


_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
_LLAMA = _ATTENTION | _MLP | {"ffn_norm": "post_attention_layernorm"}
_GEMMA = (
    _ATTENTION
    | _MLP
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)

LAYER_NAMES: dict[str, dict[str, str]] = {
    "llama": _LLAMA,
    "smollm3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3moe": _ATTENTION | _EXPERTS | {"ffn_norm": "post_attention_layernorm"},
    "gemma3": _GEMMA,
    "phi3": {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
}
"""Per architecture: part of a GGUF name after ``blk.N.`` to part of a hub name after the layer."""

_PERMUTED = frozenset({"llama", "smollm3"})
"""Rows of q and k are stored in the order of ggml's own rope (pairs as neighbours)."""
_SHIFTED = frozenset({"gemma3"})
"""Norm weights are stored with 1 added."""
_DERIVED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Not parameters: they repeat the configuration, which is made from them."""


def recipes(
    architecture: str, config: dict[str, Any], tensors: Collection[str]
) -> dict[str, Recipe]:
    """Recipes for all hub parameters that ``tensors`` hold, by hub name.

    Raises ``KeyError`` with the tensor's name for one that no parameter needs.
    """
    made: dict[str, Recipe] = {}
    for name in tensors:
        if name not in _DERIVED:
            made.update(_recipes_of(architecture, config, name))
    return made


def _recipes_of(
    architecture: str, config: dict[str, Any], name: str
) -> Iterator[tuple[str, Recipe]]:
    stem, _, suffix = name.rpartition(".")
    if stem in _GLOBAL:
        shifted = architecture in _SHIFTED and stem == "output_norm"
        yield (
            f"{_GLOBAL[stem]}.{suffix}",
            Recipe((name,), combine=_single(_shift if shifted else None)),
        )
        return
    _, layer, part = stem.split(".", 2) if stem.startswith("blk.") else ("", "", stem)
    if part == "rope_freqs":
        return
    hub = LAYER_NAMES[architecture].get(part)
    if hub is None or not layer:
        raise KeyError(name)
    target = f"model.layers.{layer}.{hub}.{suffix}"
    if "{expert}" in target:
        for expert in range(config["num_experts"]):
            yield target.format(expert=expert), Recipe((name,), expert=expert)
        return
    change: Change | None = None
    if architecture in _PERMUTED and part in ("attn_q", "attn_k"):
        change = _unpermute(config, part)
    elif architecture in _SHIFTED and part.endswith("norm"):
        change = _shift
    yield target, Recipe((name,), combine=_single(change))


def _single(change: Change | None) -> Callable[[list[Tensor]], Tensor] | None:
    if change is None:
        return None
    return lambda parts: change(parts[0])


def _shift(norm: Tensor) -> Tensor:
    if not isinstance(norm, DenseTensor):
        raise TypeError("a norm's weight is dense")
    return DenseTensor(norm.to_float32() - 1, "float32")


def _unpermute(config: dict[str, Any], part: str) -> Change:
    heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]

    def change(weight: Tensor) -> Tensor:
        return weight.take_rows(hub_row_order(weight.shape[0], heads))

    return change


def hub_row_order(rows: int, heads: int) -> NDArray[np.intp]:
    """For each row of the hub's q or k weight (halves of a head apart), its row in GGUF's."""
    order = np.arange(rows, dtype=np.intp).reshape(heads, rows // heads // 2, 2)
    return order.swapaxes(1, 2).reshape(-1)
