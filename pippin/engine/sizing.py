"""How many KV blocks fit in memory, and the longest request that they can serve (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pippin.engine.blocks import blocks_for, blocks_needed, window_blocks
from pippin.errors import OutOfMemory
from pippin.types.model import KVGroup


@dataclass(frozen=True, slots=True)
class KVSize:
    num_blocks: tuple[int, ...]
    """Per KV group."""
    kv_bytes: int
    max_model_len: int
    """The longest prompt and output together that fits, at most what was asked for."""
    kv_tokens: int
    """Tokens that fit at once in sequences short enough to be inside every window."""


def size_kv(
    available_bytes: int,
    groups: tuple[KVGroup, ...],
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_chunk: int = 2048,
) -> KVSize:
    """Divide ``available_bytes`` among the groups.

    Groups that keep everything get equal numbers of blocks. A window group gets what
    ``max_num_seqs`` sequences of the largest chunk can use and no more, less where a request of
    ``max_model_len`` would not fit otherwise. A request of the returned length can always run
    alone. Raises ``OutOfMemory`` if not one block fits.
    """
    block_bytes = [group.bytes_per_token * block_size for group in groups]
    keeping = any(group.window is None for group in groups)

    def size(counts: list[int]) -> int:
        return sum(count * each for count, each in zip(counts, block_bytes, strict=True))

    def least(length: int) -> list[int]:
        return blocks_needed(groups, length, block_size, block_size)

    length = _largest(max_model_len, lambda n: size(least(n)) <= available_bytes)
    if length < min(block_size, max_model_len):
        raise OutOfMemory(
            f"{available_bytes} bytes are left for the KV cache; one block of {block_size} tokens"
            f" takes {sum(block_bytes)}.",
            hint="raise --gpu-memory-utilization, or use a smaller or quantised model",
        )

    def counts(blocks: int, sequences: int) -> list[int]:
        """``blocks`` for groups that keep everything, enough for ``sequences`` for windows."""
        windows = [
            sequences * window_blocks(group.window, max_chunk, block_size)
            if keeping and group.window is not None
            else blocks
            for group in groups
        ]
        return [
            max(need, min(blocks, most)) for need, most in zip(least(length), windows, strict=True)
        ]

    def fits(blocks: int, sequences: int) -> bool:
        return size(counts(blocks, sequences)) <= available_bytes

    longest = blocks_for(length, block_size)
    sequences = _largest(max_num_seqs, lambda n: fits(longest, n))
    blocks = _largest(available_bytes // max(1, min(block_bytes)), lambda n: fits(n, sequences))
    found = counts(blocks, sequences)
    return KVSize(
        num_blocks=tuple(found),
        kv_bytes=size(found),
        max_model_len=length,
        kv_tokens=(max if keeping else min)(found) * block_size,
    )


def size_stages(
    stages: Sequence[tuple[int, tuple[KVGroup, ...]]],
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_chunk: int = 2048,
) -> KVSize:
    """As ``size_kv`` for stages with (available bytes, groups) each: the smallest one decides.

    ``kv_bytes`` counts all stages. Raises ``OutOfMemory`` if a stage has no room for one block.
    """

    def sizes(length: int) -> list[KVSize]:
        return [
            size_kv(available, groups, block_size, length, max_num_seqs, max_chunk)
            for available, groups in stages
        ]

    length = min(size.max_model_len for size in sizes(max_model_len))
    found = sizes(length)
    num_blocks = tuple(min(counts) for counts in zip(*(s.num_blocks for s in found), strict=True))
    per_block = [sum(groups[i].bytes_per_token for _, groups in stages) * block_size
                 for i in range(len(num_blocks))]  # fmt: skip
    return KVSize(
        num_blocks=num_blocks,
        kv_bytes=sum(count * each for count, each in zip(num_blocks, per_block, strict=True)),
        max_model_len=length,
        kv_tokens=min(size.kv_tokens for size in found),
    )


def _largest(most: int, good: Callable[[int], bool]) -> int:
    """The largest ``n`` in [0, most] with ``good(n)``, which holds up to some ``n``; 0 if none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if good(middle):
            low = middle
        else:
            high = middle - 1
    return low
