"""Which GGUF tensors make up which hub parameter, per architecture.

llama.cpp's converter renames, permutes, shifts, stacks and splits the parameters of the hub's
models; a ``Recipe`` undoes that for one parameter. Names follow gguf-py's ``tensor_mapping.py``,
the changes llama.cpp's ``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from pippin.models.gguf_blocks import read, read_float32
from pippin.models.gguf_file import GgufTensor
from pippin.models.quant import Tensor
from pippin.models.tensor import DenseTensor, FloatArray, bfloat16_bits

Make = Callable[[Sequence[GgufTensor]], Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one hub parameter."""

    sources: tuple[str, ...]
    """GGUF tensor names."""
    expert: int | None = None
    """Part of the first axis of the one source, where experts are stacked."""
    make: Make | None = None
    """From the sources to the parameter; None: there is one, taken as it is."""

    def __call__(self, tensors: Mapping[str, GgufTensor]) -> Tensor:
        parts = [tensors[source] for source in self.sources]
        return read(parts[0], self.expert) if self.make is None else self.make(parts)


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

_MLA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}

_LAYER_NAMES: dict[str, dict[str, str]] = {
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
    "deepseek2": _MLA | _MLP | _EXPERTS,
    "gpt-oss": _ATTENTION
    | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
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
        yield f"{_GLOBAL[stem]}.{suffix}", Recipe((name,), make=_unshift if shifted else None)
        return
    block, layer, part = stem.split(".", 2) if stem.count(".") >= 2 else ("", "", stem)
    special = _SPECIAL.get(architecture, {})
    if block == "blk" and f"{part}.{suffix}" in special:
        recipe = special[f"{part}.{suffix}"]
        if recipe is not None:
            hub, parts, make = recipe
            sources = tuple(f"blk.{layer}.{source}" for source in parts)
            yield f"model.layers.{layer}.{hub}", Recipe(sources, make=make)
        return
    target = _LAYER_NAMES[architecture].get(part)
    if target is None or block != "blk":
        raise KeyError(name)
    target = f"model.layers.{layer}.{target}.{suffix}"
    if "{expert}" in target:
        for expert in range(config.get("num_experts") or config["n_routed_experts"]):
            yield target.format(expert=expert), Recipe((name,), expert=expert)
        return
    change: Make | None = None
    if architecture in _PERMUTED and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        change = _unpermute(heads)
    elif architecture in _SHIFTED and part.endswith("norm"):
        change = _unshift
    yield target, Recipe((name,), make=change)


def _unshift(parts: Sequence[GgufTensor]) -> Tensor:
    return DenseTensor(read_float32(parts[0]) - np.float32(1), "float32")


def _unpermute(heads: int) -> Make:
    def make(parts: Sequence[GgufTensor]) -> Tensor:
        weight = read(parts[0])
        return weight.take_rows(hub_row_order(weight.shape[0], heads))

    return make


def hub_row_order(rows: int, heads: int) -> NDArray[np.intp]:
    """For each row of the hub's q or k weight (halves of a head apart), its row in GGUF's."""
    order = np.arange(rows, dtype=np.intp).reshape(heads, rows // heads // 2, 2)
    return order.swapaxes(1, 2).reshape(-1)


def _join_kv_b(parts: Sequence[GgufTensor]) -> Tensor:
    """k_b [heads, rank, nope] (transposed for absorbed attention) and v_b [heads, v, rank] back to
    kv_b_proj [heads * (nope + v), rank]."""
    k_b, v_b = read_float32(parts[0]), read_float32(parts[1])
    joined = np.concatenate([k_b.swapaxes(1, 2), v_b], axis=1)
    return DenseTensor(joined.reshape(-1, joined.shape[2]), "float32")


def _experts_gate_up(parts: Sequence[GgufTensor]) -> Tensor:
    """Gate and up [experts, inner, hidden] to [experts, hidden, 2 inner], columns taking turns."""
    gate, up = parts
    experts, inner, hidden = gate.shape
    out = _Transposed(parts, (experts, hidden, 2 * inner))
    # One expert at a time: as float32 all of them may not fit in memory.
    for expert in range(experts):
        for first, source in enumerate((gate, up)):
            out.data[expert, :, first::2] = out.encode(read_float32(source, expert)).T
    return out.tensor()


def _experts_down(parts: Sequence[GgufTensor]) -> Tensor:
    """Down [experts, hidden, inner] to [experts, inner, hidden]."""
    experts, hidden, inner = parts[0].shape
    out = _Transposed(parts, (experts, inner, hidden))
    for expert in range(experts):
        out.data[expert] = out.encode(read_float32(parts[0], expert)).T
    return out.tensor()


class _Transposed:
    """An array being filled: bfloat16 where that is exact (MXFP4's two significant bits), else
    float32."""

    def __init__(self, parts: Sequence[GgufTensor], shape: tuple[int, ...]) -> None:
        exact = (GGMLQuantizationType.MXFP4, GGMLQuantizationType.BF16)
        self.bits = all(part.kind in exact for part in parts)
        self.data: NDArray[Any] = np.empty(shape, np.uint16 if self.bits else np.float32)

    def encode(self, values: FloatArray) -> NDArray[Any]:
        return bfloat16_bits(values) if self.bits else values

    def tensor(self) -> DenseTensor:
        return DenseTensor(self.data, "bfloat16" if self.bits else "float32")


def _experts_gate_up_bias(parts: Sequence[GgufTensor]) -> Tensor:
    gate, up = (read_float32(part) for part in parts)
    both: FloatArray = np.stack([gate, up], axis=2).reshape(gate.shape[0], -1)
    return DenseTensor(both, "float32")


_SPECIAL: dict[str, dict[str, tuple[str, tuple[str, ...], Make | None] | None]] = {
    "deepseek2": {
        "attn_k_b.weight": (
            "self_attn.kv_b_proj.weight",
            ("attn_k_b.weight", "attn_v_b.weight"),
            _join_kv_b,
        ),
        "attn_v_b.weight": None,
        "exp_probs_b.bias": ("mlp.gate.e_score_correction_bias", ("exp_probs_b.bias",), None),
    },
    "gpt-oss": {
        "attn_sinks.weight": ("self_attn.sinks", ("attn_sinks.weight",), None),
        "ffn_gate_exps.weight": (
            "mlp.experts.gate_up_proj",
            ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
            _experts_gate_up,
        ),
        "ffn_up_exps.weight": None,
        "ffn_gate_exps.bias": (
            "mlp.experts.gate_up_proj_bias",
            ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
            _experts_gate_up_bias,
        ),
        "ffn_up_exps.bias": None,
        "ffn_down_exps.weight": (
            "mlp.experts.down_proj",
            ("ffn_down_exps.weight",),
            _experts_down,
        ),
        "ffn_down_exps.bias": ("mlp.experts.down_proj_bias", ("ffn_down_exps.bias",), None),
    },
}
"""Parameters that are not one renamed tensor: by the first of their tensors, the hub name, all
tensors, and how to make it. None: a tensor that belongs to another entry."""
