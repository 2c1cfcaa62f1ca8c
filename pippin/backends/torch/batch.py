"""What a step's attention reads and writes, computed once and used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from pippin.backends.tables import BlockTables, IntArray, run_start
from pippin.types.step import Chunk, StepPlan

#: A decode may be padded to so many times its own length to share a batch with longer ones.
_PADDING = 1.3
#: ... and by so many tokens anyway: below that, a further batch costs more than it saves.
_PADDING_TOKENS = 256


Paged = Literal["none", "decodes", "all"]
"""Which chunks the compiled kernel takes."""


@dataclass(frozen=True, slots=True)
class DecodeSet:
    """Sequences with one new token each, batched: ``count`` rows read ``length`` slots each."""

    rows: torch.Tensor | slice
    count: int
    length: int
    run: int | None
    """First slot, where it is one sequence in neighbouring blocks."""
    blocks: torch.Tensor | None
    """[count * length / block_size], where pages are gathered."""
    mask: torch.Tensor | None
    """[kv_heads * count, 1, length], 0 or -inf, None where every slot counts."""


@dataclass(frozen=True, slots=True)
class PagedChunks:
    """Chunks for the compiled kernel, which reads pages in place. int64 tensors."""

    chunks: torch.Tensor
    """[4, n]: first row, rows, first slot seen by any of them, slot of the first row's own token.
    Slots count from the first slot of the first block."""
    blocks: torch.Tensor
    """[n, most blocks of one]."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Several new tokens of one sequence."""

    first: int
    last: int
    """Rows [first, last) of the batch."""
    start: int
    """Absolute position of row ``first``."""
    low: int
    """First position that any of the rows sees."""
    skip: int
    """Slots read before ``low`` because pages are read whole."""
    run: int | None
    """Slot of position ``low - skip``, where the prefix lies in neighbouring blocks."""
    blocks: torch.Tensor | None

    @property
    def count(self) -> int:
        return self.last - self.first

    @property
    def prefix(self) -> int:
        """Cached positions that are read."""
        return self.start - self.low


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """A step as the layers of one KV group see it."""

    window: int | None
    slots: torch.Tensor | None
    """[T], where each token's key and value go."""
    run: int | None
    """The first, where they are neighbours."""
    decodes: tuple[DecodeSet, ...]
    paged: PagedChunks | None
    """Instead of ``decodes``, and maybe of ``prefills``, where the compiled kernel is used."""
    prefills: tuple[Prefill, ...]


