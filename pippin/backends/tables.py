"""The block tables of live sequences, kept from the plans' diffs. Shared by all backends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pippin.types.step import StepPlan

IntArray = NDArray[np.int64]


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
