"""Pools of KV pages, and the block tables of live sequences."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pippin.types.step import StepPlan

IntArray = NDArray[np.int64]


class Pool:
    """The pages of one layer: ``data`` [heads, num_blocks, block_size, width].

    Heads come first, so that a run of neighbouring blocks is one strided matrix per head. With
    separate keys and values, the first half of the heads are keys and the second values; a latent
    pool has one head that is both.
    """

    def __init__(
        self,
        heads: int,
        num_blocks: int,
        block_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Zeros: padding of a gathered batch is read (and masked), so it must be finite.
        self.data = torch.zeros(heads, num_blocks, block_size, width, dtype=dtype, device=device)
        self.slots = self.data.view(heads, num_blocks * block_size, width)
        self.block_size = block_size

    def write(self, rows: torch.Tensor, slots: torch.Tensor | None, run: int | None) -> None:
        """Store ``rows`` [T, heads, width] at ``slots`` [T], or from slot ``run`` on."""
        if run is not None:
            self.slots[:, run : run + rows.shape[0]] = rows.transpose(0, 1)
        else:
            assert slots is not None
            self.slots.index_copy_(1, slots, rows.transpose(0, 1))

    def view(self, start: int, length: int) -> torch.Tensor:
        """[heads, length, width] from slot ``start`` on, without a copy."""
        return self.slots[:, start : start + length]

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """[heads, len(blocks) * block_size, width], copied in the order of ``blocks``."""
        return self.data.index_select(1, blocks).flatten(1, 2)


class BlockTables:
    """Per sequence and KV group, the numbers of its blocks. Kept from the plans' diffs."""

    def __init__(self, num_groups: int, block_size: int) -> None:
        self._num_groups = num_groups
        self._block_size = block_size
        self._tables: dict[int, list[list[int]]] = {}

    def apply(self, plan: StepPlan) -> None:
        for seq in plan.freed:
            self._tables.pop(seq, None)
        for chunk in plan.chunks:
            tables = self._tables.get(chunk.seq)
            if tables is None:
                tables = self._tables[chunk.seq] = [[] for _ in range(self._num_groups)]
            for table, new in zip(tables, chunk.new_blocks, strict=True):
                table.extend(new)

    def blocks(self, seq: int, group: int, low: int, end: int) -> IntArray:
        """Blocks of positions [low, end), from the one that holds ``low``."""
        size = self._block_size
        table = self._tables[seq][group][low // size : -(-end // size)]
        return np.array(table, dtype=np.int64)


def run_start(blocks: IntArray) -> int | None:
    """The first block if they are neighbours in memory, else None."""
    first = int(blocks[0])
    if len(blocks) == 1 or (
        int(blocks[-1]) - first == len(blocks) - 1 and bool((np.diff(blocks) == 1).all())
    ):
        return first
    return None
