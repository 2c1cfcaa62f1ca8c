"""How models are cut among tensor-parallel ranks, decided without loading them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from pippin.backends.shard import (
    Sizes,
    Span,
    allowed_sizes,
    make_shard,
    sizes_of,
    split,
    splits_embedding,
    whole,
)
from pippin.errors import ConfigError

DEMO = Sizes(heads=9, kv_heads=3, value_width=64, intermediates=(1536,), vocab=49152, unit=32)


def config(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **changes)


def test_the_demo_model_can_be_cut_in_3_and_9() -> None:
    assert allowed_sizes(DEMO) == (1, 3, 9)
    assert [make_shard(DEMO, rank, 3).heads for rank in range(3)] == [
        Span(0, 3), Span(3, 6), Span(6, 9)
    ]  # fmt: skip
    assert [make_shard(DEMO, rank, 3).kv_heads for rank in range(3)] == [
        Span(0, 1), Span(1, 2), Span(2, 3)
    ]  # fmt: skip


def test_ranks_share_kv_heads_where_they_exceed_them() -> None:
    shards = [make_shard(DEMO, rank, 9) for rank in range(9)]
    assert [shard.kv_heads.start for shard in shards] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert {shard.kv_heads.count for shard in shards} == {1}


def test_an_impossible_size_names_the_possible_ones() -> None:
    with pytest.raises(ConfigError, match="9 attention heads are not a multiple of 2") as caught:
        make_shard(DEMO, 0, 2)
    assert caught.value.hint == "--tensor-parallel-size can be 1, 3 or 9 for this model"
    odd = Sizes(heads=12, kv_heads=3, value_width=64, intermediates=(128,), vocab=100)
    assert allowed_sizes(odd) == (1, 3, 6, 12)
    with pytest.raises(ConfigError, match="3 KV heads are neither a multiple nor a divisor of 4"):
        make_shard(odd, 0, 4)


def test_quantised_weights_are_not_cut_inside_a_group() -> None:
    narrow = Sizes(heads=14, kv_heads=2, value_width=64, intermediates=(4864,), vocab=99, unit=128)
    assert allowed_sizes(narrow) == (1,)
    with pytest.raises(ConfigError, match=r"448 columns .* are not whole groups of 128"):
        make_shard(narrow, 0, 2)
    assert 2 in allowed_sizes(Sizes(14, 2, 64, (4864,), 99, unit=64))
    few = Sizes(heads=8, kv_heads=8, value_width=128, intermediates=(2048, 256), vocab=99, unit=128)
    assert allowed_sizes(few) == (1, 2)
    with pytest.raises(ConfigError, match="256 columns has too few groups of 128"):
        make_shard(few, 0, 4)


def test_intermediates_need_no_equal_parts() -> None:
    shards = [make_shard(DEMO, rank, 9) for rank in range(9)]
    parts = [shard.columns(1536) for shard in shards]
    assert sorted({part.count for part in parts}) == [160, 192]
    assert all(part.start % 32 == 0 for part in parts)
    dense = Sizes(heads=3, kv_heads=3, value_width=8, intermediates=(80, 6), vocab=9)
    assert [make_shard(dense, r, 3).columns(80).count for r in range(3)] == [24, 24, 32]
    assert [make_shard(dense, r, 3).columns(6).count for r in range(3)] == [2, 2, 2]


@given(st.integers(1, 300_000), st.integers(1, 64), st.sampled_from([1, 16, 32, 64, 128]))
def test_parts_cover_everything_once(count: int, size: int, grain: int) -> None:
    parts = split(count, size, grain)
    assert len(parts) == size
    assert (parts[0].start, parts[-1].stop) == (0, count)
    assert all(a.stop == b.start for a, b in pairwise(parts))
    assert all(part.start % grain == 0 or part.start == count for part in parts)
    counts = [part.count for part in parts]
    assert max(counts) - min(counts) <= 2 * grain - 1


@given(
    st.sampled_from([1, 2, 3, 4, 7, 8, 9, 12, 14, 28, 32, 40, 64, 128]),
    st.sampled_from([1, 2, 3, 4, 8, 16, None]),
    st.sampled_from([1, 32, 64, 128]),
    st.sampled_from([64, 80, 128]),
    st.integers(1, 32),
)
def test_every_allowed_size_gives_each_head_its_own_keys(
    heads: int, kv_heads: int | None, unit: int, width: int, size: int
) -> None:
    if kv_heads is not None and heads % kv_heads:
        kv_heads = heads
    sizes = Sizes(heads, kv_heads, width, (heads * width * 4 // unit * unit,), 32_000, unit)
    if size not in allowed_sizes(sizes):
        with pytest.raises(ConfigError):
            make_shard(sizes, 0, size)
        return
    shards = [make_shard(sizes, rank, size) for rank in range(size)]
    assert [head for shard in shards for head in range(shard.heads.start, shard.heads.stop)] == [
        *range(heads)
    ]
    assert all(shard.heads.times(width).start % unit == 0 for shard in shards)
    assert all(shard.columns(sizes.intermediates[0]).count for shard in shards)
    if kv_heads is None:
        return
    for shard in shards:
        # Inside the rank, head i of n uses KV head i // (n / k): the model's own must be that one.
        own = shard.heads.count // shard.kv_heads.count
        for head in range(shard.heads.count):
            wanted = (shard.heads.start + head) // (heads // kv_heads)
            assert shard.kv_heads.start + head // own == wanted


def test_sizes_come_from_the_configuration() -> None:
    llama = config("llama", num_attention_heads=32, num_key_value_heads=8, hidden_size=2048)
    sizes = sizes_of(llama, unit=64)
    assert (sizes.heads, sizes.kv_heads, sizes.value_width, sizes.unit) == (32, 8, 64, 64)
    moe = sizes_of(config("qwen3_moe", moe_intermediate_size=768, intermediate_size=6144))
    assert moe.intermediates == (6144, 768)
    mla = sizes_of(
        config(
            "deepseek_v3",
            num_attention_heads=128,
            v_head_dim=128,
            moe_intermediate_size=2048,
            n_shared_experts=2,
            intermediate_size=18432,
        )
    )
    assert (mla.kv_heads, mla.value_width) == (None, 128)
    assert mla.intermediates == (18432, 2048, 4096)
    assert make_shard(mla, 3, 8).kv_heads.count == 0


def test_a_stage_alone_has_everything() -> None:
    shard = whole(DEMO)
    assert (shard.heads.count, shard.kv_heads.count, shard.columns(1536).count) == (9, 3, 1536)
    assert shard.vocabulary(49152) == (Span(0, 49152),)
    # However its widths fall: nothing is cut.
    odd = Sizes(heads=6, kv_heads=4, value_width=8, intermediates=(20,), vocab=9, unit=32)
    assert whole(odd).columns(20) == Span(0, 20)
    assert allowed_sizes(odd) == (1,)


def test_the_vocabulary_is_cut_in_rows() -> None:
    parts = make_shard(DEMO, 0, 3).vocabulary(49152)
    assert [part.count for part in parts] == [16384] * 3
    assert [part.count for part in make_shard(DEMO, 0, 3).vocabulary(151)] == [50, 50, 51]


def test_large_embeddings_are_cut() -> None:
    assert splits_embedding(128_256, 2048, 2, size=2)
    assert not splits_embedding(32_000, 576, 2, size=2)
    assert not splits_embedding(128_256, 2048, 2, size=1)
