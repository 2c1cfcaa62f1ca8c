from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_oracle import FULL, request, window

from pippin.engine.blocks import KVCacheManager
from pippin.engine.pool import GROWTH_BLOCKS, BlockPool
from pippin.engine.sequence import Sequence
from pippin.errors import UnsupportedModel
from pippin.types.model import KVGroup, KVKind


def manager(
    *groups: KVGroup, blocks: int = 32, fingerprint: str = "m", caching: bool = True
) -> KVCacheManager:
    groups = groups or (FULL,)
    return KVCacheManager(
        groups,
        (blocks,) * len(groups),
        4,
        fingerprint=fingerprint,
        enable_prefix_caching=caching,
    )


def sequence(kv: KVCacheManager, tokens: list[int], salt: str = "") -> Sequence:
    return Sequence(request("r", tokens, salt=salt), (0, 0.0, 0), len(kv.groups))


def compute(
    kv: KVCacheManager, tokens: list[int], salt: str = "", beside: Iterable[Sequence] = ()
) -> tuple[Sequence, int]:
    """Run a prompt in one chunk. Returns the sequence, still held, and the tokens it hit."""
    seq = sequence(kv, tokens, salt)
    assert kv.admit(seq, kv.lookup(seq), headroom=0)
    found = seq.num_computed
    assert kv.extend(seq, len(tokens))
    seq.num_scheduled = seq.num_computed = len(tokens)
    kv.computed(seq)
    kv.check([*beside, seq])
    return seq, found


def hit(kv: KVCacheManager, tokens: list[int], salt: str = "") -> int:
    """Tokens of a prompt that are cached; leaves nothing behind."""
    return kv.lookup(sequence(kv, tokens, salt)) * kv.block_size


# The prefix cache


def test_full_blocks_are_found_again() -> None:
    kv = manager()
    first, _ = compute(kv, list(range(10)))
    assert hit(kv, list(range(10))) == 8
    assert hit(kv, [*range(8), 99]) == 8
    assert hit(kv, [*range(7), 99, 98]) == 4
    assert hit(kv, [99, *range(1, 10)]) == 0
    kv.release(first)
    assert hit(kv, list(range(10))) == 8


def test_the_last_prompt_token_is_always_computed() -> None:
    kv = manager()
    compute(kv, list(range(8)))
    assert hit(kv, list(range(8))) == 4
    assert hit(kv, list(range(9))) == 8


def test_salt_and_model_separate() -> None:
    kv = manager()
    compute(kv, list(range(9)), salt="a")
    assert hit(kv, list(range(9)), salt="a") == 8
    assert hit(kv, list(range(9)), salt="b") == 0
    assert hit(kv, list(range(9))) == 0
    one, other = manager(fingerprint="m"), manager(fingerprint="n")
    seq, twin = sequence(one, list(range(9))), sequence(other, list(range(9)))
    one.lookup(seq)
    other.lookup(twin)
    assert not set(seq.hashes) & set(twin.hashes)


def test_fingerprint_and_salt_do_not_run_into_each_other() -> None:
    one, other = manager(fingerprint="ab"), manager(fingerprint="a")
    seq, twin = sequence(one, list(range(9)), "c"), sequence(other, list(range(9)), "bc")
    one.lookup(seq)
    other.lookup(twin)
    assert seq.hashes != twin.hashes


def test_sharing_takes_no_new_blocks() -> None:
    kv = manager()
    first, _ = compute(kv, list(range(10)))
    used = kv.pools[0].num_used
    second = sequence(kv, list(range(10)))
    assert kv.admit(second, kv.lookup(second), headroom=0)
    assert second.tables[0][:2] == first.tables[0][:2]
    assert second.tables[0][2] != first.tables[0][2]
    assert kv.pools[0].num_used == used + 1
    kv.check([first, second])


def test_off_means_off() -> None:
    kv = manager(caching=False)
    seq, _ = compute(kv, list(range(10)))
    kv.release(seq)
    assert hit(kv, list(range(10))) == 0
    assert kv.num_queries == 0


def test_prompt_logprobs_skip_the_cache() -> None:
    kv = manager()
    compute(kv, list(range(10)))
    seq = Sequence(request("r", list(range(10)), prompt_logprobs=0), (0, 0.0, 0), 1)
    assert kv.lookup(seq) == 0


def test_least_recently_used_is_evicted_first() -> None:
    kv = manager(blocks=32)
    prompts = [[first] * 33 for first in range(4)]
    for prompt in prompts[:3]:
        seq, _ = compute(kv, prompt)
        kv.release(seq)
    again, found = compute(kv, prompts[0])
    assert found == 32
    kv.release(again)
    seq, _ = compute(kv, [9] * 32)
    first, second, third = (hit(kv, prompt) for prompt in prompts[:3])
    assert first == 32
    assert second < third


def test_the_youngest_quarter_of_the_cache_stays() -> None:
    kv = manager(blocks=64)
    for number in range(16):
        seq, _ = compute(kv, [number] * 16)
        kv.release(seq)
    for number in range(100):
        seq, _ = compute(kv, [20 + number] * 3)
        kv.release(seq)
    seq, _ = compute(kv, [19] * 180)
    assert all(hit(kv, [*[number] * 16, 0]) == 16 for number in range(12, 16))


def test_admission_changes_nothing_when_it_fails() -> None:
    kv = manager(blocks=4)
    first, _ = compute(kv, list(range(8)))
    kv.release(first)
    seq = sequence(kv, list(range(20)))
    assert not kv.admit(seq, kv.lookup(seq), headroom=0)
    kv.check([])
    assert kv.usage == 0
    seq = sequence(kv, list(range(16)))
    assert not kv.admit(seq, kv.lookup(seq), headroom=1)
    assert kv.admit(seq, kv.lookup(seq), headroom=0)
    assert kv.usage == 1


