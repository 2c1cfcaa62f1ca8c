"""Bookkeeping of the paged KV cache: block tables, prefix cache, windows (pure).

Each KV group of the model has a pool of blocks, and each running sequence one block table a group.
Full blocks get a chained hash (parent's hash and the block's tokens), under which later sequences
find and share them without a copy. Blocks are only ever written by the one sequence that
allocated them: sharing starts at full, computed blocks, and the last prompt token is always
computed, so a sequence's own writes land behind what it shares.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

from pippin.engine.pool import BlockPool
from pippin.engine.sequence import Sequence
from pippin.errors import UnsupportedModel
from pippin.types.model import KVGroup, KVKind


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def window_blocks(window: int, chunk: int, block_size: int) -> int:
    """Most blocks that a window group holds while ``chunk`` tokens run in one step."""
    return blocks_for(window + chunk - 2, block_size) + 1


def blocks_needed(
    groups: tuple[KVGroup, ...], num_tokens: int, block_size: int, chunk: int
) -> list[int]:
    """Per group: most blocks that a sequence holds which runs in chunks of ``chunk`` tokens."""
    total = blocks_for(num_tokens, block_size)
    return [
        total
        if group.window is None
        else min(total, window_blocks(group.window, chunk, block_size))
        for group in groups
    ]


class KVCacheManager:
    """Gives blocks to sequences.

    Raises ``UnsupportedModel`` for groups of recurrent state, which need a place a sequence, not
    blocks; no backend runs them yet.
    """

    def __init__(
        self,
        groups: tuple[KVGroup, ...],
        num_blocks: tuple[int, ...],
        block_size: int,
        *,
        fingerprint: str = "",
        enable_prefix_caching: bool = True,
        rope_switch: int | None = None,
    ) -> None:
        """``rope_switch``: see ``ModelInfo``."""
        if any(group.kind is KVKind.STATE for group in groups):
            raise UnsupportedModel(
                "The model keeps recurrent state, which is not supported yet.",
                hint="choose a model whose layers all use attention",
            )
        if not groups or len(groups) != len(num_blocks):
            raise ValueError("one number of blocks for each of at least one KV group")
        self.groups = groups
        self.block_size = block_size
        self.pools = tuple(BlockPool(count) for count in num_blocks)
        self.num_queries = 0
        """Prompt tokens looked up since the start."""
        self.num_hits = 0
        """Prompt tokens found since the start."""
        self._caching = enable_prefix_caching
        self._fingerprint = fingerprint.encode()
        self._rope_switch = rope_switch
        self._windows = tuple(group.window for group in groups)
        self._nothing_new: tuple[tuple[int, ...], ...] = ((),) * len(groups)
        self._computing: dict[bytes, Sequence] = {}
        """Blocks that running sequences will compute from tokens already known."""

    @property
    def usage(self) -> float:
        """Share of blocks held by live sequences, of the fullest group."""
        return max(
            pool.num_used / pool.num_blocks if pool.num_blocks else 0.0 for pool in self.pools
        )

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a sequence can compute ``num_tokens`` positions with nothing beside it."""
        needs = self._needs(num_tokens)
        return all(need <= pool.num_blocks for need, pool in zip(needs, self.pools, strict=True))

    def _needs(self, num_tokens: int) -> list[int]:
        return blocks_needed(self.groups, num_tokens, self.block_size, self.block_size)

    # Prefix cache

    def lookup(self, seq: Sequence) -> int:
        """Blocks of the longest cached prefix that ``seq`` may start behind.

        Every full and latent group must hold all of them, each window group those that the next
        token's window covers.
        """
        if not self._caching or seq.needs_prompt_logits:
            return 0
        self._hash_blocks(seq)
        limit = (len(seq.tokens) - 1) // self.block_size
        hashes = seq.hashes
        for pool, window in zip(self.pools, self._windows, strict=True):
            if window is None:
                find = pool.find
                limit = next((i for i in range(limit) if find(hashes[i]) is None), limit)
        while limit:
            missing = self._missing_in_window(hashes, limit)
            if missing is None:
                break
            # Every shorter prefix that reaches beyond the missing block needs it too.
            limit = missing
        return limit

    def _missing_in_window(self, hashes: list[bytes], count: int) -> int | None:
        """The last block that a hit of ``count`` blocks needs and some window group lacks."""
        for pool, window in zip(self.pools, self._windows, strict=True):
            if window is not None:
                first = self._first_visible(count * self.block_size, window)
                for index in range(count - 1, first - 1, -1):
                    if pool.find(hashes[index]) is None:
                        return index
        return None

    def _first_visible(self, position: int, window: int) -> int:
        """First block that a token at ``position``, or a later one, still sees."""
        return max(0, position - window + 1) // self.block_size

    def awaits(self, seq: Sequence, hit: int | None = None) -> bool:
        """Whether the block behind ``seq``'s cached prefix is just now being computed by another.

        Without ``hit``, the result of a look-up, only asks again for the block found last time.
        """
        if hit is None:
            return seq.awaits is not None and seq.awaits in self._computing
        seq.awaits = None
        if (
            self._computing
            and not seq.needs_prompt_logits
            and hit < (len(seq.tokens) - 1) // self.block_size
            and seq.hashes[hit] in self._computing
        ):
            seq.awaits = seq.hashes[hit]
        return seq.awaits is not None

    def _hash_blocks(self, seq: Sequence) -> None:
        """Bring ``seq.hashes`` up to all full blocks of its tokens."""
        hashes, size = seq.hashes, self.block_size
        total = len(seq.tokens) // size
        if len(hashes) >= total:
            return
        parent = hashes[-1] if hashes else self._root(seq)
        for index in range(len(hashes), total):
            tokens = array("I", seq.tokens[index * size : (index + 1) * size])
            parent = hashlib.blake2b(parent + tokens.tobytes(), digest_size=32).digest()
            hashes.append(parent)

    def _root(self, seq: Sequence) -> bytes:
        root = hashlib.blake2b(self._fingerprint, digest_size=32)
        if self._rope_switch is not None and len(seq.tokens) > self._rope_switch:
            root.update(b"long")
        salt = seq.request.cache_salt.encode()
        return hashlib.blake2b(root.digest() + salt, digest_size=32).digest()

    def must_start_anew(self, seq: Sequence) -> bool:
        """Whether the newest token makes everything computed for ``seq`` useless."""
        return self._rope_switch is not None and len(seq.tokens) == self._rope_switch + 1

    # Blocks of a sequence

    def admit(self, seq: Sequence, hit: int, headroom: int) -> bool:
        """Share ``hit`` cached blocks and take new ones for all other tokens, or change nothing.

        ``headroom`` blocks of each pool are left to the running sequences, so that the newcomer
        is not preempted at once. Window groups take their blocks chunk by chunk; here they only
        must have one. Sets ``num_computed`` and ``num_scheduled`` to the hit.
        """
        size = self.block_size
        needs = self._needs(len(seq.tokens))
        shared: list[list[int]] = []
        for pool, window, need in zip(self.pools, self._windows, needs, strict=True):
            first = 0 if window is None else self._first_visible(hit * size, window)
            blocks = [pool.find(key) for key in seq.hashes[first:hit]]
            found = [block for block in blocks if block is not None]
            assert len(found) == len(blocks)
            available = pool.num_available - sum(pool.references(block) == 0 for block in found)
            missing = need - hit if window is None else 1
            if available < missing + headroom:
                return False
            shared.append(found)
        for group, (pool, found) in enumerate(zip(self.pools, shared, strict=True)):
            for block in found:
                pool.share(block)
            seq.num_left[group] = hit - len(found)
            seq.tables[group] = [-1] * (hit - len(found)) + found
        seq.num_computed = seq.num_scheduled = hit * size
        seq.num_registered = seq.num_announced = hit
        if self._caching:
            self._announce(seq)
            if seq.first_scheduled is None:
                self.num_queries += seq.num_prompt
                self.num_hits += min(hit * size, seq.num_prompt)
        self._grow(seq, len(seq.tokens), windows=False)
        self._set_next_event(seq)
        return True

    def _announce(self, seq: Sequence) -> None:
        self._hash_blocks(seq)
        seq.num_announced = len(seq.hashes)
        for key in seq.hashes[seq.num_registered :]:
            self._computing.setdefault(key, seq)

    def extend(self, seq: Sequence, end: int) -> bool:
        """Give ``seq`` blocks for positions below ``end`` in every group, or change nothing."""
        count = blocks_for(end, self.block_size)
        for pool, table in zip(self.pools, seq.tables, strict=True):
            if count - len(table) > pool.num_available:
                return False
        self._grow(seq, end, windows=True)
        return True

    def _grow(self, seq: Sequence, end: int, *, windows: bool) -> None:
        count = blocks_for(end, self.block_size)
        for pool, window, table in zip(self.pools, self._windows, seq.tables, strict=True):
            missing = count - len(table)
            if missing > 0 and (windows or window is None):
                table += pool.allocate(missing, table[-1] if table else -1)
        seq.capacity = min(map(len, seq.tables)) * self.block_size

    def backed(self, seq: Sequence) -> int:
        """Tokens behind ``num_scheduled`` that ``extend`` can serve now."""
        blocks = min(
            len(table) + pool.num_available
            for pool, table in zip(self.pools, seq.tables, strict=True)
        )
        return blocks * self.block_size - seq.num_scheduled

    def take_new_blocks(self, seq: Sequence) -> tuple[tuple[int, ...], ...]:
        """Entries of the tables that no plan has carried yet."""
        sent, tables = seq.num_sent, seq.tables
        if all(count == len(table) for count, table in zip(sent, tables, strict=True)):
            return self._nothing_new
        new = tuple(tuple(table[count:]) for count, table in zip(sent, tables, strict=True))
        seq.num_sent = [len(table) for table in tables]
        return new

    def computed(self, seq: Sequence) -> None:
        """Note that ``num_computed`` moved: cache full blocks, free what windows left behind.

        Needed only once ``num_computed`` reaches ``next_event``. No plan in flight reads a freed
        block, since each starts at or behind ``num_computed``.
        """
        full = seq.num_computed // self.block_size
        if self._caching and full > seq.num_registered:
            self._hash_blocks(seq)
            for index in range(seq.num_registered, full):
                key = seq.hashes[index]
                for pool, table in zip(self.pools, seq.tables, strict=True):
                    if table[index] >= 0:
                        pool.register(table[index], key)
                if self._computing.get(key) is seq:
                    del self._computing[key]
        seq.num_registered = max(full, seq.num_registered)
        for group, window in enumerate(self._windows):
            if window is not None:
                self._leave(seq, group, self._first_visible(seq.num_computed, window))
        self._set_next_event(seq)

    def _leave(self, seq: Sequence, group: int, first: int) -> None:
        table, pool = seq.tables[group], self.pools[group]
        for index in range(seq.num_left[group], first):
            pool.release(table[index])
            table[index] = -1
        seq.num_left[group] = max(first, seq.num_left[group])

    def _set_next_event(self, seq: Sequence) -> None:
        size = self.block_size
        event = (seq.num_registered + 1) * size
        for group, window in enumerate(self._windows):
            if window is not None:
                event = min(event, (seq.num_left[group] + 1) * size + window - 1)
        seq.next_event = event

    def release(self, seq: Sequence) -> None:
        """Take all blocks back. The caller sees to it that no plan in flight uses them."""
        for key in seq.hashes[seq.num_registered : seq.num_announced]:
            if self._computing.get(key) is seq:
                del self._computing[key]
        for pool, table in zip(self.pools, seq.tables, strict=True):
            # Tails first: they are evicted first, and prefixes are worth more.
            for block in reversed(table):
                if block >= 0:
                    pool.release(block)
        seq.clear()

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert that exactly ``holders`` hold blocks, and that all books agree."""
        sequences = list(holders)
        for group, pool in enumerate(self.pools):
            counts: dict[int, int] = {}
            for seq in sequences:
                for block in seq.tables[group]:
                    if block >= 0:
                        counts[block] = counts.get(block, 0) + 1
            pool.check(counts)
        for key, seq in self._computing.items():
            assert seq in sequences
            assert key in seq.hashes[seq.num_registered : seq.num_announced]
