"""Paged attention under mlx-lm's model files, which stay as they are.

A model's layers see T rows of length one. Each row has its own position (``offset`` is an array),
keys and values go into pages, and the ``scaled_dot_product_attention`` that the model's module
calls hands over to ``PagedCache.attend``.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx

from pippin.backends.mlx.batch import Batch, DecodeSet, GroupBatch, Prefill
from pippin.backends.mlx.kv import Pool

#: Rows of a prefill under a window that share one mask.
_WINDOW_ROWS = 256


class PagedCache:
    """What mlx-lm takes for the KV cache of one layer."""

    def __init__(self, group: int) -> None:
        self.group = group
        self.pool: Pool | None = None
        self.offset: mx.array | None = None
        """[T], absolute positions."""
        self._batch: GroupBatch | None = None
        self._writes = True

    def begin(self, batch: Batch, *, writes: bool = True) -> None:
        """Point to a step. Without ``writes``, its keys and values are in the pool already."""
        self.offset = batch.positions
        self._batch = batch.groups[self.group]
        self._writes = writes

    def end(self) -> None:
        """Drop the step: nothing of it may be held when the pool is written next."""
        self.offset = self._batch = None

    @property
    def batch(self) -> GroupBatch:
        assert self._batch is not None
        return self._batch

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write this step's ``keys`` and ``values`` [T, kv_heads, 1, d] to their slots."""
        if self._writes:
            self.write(mx.concatenate([keys, values], axis=1))
        return keys, values

    def write(self, rows: mx.array) -> None:
        """Write ``rows`` [T, pool heads, 1, width], unless they were."""
        assert self.pool is not None
        if self._writes:
            by_head = rows[:, :, 0].swapaxes(0, 1)
            self.pool.write(by_head, self.batch.slots, self.batch.run)

    def attend(
        self,
        query: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention of ``query`` [T, heads, 1, d] to its own sequences; same shape.

        ``keys`` and ``values`` [T, kv_heads, 1, d] are this step's, in the pool already. ``sinks``
        [heads] are logits of a position without a value (GPT-OSS).
        """
        pool, batch = self.pool, self.batch
        assert pool is not None
        outs = [_decode(query[decode.rows], pool, decode, scale, sinks) for decode in batch.decodes]
        outs += [
            _prefill(query, keys, values, pool, batch.window, prefill, scale, sinks)
            for prefill in batch.prefills
        ]
        return in_order(outs, batch)


def in_order(outs: list[mx.array], batch: GroupBatch) -> mx.array:
    """Put the results of decodes and prefills, [rows, …] each, in the order of the batch."""
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs)
    return out if batch.order is None else out[batch.order]


def read_decode(pool: Pool, decode: DecodeSet) -> mx.array:
    """[count, pool heads, length, width]."""
    if decode.run is not None:
        return pool.view(decode.run, decode.length)
    assert decode.pages is not None
    return pool.gather(decode.pages)


def read_prefill(pool: Pool, prefill: Prefill) -> mx.array:
    """[1, pool heads, prefix + count, width]: what the chunk sees, itself included."""
    length = prefill.prefix + prefill.count
    if prefill.run is not None:
        return pool.view(prefill.run, length)
    assert prefill.pages is not None
    return pool.gather(prefill.pages)[:, :, prefill.skip : prefill.skip + length]


def _decode(
    query: mx.array, pool: Pool, decode: DecodeSet, scale: float, sinks: mx.array | None
) -> mx.array:
    pages = read_decode(pool, decode)
    half = pages.shape[1] // 2
    return mx.fast.scaled_dot_product_attention(
        query, pages[:, :half], pages[:, half:], scale=scale, mask=decode.mask, sinks=sinks
    )


def _prefill(
    query: mx.array,
    keys: mx.array,
    values: mx.array,
    pool: Pool,
    window: int | None,
    prefill: Prefill,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """[n, heads, 1, d] of one sequence's chunk over its cached prefix and itself."""
    query = _as_one(query[prefill.rows])
    if prefill.prefix:
        pages = read_prefill(pool, prefill)
        half = pages.shape[1] // 2
        keys, values = pages[:, :half], pages[:, half:]
    else:
        keys, values = _as_one(keys[prefill.rows]), _as_one(values[prefill.rows])
    if window is not None and prefill.prefix + prefill.count > window:
        out = _windowed(query, keys, values, prefill.prefix, window, scale, sinks)
    else:
        out = mx.fast.scaled_dot_product_attention(
            query, keys, values, scale=scale, mask="causal", sinks=sinks
        )
    return out.transpose(2, 1, 0, 3)


def _as_one(rows: mx.array) -> mx.array:
    """[n, heads, 1, d], rows of a batch, as one sequence [1, heads, n, d]."""
    return rows.transpose(2, 1, 0, 3)


def _windowed(
    query: mx.array,
    keys: mx.array,
    values: mx.array,
    prefix: int,
    window: int,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """Rows in parts, each with the keys that it can see and a mask of that size."""
    outs = []
    count = query.shape[2]
    for first in range(0, count, _WINDOW_ROWS):
        last = min(first + _WINDOW_ROWS, count)
        low, end = max(0, prefix + first - window + 1), prefix + last
        row = mx.arange(prefix + first, end)[:, None]
        column = mx.arange(low, end)
        outs.append(
            mx.fast.scaled_dot_product_attention(
                query[:, :, first:last],
                keys[:, :, low:end],
                values[:, :, low:end],
                scale=scale,
                mask=(column <= row) & (column > row - window),
                sinks=sinks,
            )
        )
    return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)


def install(attention: Any) -> None:
    """Let the module that defines ``attention``'s class hand paged caches over to us.

    Other caches still reach mlx-lm's own function, so the library works as before.
    """
    module: Any = sys.modules[type(attention).__module__]
    original = module.scaled_dot_product_attention
    if getattr(original, "handles_pages", False):
        return

    def dispatch(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: mx.array | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if isinstance(cache, PagedCache):
            return cache.attend(queries, keys, values, scale, sinks)
        out: mx.array = original(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)
        return out

    dispatch.handles_pages = True  # type: ignore[attr-defined]
    module.scaled_dot_product_attention = dispatch
