"""Blocks of one KV group: which are free, shared, cached (pure)."""

from __future__ import annotations

from collections import OrderedDict

#: A sequence that starts behind a live one leaves it room to grow: blocks, best choice first.
GROWTH_BLOCKS = (64, 32, 16)


class BlockPool:
    """Reference counts, prefix cache and run-preferring allocation of ``num_blocks`` blocks.

    A block is *used* (referenced), *idle* (cached and lately used) or *open*. Open blocks may be
    allocated; some still are in the cache, and are found there until they are. Idle blocks are
    opened, least recently used first, so that half of what is not used is open, and up to three
    quarters where it takes that for a long run. Sequences get ascending runs where possible,
    because a backend reads a contiguous sequence as a view instead of gathering it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._open = bytearray(b"\x01" * num_blocks)
        self._num_open = num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return self._num_open + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def references(self, block: int) -> int:
        return self._refs[block]

    def find(self, key: bytes) -> int | None:
        """The block cached under ``key``."""
        return self._cached.get(key)

    def share(self, block: int) -> None:
        """Take one more reference to a used or cached block."""
        if self._refs[block] == 0:
            if self._open[block]:
                self._open[block] = 0
                self._num_open -= 1
            else:
                del self._idle[block]
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """Drop one reference. The last one makes the block idle if it is cached, else open."""
        self._refs[block] -= 1
        if self._refs[block]:
            return
        if self._hashes[block] is None:
            self._open[block] = 1
            self._num_open += 1
        else:
            self._idle[block] = None

    def register(self, block: int, key: bytes) -> None:
        """Offer a used, fully computed block to the cache; the first block of a key is kept."""
        if key not in self._cached and self._hashes[block] is None:
            self._cached[key] = block
            self._hashes[block] = key

    def allocate(self, count: int, after: int = -1) -> list[int]:
        """Take ``count`` blocks, best right behind block ``after``.

        ``count`` must not exceed ``num_available``.
        """
        self._ripen(max(count, self.num_available // 2))
        blocks: list[int] = []
        if after >= 0:
            self._take(after + 1, count, blocks)
        while len(blocks) < count:
            missing = count - len(blocks)
            self._take(self._best_start(missing), missing, blocks)
        return blocks

    def _ripen(self, count: int) -> None:
        """Open idle blocks, least recently used first, until ``count`` are open."""
        while self._num_open < count:
            block, _ = self._idle.popitem(last=False)
            self._open[block] = 1
            self._num_open += 1

    def _take(self, start: int, count: int, blocks: list[int]) -> None:
        """Append open blocks ``start, start + 1, …`` up to ``count`` or the first that is not."""
        end = min(start + count, self.num_blocks)
        block = start
        while block < end and self._open[block]:
            self._open[block] = 0
            self._refs[block] = 1
            key = self._hashes[block]
            if key is not None:
                del self._cached[key]
                self._hashes[block] = None
            blocks.append(block)
            block += 1
        self._num_open -= block - start

    def _best_start(self, count: int) -> int:
        """Where ``count`` blocks should start: in a run with room to grow, or else the longest.

        Not at its head if a live sequence ends there and there is space for both.
        """
        most = self.num_available * 3 // 4
        for room in GROWTH_BLOCKS:
            run = b"\x01" * (count + 2 * room)
            while (start := self._open.find(run)) < 0 and self._num_open < most:
                self._ripen(min(most, self._num_open + 1 + self.num_blocks // 16))
            if start >= 0:
                return start + room if start and self._refs[start - 1] else start
        start, length = self._longest_run(count + 2 * GROWTH_BLOCKS[-1])
        if length > count and start and self._refs[start - 1]:
            start += (length - count) // 2
        return start

    def _longest_run(self, none: int) -> tuple[int, int]:
        """Start and length of the longest open run, knowing that there is none of ``none``."""
        length = 1
        start = self._open.find(b"\x01")
        while none - length > 1:
            middle = (none + length) // 2
            found = self._open.find(b"\x01" * middle)
            if found < 0:
                none = middle
            else:
                length, start = middle, found
        return start, length

    def check(self, holders: dict[int, int]) -> None:
        """Assert that the books agree with ``holders``: references per block, counted elsewhere."""
        for block in range(self.num_blocks):
            refs = holders.get(block, 0)
            assert self._refs[block] == refs, f"block {block}: {self._refs[block]} != {refs}"
            idle = block in self._idle
            assert bool(self._open[block]) + idle + (refs > 0) == 1, f"block {block} in two states"
            key = self._hashes[block]
            assert key is None or self._cached[key] == block
            assert not (idle and key is None)
        assert self._num_open == sum(self._open)
        assert len(self._cached) == sum(key is not None for key in self._hashes)