def test_a_block_that_another_computes_is_awaited() -> None:
    kv = manager()
    first = sequence(kv, list(range(12)))
    assert kv.admit(first, 0, headroom=0)
    second = sequence(kv, [*range(8), 99])
    assert kv.awaits(second, kv.lookup(second))
    assert kv.awaits(second)
    first.num_computed = 4
    kv.computed(first)
    # The block it asked for is there, the next one is not.
    assert not kv.awaits(second)
    assert kv.awaits(second, kv.lookup(second))
    first.num_computed = 8
    kv.computed(first)
    assert not kv.awaits(second, kv.lookup(second))
    assert kv.lookup(second) == 2


def test_a_released_sequence_is_not_awaited() -> None:
    kv = manager()
    first = sequence(kv, list(range(12)))
    assert kv.admit(first, 0, headroom=0)
    second = sequence(kv, list(range(12)))
    assert kv.awaits(second, kv.lookup(second))
    kv.release(first)
    assert not kv.awaits(second)
    assert not kv.awaits(second, kv.lookup(second))


# Windows


def test_window_frees_what_it_left_behind() -> None:
    kv = manager(FULL, window(6))
    seq, _ = compute(kv, list(range(16)))
    # Position 16 sees 11 to 16; blocks 0 and 1 hold 0 to 7.
    assert [block >= 0 for block in seq.tables[1]] == [False, False, True, True]
    assert all(block >= 0 for block in seq.tables[0])
    assert kv.pools[1].num_used == 2


def test_window_needs_only_its_own_blocks_for_a_hit() -> None:
    kv = manager(FULL, window(6))
    seq, _ = compute(kv, list(range(16)))
    kv.release(seq)
    again = sequence(kv, list(range(17)))
    assert kv.admit(again, kv.lookup(again), headroom=0)
    assert again.num_computed == 16
    assert [block >= 0 for block in again.tables[1]] == [False, False, True, True]
    assert kv.take_new_blocks(again)[1][:2] == (-1, -1)


def test_a_gap_in_the_window_shortens_the_hit() -> None:
    # A window of 9 needs two whole blocks before a border; the third group sees one position.
    kv = manager(FULL, window(9), window(1))
    seq, _ = compute(kv, list(range(24)))
    assert seq.tables[1][4] >= 0
    kv.release(seq)
    # Forget block 4 of the first window group: hits of 5 and 6 blocks need it.
    pool = kv.pools[1]
    taken = []
    while pool.find(seq.hashes[4]) is not None:
        taken += pool.allocate(1)
    found = kv.lookup(sequence(kv, list(range(25))))
    assert taken
    held = [pool.find(key) is not None for key in seq.hashes[:6]]
    assert found == max(
        n for n in range(7) if all(held[i] for i in range(max(0, 4 * n - 8) // 4, n))
    )
    assert found < 5


def test_recurrent_state_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="recurrent"):
        manager(KVGroup(KVKind.STATE, (0,), 0))


# The allocator


def test_a_growing_sequence_stays_contiguous() -> None:
    pool = BlockPool(512)
    tables = [pool.allocate(3) for _ in range(4)]
    for _ in range(40):
        for table in tables:
            table += pool.allocate(1, table[-1])
    for table in tables:
        assert table == list(range(table[0], table[0] + 43))


def test_a_start_leaves_room_to_the_one_before() -> None:
    pool = BlockPool(10_000)
    first = pool.allocate(2)
    second = pool.allocate(2)
    assert first == [0, 1]
    assert second[0] == 2 + GROWTH_BLOCKS[0]


def test_pieces_are_used_when_no_run_is_long_enough() -> None:
    pool = BlockPool(8)
    held = pool.allocate(8)
    for block in held[::2]:
        pool.release(block)
    assert sorted(pool.allocate(4)) == [0, 2, 4, 6]
    assert pool.num_available == 0


def test_runs_stay_long_under_load() -> None:
    """A long time with a cache full of ended sequences: live ones are in one piece, or nearly."""
    kv = KVCacheManager((FULL,), (1024,), 4, fingerprint="m")
    live: list[Sequence] = []
    pieces = []
    for number in range(300):
        if len(live) == 6:
            ended = live.pop(number * 5 % 6)
            table = ended.tables[0]
            pieces.append(sum(b != a + 1 for a, b in pairwise(table)) + 1)
            kv.release(ended)
        seq, _ = compute(kv, [number, *range(60 + number * 13 % 100)], beside=live)
        live.append(seq)
        for other in live:
            assert kv.extend(other, other.num_computed + 8)
            other.tokens += [number] * 8
            other.num_scheduled = other.num_computed = other.num_computed + 8
            kv.computed(other)
    assert sum(pieces) / len(pieces) < 1.1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 7)), max_size=60))
def test_pool_books_always_agree(operations: list[tuple[int, int, int]]) -> None:
    pool = BlockPool(24)
    held: list[list[int]] = []
    for kind, number, size in operations:
        if kind == 0 and size and size <= pool.num_available:
            after = held[number % len(held)][-1] if held else -1
            blocks = pool.allocate(size, after)
            assert len(set(blocks)) == size
            held.append(blocks)
        elif kind == 1 and held:
            for block in held.pop(number % len(held)):
                pool.release(block)
        elif kind == 2 and held:
            for block in held[number % len(held)]:
                pool.register(block, bytes([number]))
        elif kind == 3:
            found = pool.find(bytes([number]))
            if found is not None:
                pool.share(found)
                held.append([found])
        counts: dict[int, int] = {}
        for blocks in held:
            for block in blocks:
                counts[block] = counts.get(block, 0) + 1
        pool.check(counts)
