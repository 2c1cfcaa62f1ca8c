"""Cuts mlx-lm's layers to one rank's part (``backends.shard`` says which), and sums the parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pippin.backends.description import is_latent
from pippin.backends.mlx.group import Group
from pippin.backends.shard import Shard, Span, make_shard, sizes_of

#: Names of the weights that are cut along their columns.
_CUT_COLUMNS = ("o_proj", "down_proj")

#: What mlx-lm's attentions call their numbers of heads.
_HEADS = ("n_heads", "num_heads", "num_attention_heads")
_KV_HEADS = ("n_kv_heads", "num_key_value_heads")


class Summed(nn.Module):
    """A block whose ranks each compute a part of the sum."""

    def __init__(self, block: nn.Module, group: Group) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.block = block
        self._group = group

    def __call__(self, x: mx.array, *args: Any, **options: Any) -> mx.array:
        return self._group.sum(self.block(x, *args, **options))


class Head:
    """Logits [rows, 1, vocab] from each rank's rows of the weight, on all ranks."""

    def __init__(self, module: Any, tied: bool, shard: Shard, group: Group) -> None:
        """``module``: a linear, which is cut, or an embedding, which stays whole."""
        spans = shard.vocabulary(module.weight.shape[0])
        self._widths = tuple(span.count for span in spans)
        self._group = group
        self.part = _copy(module) if tied else module
        _rows(self.part, [spans[shard.rank]])
        self._apply = self.part.as_linear if tied else self.part

    def __call__(self, x: mx.array) -> mx.array:
        return self._group.gather(self._apply(x)[:, 0], self._widths)[:, None]


def shard_of(config: Any, group: Group, layer: Any = None) -> Shard:
    """This rank's part of the model, or of a layer, whose quantised weights can be parted between
    groups only. Raises ``ConfigError`` where the model has no such part."""
    unit = 1
    for name, module in layer.named_modules() if layer is not None else ():
        if name.rpartition(".")[2] in _CUT_COLUMNS:
            unit = max(unit, getattr(module, "group_size", 1))
    return make_shard(sizes_of(config, unit), group.rank, group.size)


def cut_layer(layer: Any, config: Any, group: Group) -> None:
    """Keep this rank's part of a loaded layer. Raises ``ConfigError``."""
    shard = shard_of(config, group, layer)
    if is_latent(config):
        _cut_latent(layer.self_attn, shard)
    else:
        _cut_attention(layer.self_attn, config, shard)
    for _, block in layer.mlp.named_modules():
        if "down_proj" in block:
            _cut_feed_forward(block, shard)
    layer.self_attn = Summed(layer.self_attn, group)
    layer.mlp = Summed(layer.mlp, group)


def _cut_attention(attention: Any, config: Any, shard: Shard) -> None:
    heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    query, key = shard.heads.times(width), shard.kv_heads.times(width)
    if "qkv_proj" in attention:
        first_key, first_value = heads * width, (heads + kv_heads) * width
        _rows(attention.qkv_proj, [query, key.shift(first_key), key.shift(first_value)])
    else:
        _rows(attention.q_proj, [query])
        _rows(attention.k_proj, [key])
        _rows(attention.v_proj, [key])
    _columns(attention.o_proj, query, first=shard.first)
    if "sinks" in attention:
        attention.sinks = _own(attention.sinks[shard.heads.start : shard.heads.stop])
    _set_counts(attention, _HEADS, shard.heads.count)
    _set_counts(attention, _KV_HEADS, shard.kv_heads.count)


def _cut_latent(attention: Any, shard: Shard) -> None:
    query = attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj
    _rows(query, [shard.heads.times(attention.q_head_dim)])
    for per_head in (attention.embed_q, attention.unembed_out):
        for name in ("weight", "scales", "biases"):
            if per_head.get(name) is not None:
                per_head[name] = _own(per_head[name][shard.heads.start : shard.heads.stop])
    _columns(attention.o_proj, shard.heads.times(attention.v_head_dim), first=shard.first)
    _set_counts(attention, _HEADS, shard.heads.count)


def _cut_feed_forward(block: Any, shard: Shard) -> None:
    """Dense ([out, in]) or experts ([experts, out, in])."""
    width = _width(block.down_proj)
    span = shard.columns(width)
    if "gate_up_proj" in block:
        _rows(block.gate_up_proj, [span, span.shift(width)])
    else:
        _rows(block.gate_proj, [span])
        _rows(block.up_proj, [span])
    _columns(block.down_proj, span, first=shard.first)


def _set_counts(attention: Any, names: Sequence[str], count: int) -> None:
    for name in names:
        if hasattr(attention, name):
            setattr(attention, name, count)


def _width(module: Any) -> int:
    stored = int(module.weight.shape[-1])
    return stored * 32 // module.bits if "scales" in module else stored


def _rows(module: Any, spans: Sequence[Span]) -> None:
    for name, axis in (("weight", -2), ("scales", -2), ("biases", -2), ("bias", -1)):
        if module.get(name) is not None:
            parts = [_along(module[name], axis, span) for span in spans]
            module[name] = _own(mx.concatenate(parts, axis=axis))


def _columns(module: Any, span: Span, *, first: bool) -> None:
    """``first``: the rank that adds the bias."""
    if "scales" in module:
        bits, group = module.bits, module.group_size
        words = Span(span.start * bits // 32, span.stop * bits // 32)
        groups = Span(span.start // group, span.stop // group)
        module.weight = _own(_along(module.weight, -1, words))
        for name in ("scales", "biases"):
            if module.get(name) is not None:
                module[name] = _own(_along(module[name], -1, groups))
    else:
        module.weight = _own(_along(module.weight, -1, span))
    if "bias" in module and not first:
        module.bias = mx.zeros_like(module.bias)


def _along(array: mx.array, axis: int, span: Span) -> mx.array:
    if axis == -1:
        return array[..., span.start : span.stop]
    return array[..., span.start : span.stop, :]


def _own(array: mx.array) -> mx.array:
    """A copy, so that the whole can be freed."""
    copied = mx.contiguous(array) + mx.array(0, dtype=array.dtype)
    mx.eval(copied)
    return copied


def _copy(embedding: Any) -> Any:
    """Another module with the same arrays."""
    rows, width = embedding.weight.shape[0], _width(embedding)
    made: Any
    if "scales" in embedding:
        made = nn.QuantizedEmbedding(
            rows, width, embedding.group_size, embedding.bits, embedding.mode
        )
        made.scales, made.biases = embedding.scales, embedding.get("biases")
    else:
        made = nn.Embedding(rows, width)
    made.weight = embedding.weight
    return made
