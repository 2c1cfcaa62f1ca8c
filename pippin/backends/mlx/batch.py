"""What a step's attention reads and writes, computed once and used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pippin.backends.tables import BlockTables, IntArray, run_start
from pippin.types.step import Chunk, StepPlan

#: Rows without wanted logits from which on the last layer is run for the others alone.
_FEWEST_DROPPED = 8

#: Slots of a batch of decodes that may be padding, as a part of all that it reads.
MOST_PADDING = 0.25

Rows = mx.array | slice


@dataclass(frozen=True, slots=True)
class DecodeSet:
    """Sequences with one new token each, batched: ``count`` rows read ``length`` slots each."""

    rows: Rows
    count: int
    length: int
    run: int | None
    """First slot, where it is one sequence in neighbouring blocks."""
    pages: mx.array | None
    """[count, pool heads, length / block_size] for ``Pool.gather``, where pages are gathered."""
    mask: mx.array | None
    """[count, 1, 1, length], true where a slot is seen; None where every slot is."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Several new tokens of one sequence, which are in the pool when they are read."""

    rows: slice
    start: int
    """Absolute position of the first row."""
    low: int
    """First position that any of the rows sees."""
    skip: int
    """Slots read before ``low`` because pages are read whole."""
    run: int | None
    """Slot of position ``low``, where all lie in neighbouring blocks."""
    pages: mx.array | None
    """[1, pool heads, n] for ``Pool.gather``, where pages are gathered."""

    @property
    def count(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def prefix(self) -> int:
        """Cached positions that are read."""
        return self.start - self.low


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """A step as the layers of one KV group see it."""

    window: int | None
    slots: mx.array | None
    """[T], where each token's key and value go."""
    run: int | None
    """The first, where they are neighbours."""
    decodes: tuple[DecodeSet, ...]
    prefills: tuple[Prefill, ...]
    order: mx.array | None
    """[T], row of the results (decodes, then prefills) that belongs to each row of the batch; None
    where they are in order."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A flat batch of T tokens: T rows of length one, as mlx-lm sees it."""

    token_ids: mx.array
    """[T, 1]"""
    positions: mx.array
    """[T], absolute."""
    lengths: tuple[tuple[int, int, int], ...]
    """(first row, end row, length of the sequence with this step) of each chunk: rope variants
    depend on the length of the sequence itself."""
    groups: tuple[GroupBatch, ...]
    wanted: Rows | None
    """Rows whose logits are wanted; None for none."""
    last: Batch | None
    """The wanted rows as a batch of their own, which reads what this one writes and writes nothing;
    None where it would save little. Only keys and values of the last layer need the other rows."""


class BatchBuilder:
    """Turns plans into batches. Keeps the block tables."""

    def __init__(
        self,
        windows: Sequence[int | None],
        block_size: int,
        num_blocks: Sequence[int],
        pool_heads: int,
    ) -> None:
        """``windows`` and ``num_blocks``: one for each KV group."""
        self._windows = tuple(windows)
        self._size = block_size
        # The first page of each head.
        heads = np.arange(pool_heads)[None, :, None]
        self._first_pages = [heads * count for count in num_blocks]
        self._tables = BlockTables(len(windows), block_size)

    def forget(self, plan: StepPlan) -> None:
        """Take note of a plan without chunks."""
        self._tables.apply(plan)

    def build(self, plan: StepPlan) -> Batch:
        self._tables.apply(plan)
        wanted: list[int] = []
        row = 0
        for chunk in plan.chunks:
            row += len(chunk.token_ids)
            wanted.extend(range(row - chunk.num_logits, row))
        last = None
        if wanted and row - len(wanted) >= _FEWEST_DROPPED:
            last = self._batch([_tail(c) for c in plan.chunks if c.num_logits], None, None)
        return self._batch(plan.chunks, _rows(wanted) if wanted else None, last)

    def _batch(self, chunks: Sequence[Chunk], wanted: Rows | None, last: Batch | None) -> Batch:
        ids: list[int] = []
        positions: list[int] = []
        lengths = []
        for chunk in chunks:
            first = len(ids)
            ids.extend(chunk.token_ids)
            positions.extend(range(chunk.start, chunk.end))
            lengths.append((first, len(ids), chunk.length))
        return Batch(
            token_ids=_array(np.array(ids))[:, None],
            positions=_array(np.array(positions)),
            lengths=tuple(lengths),
            groups=tuple(self._group(chunks, group) for group in range(len(self._windows))),
            wanted=wanted,
            last=last,
        )

    def _group(self, chunks: Sequence[Chunk], group: int) -> GroupBatch:
        window, size = self._windows[group], self._size
        slots: list[int] = []
        prefills = []
        singles: list[Single] = []
        row = 0
        for chunk in chunks:
            low = 0 if window is None else max(0, chunk.start - window + 1)
            blocks = self._tables.blocks(chunk.seq, group, low, chunk.end)
            count = len(chunk.token_ids)
            if count == 1:
                singles.append(Single(row, low, chunk.end, blocks))
                slots.append(int(blocks[-1]) * size + chunk.start % size)
            else:
                prefills.append(self._prefill(group, row, count, chunk.start, low, blocks))
                positions = np.arange(chunk.start, chunk.end)
                at = blocks[positions // size - low // size] * size + positions % size
                slots.extend(at.tolist())
            row += count
        flat = np.array(slots)
        in_a_row = len(flat) == 1 or bool((np.diff(flat) == 1).all())
        sets = group_decodes(singles)
        return GroupBatch(
            window=window,
            slots=None if in_a_row else _array(flat),
            run=int(flat[0]) if in_a_row else None,
            decodes=tuple(self._decode_set(group, one) for one in sets),
            prefills=tuple(prefills),
            order=_order(sets, prefills),
        )

    def _prefill(
        self, group: int, row: int, count: int, start: int, low: int, blocks: IntArray
    ) -> Prefill:
        first, skip = run_start(blocks), low % self._size
        return Prefill(
            rows=slice(row, row + count),
            start=start,
            low=low,
            skip=skip,
            run=None if first is None else first * self._size + skip,
            pages=self._pages(group, blocks[None]) if first is None else None,
        )

    def _pages(self, group: int, blocks: IntArray) -> mx.array:
        """``blocks`` [count, n] of every head."""
        return _array(blocks[:, None] + self._first_pages[group])

    def _decode_set(self, group: int, singles: list[Single]) -> DecodeSet:
        size = self._size
        rows = _rows([single.row for single in singles])
        if len(singles) == 1:
            (single,) = singles
            first = run_start(single.blocks)
            if first is not None:
                start = first * size + single.low % size
                return DecodeSet(rows, 1, single.end - single.low, start, None, None)
        width = max(len(single.blocks) for single in singles)
        table = np.zeros((len(singles), width), dtype=np.int64)
        lows = np.empty((len(singles), 1), dtype=np.int64)
        ends = np.empty((len(singles), 1), dtype=np.int64)
        for index, single in enumerate(singles):
            table[index, : len(single.blocks)] = single.blocks
            base = single.low // size * size
            lows[index], ends[index] = single.low - base, single.end - base
        column = np.arange(width * size)
        seen = (column >= lows) & (column < ends)
        mask = None if seen.all() else mx.array(seen[:, None, None])
        return DecodeSet(rows, len(singles), width * size, None, self._pages(group, table), mask)


@dataclass(frozen=True, slots=True)
class Single:
    """A chunk of one token."""

    row: int
    low: int
    end: int
    blocks: IntArray


def group_decodes(singles: Sequence[Single]) -> list[list[Single]]:
    """Batch sequences of similar length, longest first, each batch in the order of its rows."""
    sets: list[list[Single]] = []
    longest = total = 0
    for single in sorted(singles, key=lambda single: (-len(single.blocks), single.row)):
        own = len(single.blocks)
        padded = longest * (len(sets[-1]) + 1) if sets else 0
        if not sets or padded - (total + own) > MOST_PADDING * padded:
            sets.append([])
            longest, total = own, 0
        sets[-1].append(single)
        total += own
    return [sorted(one, key=lambda single: single.row) for one in sets]


def _tail(chunk: Chunk) -> Chunk:
    """The tokens of a chunk whose logits are wanted."""
    first = len(chunk.token_ids) - chunk.num_logits
    if first == 0:
        return chunk
    ids = chunk.token_ids[first:]
    return Chunk(chunk.seq, chunk.start + first, ids, chunk.new_blocks, chunk.num_logits)


def _order(sets: list[list[Single]], prefills: list[Prefill]) -> mx.array | None:
    rows = [single.row for one in sets for single in one]
    for prefill in prefills:
        rows.extend(range(prefill.rows.start, prefill.rows.stop))
    if rows == list(range(len(rows))):
        return None
    return _array(np.argsort(rows))


def _rows(rows: list[int]) -> Rows:
    """Row numbers, as a slice where they are neighbours."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return _array(np.array(rows))


def _array(array: NDArray[Any]) -> mx.array:
    return mx.array(array.astype(np.int32))
