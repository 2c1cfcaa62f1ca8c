from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_oracle import FakeEngine, request

from pippin.engine.sizing import size_kv
from pippin.errors import ContextLengthExceeded, OutOfMemory
from pippin.types.model import KVGroup, KVKind


def full(size: int = 100) -> KVGroup:
    return KVGroup(KVKind.FULL, (0,), size)


def sliding(window: int, size: int = 100) -> KVGroup:
    return KVGroup(KVKind.WINDOW, (1,), size, window=window)


def test_one_group_takes_every_whole_block() -> None:
    size = size_kv(100 * 16 * 10 + 99, (full(),), 16, 64, 4)
    assert size.num_blocks == (10,)
    assert size.kv_bytes == 16_000
    assert size.max_model_len == 64
    assert size.kv_tokens == 160


def test_length_is_fitted() -> None:
    assert size_kv(100 * 16 * 10, (full(),), 16, 100_000, 4).max_model_len == 160


def test_windows_take_no_more_than_they_use() -> None:
    size = size_kv(10**9, (full(), sliding(512)), 16, 4096, 8, max_chunk=2048)
    assert size.num_blocks[1] == 8 * ((512 + 2048 - 2 + 15) // 16 + 1)
    assert size.num_blocks[0] > size.num_blocks[1]
    assert size.kv_bytes <= 10**9


def test_windows_shrink_before_the_length_does() -> None:
    groups = (full(), sliding(64))
    need = 256 + 6
    size = size_kv(need * 1600, groups, 16, 4096, 64)
    assert size.max_model_len == 4096
    assert size.num_blocks == (256, 6)


def test_nothing_fits() -> None:
    with pytest.raises(OutOfMemory, match="1600"):
        size_kv(1599, (full(),), 16, 100, 4)


@settings(max_examples=30, deadline=None)
@given(
    groups=st.sampled_from(
        [
            (full(),),
            (full(10), sliding(5, 30)),
            (sliding(7),),
            (sliding(1, 50), full(), sliding(33)),
        ]
    ),
    block_size=st.sampled_from([1, 3, 4, 16]),
    available=st.integers(3_000, 20_000),
    caching=st.booleans(),
    chunk=st.sampled_from([1, 7, 64]),
)
def test_a_request_of_the_fitted_length_runs(
    groups: tuple[KVGroup, ...], block_size: int, available: int, caching: bool, chunk: int
) -> None:
    """To its very end, twice, and none that is longer is accepted and left waiting."""
    try:
        size = size_kv(available, groups, block_size, 120, 4, chunk)
    except OutOfMemory:
        return
    assert size.kv_bytes <= available
    engine = FakeEngine(
        groups=groups,
        num_blocks=size.num_blocks,
        block_size=block_size,
        max_model_len=size.max_model_len,
        max_num_batched_tokens=chunk,
        caching=caching,
        check=False,
    )
    length = size.max_model_len
    engine.add(request("long prompt", [i % 11 + 1 for i in range(length - 1)], 1))
    engine.add(request("long output", [1], length - 1))
    engine.add(request("halves", [i % 11 + 1 for i in range(length - length // 2)], length // 2))
    engine.run()
    engine.check_results()
    with pytest.raises(ContextLengthExceeded):
        engine.add(request("too long", [1] * length, 1))
