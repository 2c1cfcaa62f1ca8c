"""Which stages fit together: pure."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_kit import announcement

from pippin.types.stage import PROTOCOL, check_ring, mismatch


def ring(*cuts: int):
    return [
        announcement(rank, layers=(a, b), num_layers=cuts[-1])
        for rank, (a, b) in enumerate(pairwise(cuts))
    ]


@given(st.sets(st.integers(1, 59), max_size=7))
def test_every_cut_of_the_layers_is_a_ring(inner):
    assert check_ring(ring(0, *sorted(inner), 60)) is None


@given(st.sets(st.integers(1, 59), min_size=1, max_size=5), st.data())
def test_a_layer_lost_or_doubled_at_a_cut_is_noticed(inner, data):
    stages = ring(0, *sorted(inner), 60)
    index = data.draw(st.integers(0, len(stages) - 1))
    first, last = stages[index].layers
    layers = data.draw(
        st.sampled_from(
            [(first - 1, last), (first + 1, last), (first, last - 1), (first, last + 1)]
        )
    )
    stages[index] = announcement(index, layers=layers, num_layers=60)
    assert check_ring(stages) is not None


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([], "at least one stage"),
        (ring(1, 4), "no stage has layer 0: the first begins at layer 1"),
        ([announcement(0, layers=(0, 3))], "ends before layer 3, but the model has 4 layers"),
        ([announcement(0, layers=(2, 2))], "stage 0 has no layers"),
        (ring(0, 2, 4)[::-1], "stage 1 stands at place 0"),
        ([ring(0, 2, 4)[0], announcement(1, layers=(3, 4))], "begins at layer 3"),
        ([ring(0, 2, 4)[0], announcement(1, layers=(1, 4))], "begins at layer 1"),
        ([ring(0, 2, 4)[0], announcement(1, dtype="float16")], "dtype"),
    ],
)
def test_what_is_not_one_pipeline(stages, words):
    assert words in check_ring(stages)


@pytest.mark.parametrize(
    "change",
    [
        {"protocol": PROTOCOL + 1},
        {"version": "2"},
        {"fingerprint": "x"},
        {"num_layers": 5},
        {"hidden_size": 5},
        {"vocab_size": 5},
        {"dtype": "float16"},
        {"rank": 0},
    ],
)
def test_any_difference_that_matters_is_a_mismatch(change):
    a, b = announcement(0), announcement(1)
    assert mismatch(a, b, follows=True) is None
    changed = announcement(**{"rank": 1} | change)
    assert mismatch(a, changed, follows=True) is not None
    assert mismatch(a, changed, follows=False) is not None


def test_backends_may_differ():
    other = announcement(1, backend="mlx", device="gpu", tensor_parallel_size=2, pid=7)
    assert mismatch(announcement(0), other, follows=True) is None


def test_the_way_back_to_the_first_stage_has_no_layers_to_follow():
    leader, first = ring(0, 2, 4)[1], ring(0, 2, 4)[0]
    assert mismatch(leader, first, follows=False) is None
    assert mismatch(leader, first, follows=True) is not None
