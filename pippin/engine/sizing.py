"""How many KV blocks fit in memory, and the longest request that they can serve (pure)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pippin.engine.blocks import blocks_for, window_blocks
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

    def smallest(length: int) -> list[int]:
        blocks = blocks_for(length, block_size)
        return [
            blocks
            if g.window is None
            else min(blocks, window_blocks(g.window, block_size, block_size))
            for g in groups
        ]

    def spread(blocks: int, sequences: int) -> list[int]:
        """Blocks per group if a group that keeps everything gets ``blocks``."""
        return [
            blocks
            if g.window is None or not keeping
            else min(blocks, sequences * window_blocks(g.window, max_chunk, block_size))
            for g in groups
        ]

    def size(counts: list[int]) -> int:
        return sum(count * each for count, each in zip(counts, block_bytes, strict=True))

    keeping = any(group.window is None for group in groups)
    length = _largest(max_model_len, lambda n: size(smallest(n)) <= available_bytes)
    if length < min(block_size, max_model_len):
        raise OutOfMemory(
            f"{available_bytes} bytes are left for the KV cache; one block of {block_size} tokens"
            f" takes {sum(block_bytes)}.",
            hint="raise --gpu-memory-utilization, or use a smaller or quantised model",
        )
    least = smallest(length)

    def largest_for(sequences: int) -> list[int]:
        most = available_bytes // max(1, min(block_bytes))
        blocks = _largest(
            most, lambda n: size(_at_least(spread(n, sequences), least)) <= available_bytes
        )
        return _at_least(spread(blocks, sequences), least)

    def leaves_room(sequences: int) -> bool:
        wanted = spread(blocks_for(length, block_size), sequences)
        return size(_at_least(wanted, least)) <= available_bytes

    counts = largest_for(_largest(max_num_seqs, leaves_room))
    return KVSize(
        num_blocks=tuple(counts),
        kv_bytes=size(counts),
        max_model_len=length,
        kv_tokens=max(counts) * block_size if keeping else min(counts) * block_size,
    )


def _at_least(counts: list[int], least: list[int]) -> list[int]:
    return [max(pair) for pair in zip(counts, least, strict=True)]


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