@dataclass(slots=True)
class Batch:
    """A flat batch of T tokens."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    """[T], absolute."""
    lengths: tuple[tuple[int, int, int], ...]
    """(first row, end row, length of the sequence with this step) of each chunk: rope variants
    depend on the length of the sequence itself."""
    groups: tuple[GroupBatch, ...]
    wanted: torch.Tensor | slice | None
    """Rows whose logits are wanted; None for none."""
    rotations: list[Any] = field(default_factory=list)
    """A ``rope.Rotation`` for each kind of rope that the model has."""
    calls: dict[Any, Any] = field(default_factory=dict)
    """Arguments of compiled kernels that are the same for several layers."""


class BatchBuilder:
    """Turns plans into batches. Keeps the block tables."""

    def __init__(
        self,
        windows: Sequence[int | None],
        kv_heads: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        paged: Paged = "none",
    ) -> None:
        self._paged = paged
        self._windows = tuple(windows)
        self._kv_heads = kv_heads
        self._size = block_size
        self._device = device
        self._dtype = dtype
        self._tables = BlockTables(len(windows), block_size)

    def forget(self, plan: StepPlan) -> None:
        """Take note of a plan without chunks."""
        self._tables.apply(plan)

    def build(self, plan: StepPlan) -> Batch:
        self._tables.apply(plan)
        return self.batch(plan.chunks)

    def batch(self, chunks: Sequence[Chunk]) -> Batch:
        """Of some chunks of the plan that was built last."""
        ids: list[int] = []
        lengths = []
        wanted: list[int] = []
        for chunk in chunks:
            first = len(ids)
            ids.extend(chunk.token_ids)
            lengths.append((first, len(ids), chunk.length))
            wanted.extend(range(len(ids) - chunk.num_logits, len(ids)))
        positions = np.concatenate([np.arange(c.start, c.end) for c in chunks])
        return Batch(
            token_ids=self._tensor(np.array(ids, dtype=np.int64)),
            positions=self._tensor(positions),
            lengths=tuple(lengths),
            groups=tuple(self._group(chunks, group) for group in range(len(self._windows))),
            wanted=self._rows(wanted) if wanted else None,
        )

    def _group(self, chunks: Sequence[Chunk], group: int) -> GroupBatch:
        window, size = self._windows[group], self._size
        slots = []
        prefills = []
        singles: list[tuple[int, int, int, IntArray]] = []
        paged: list[tuple[Chunk, int, int, IntArray]] = []
        row = 0
        for chunk in chunks:
            low = 0 if window is None else max(0, chunk.start - window + 1)
            blocks = self._tables.blocks(chunk.seq, group, low, chunk.end)
            base = low // size
            positions = np.arange(chunk.start, chunk.end)
            slots.append(blocks[positions // size - base] * size + positions % size)
            count = len(chunk.token_ids)
            if self._paged == "all" or (self._paged == "decodes" and count == 1):
                paged.append((chunk, row, low, blocks))
            elif count == 1:
                singles.append((row, low, chunk.end, blocks))
            else:
                prefills.append(self._prefill(row, count, chunk.start, low, blocks))
            row += count
        flat = np.concatenate(slots)
        in_a_row = self._paged == "none" and (len(flat) == 1 or bool((np.diff(flat) == 1).all()))
        return GroupBatch(
            window=window,
            slots=None if in_a_row else self._tensor(flat),
            run=int(flat[0]) if in_a_row else None,
            decodes=tuple(self._decodes(singles)),
            paged=self._paged_chunks(paged) if paged else None,
            prefills=tuple(prefills),
        )

    def _prefill(self, row: int, count: int, start: int, low: int, blocks: IntArray) -> Prefill:
        size = self._size
        skip = low % size
        read = blocks[: -(-start // size) - low // size]
        first = run_start(read) if len(read) else None
        return Prefill(
            first=row,
            last=row + count,
            start=start,
            low=low,
            skip=skip,
            run=None if first is None else first * size,
            blocks=self._tensor(read) if first is None and len(read) else None,
        )

    def _paged_chunks(self, paged: list[tuple[Chunk, int, int, IntArray]]) -> PagedChunks:
        width = max(len(blocks) for _, _, _, blocks in paged)
        table = np.zeros((len(paged), width), dtype=np.int64)
        chunks = np.empty((4, len(paged)), dtype=np.int64)
        for index, (chunk, row, low, blocks) in enumerate(paged):
            table[index, : len(blocks)] = blocks
            base = low // self._size * self._size
            chunks[:, index] = row, len(chunk.token_ids), low - base, chunk.start - base
        return PagedChunks(self._tensor(chunks), self._tensor(table))

    def _decodes(self, singles: list[tuple[int, int, int, IntArray]]) -> list[DecodeSet]:
        """Batch sequences of similar length, longest first."""
        sets = []
        waiting = sorted(singles, key=lambda single: (-len(single[3]), single[0]))
        while waiting:
            longest = len(waiting[0][3])
            count, padding = 1, 0
            while count < len(waiting):
                blocks = len(waiting[count][3])
                padding += (longest - blocks) * self._size
                if blocks * _PADDING < longest and padding > _PADDING_TOKENS:
                    break
                count += 1
            batch, waiting = waiting[:count], waiting[count:]
            sets.append(self._decode_set(sorted(batch, key=lambda single: single[0])))
        return sets

    def _decode_set(self, singles: list[tuple[int, int, int, IntArray]]) -> DecodeSet:
        size = self._size
        rows = self._rows([single[0] for single in singles])
        if len(singles) == 1:
            _, low, end, blocks = singles[0]
            first = run_start(blocks)
            if first is not None:
                start = first * size + low % size
                return DecodeSet(rows, 1, end - low, start, None, None)
        width = max(len(single[3]) for single in singles)
        table = np.zeros((len(singles), width), dtype=np.int64)
        lows = np.empty((len(singles), 1), dtype=np.int64)
        ends = np.empty((len(singles), 1), dtype=np.int64)
        for index, (_, low, end, blocks) in enumerate(singles):
            table[index, : len(blocks)] = blocks
            base = low // size * size
            lows[index], ends[index] = low - base, end - base
        column = np.arange(width * size)
        hidden = (column < lows) | (column >= ends)
        mask = None
        if hidden.any():
            mask = self._tensor(np.where(hidden, np.float32(-np.inf), np.float32(0)))
            mask = mask.to(self._dtype).repeat(self._kv_heads, 1)[:, None]
        blocks_tensor = self._tensor(table.reshape(-1))
        return DecodeSet(rows, len(singles), width * size, None, blocks_tensor, mask)

    def _rows(self, rows: list[int]) -> torch.Tensor | slice:
        """Row numbers, as a slice where they are neighbours."""
        if rows[-1] - rows[0] == len(rows) - 1:
            return slice(rows[0], rows[-1] + 1)
        return self._tensor(np.array(rows, dtype=np.int64))

    def _tensor(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.to(self._device) if self._device.type != "cpu" else tensor
