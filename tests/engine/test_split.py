"""Which layers each stage gets."""

from __future__ import annotations

import pytest

from pippin.engine.ranks import cores
from pippin.engine.split import given_counts, head_layers, layer_counts, ranges
from pippin.errors import ConfigError


def test_the_last_stage_is_charged_with_the_head():
    assert layer_counts(30, 2, 0.0) == (15, 15)
    assert layer_counts(30, 2, 8.0) == (19, 11)
    assert layer_counts(30, 3, 8.0) == (13, 13, 4)
    assert layer_counts(30, 4, 9.4) == (10, 10, 9, 1)
    assert layer_counts(30, 1, 8.0) == (30,)
    assert layer_counts(5, 5, 8.0) == (1, 1, 1, 1, 1)


def test_every_stage_gets_a_layer_and_every_layer_a_stage():
    for stages in range(1, 13):
        for head in (0.0, 0.7, 3.0, 50.0):
            counts = layer_counts(12, stages, head)
            assert (len(counts), sum(counts)) == (stages, 12)
            assert min(counts) >= 1


def test_no_split_is_better():
    """Against all splits of ten layers in three."""
    for head in (0.0, 1.5, 4.0):

        def slowest(counts: tuple[int, ...], head: float = head) -> float:
            return max(*counts[:-1], counts[-1] + head)

        every = [(a, b, 10 - a - b) for a in range(1, 9) for b in range(1, 10 - a)]
        assert slowest(layer_counts(10, 3, head)) == min(map(slowest, every))


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match=r"4 stages.*3 layers") as caught:
        layer_counts(3, 4, 0.0)
    assert caught.value.hint == "--pipeline-parallel-size 3 at most"


def test_a_given_split_is_checked():
    assert given_counts((17, 13), 30, 2) == (17, 13)
    for given in ((17, 12), (30, 0), (10, 10, 10)):
        with pytest.raises(ConfigError, match="the model has 30") as caught:
            given_counts(given, 30, 2)
        assert "15,15" in (caught.value.hint or "")


def test_ranges():
    assert ranges((17, 13)) == ((0, 17), (17, 30))


def test_the_demo_model():
    """30 layers of 3.54 million weights, a tied head of 28.3 million."""
    head = head_layers(576, 49152, 30 * 3_540_096 + 576 * 49152, 30)
    assert head == pytest.approx(0.75 * 8.0 + 1.0 / 3.54, abs=0.1)
    assert layer_counts(30, 2, head) == (18, 12)
    assert layer_counts(30, 3, head) == (12, 12, 6)
    assert layer_counts(30, 4, head) == (9, 9, 9, 3)


def test_cores():
    assert cores(2, None, [0, 1]) == [(0,), (1,)]
    assert cores(2, None, [2, 3, 6, 7, 8]) == [(2, 3), (6, 7)]
    assert cores(4, None, [0, 1]) == [(0,), (1,), (0,), (1,)]
    assert cores(2, 1, [0, 1, 2, 3]) == [(0,), (1,)]
    with pytest.raises(ConfigError, match="2 ranks of 2 cores need 4") as caught:
        cores(2, 2, [0, 1])
    assert caught.value.hint == "--cpus-per-rank 1, or leave it out"
