"""How many groups and plans, how long a chunk: pure decisions."""

from __future__ import annotations

import math

import pytest

from pippin.engine.depth import PipelineShape, chunk_seconds, num_groups, num_plans


def step(count: int) -> float:
    """A machine that takes 10 ms for any step and 0.5 ms for a sequence."""
    return 0.010 + 0.0005 * count


def test_two_stages_run_two_groups():
    assert num_groups(PipelineShape(2), 32, step, 0) == 2
    assert num_groups(PipelineShape(3), 32, step, 0) == 3
    assert num_groups(PipelineShape(1), 32, step, 0) == 1


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_one_sequence_is_one_group(stages: int):
    assert num_groups(PipelineShape(stages, 0.1), 1, step, 0) == 1


def test_never_more_groups_than_sequences():
    assert num_groups(PipelineShape(4, 0.5), 3, step, 0) <= 3


def test_a_slow_link_is_filled_with_further_groups():
    near = num_groups(PipelineShape(2, 0.001), 32, step, 0)
    far = num_groups(PipelineShape(2, 0.040), 32, step, 0)
    assert (near, far) == (2, 4)


def test_groups_stay_where_another_is_hardly_better():
    delay = 0.0175
    assert num_groups(PipelineShape(2, delay), 32, step, 3) == 3
    assert num_groups(PipelineShape(2, 0.0), 32, step, 3) == 2


def test_plans_in_flight():
    assert num_plans(PipelineShape(1), 1, 0.02) == 1
    # Streams would wait for a plan that only stands in line.
    assert num_plans(PipelineShape(2), 2, 0.02) == 2
    assert num_plans(PipelineShape(2), 0, 0.02) == 3
    assert num_plans(PipelineShape(2, 0.04), 2, 0.02) == 4
    assert num_plans(PipelineShape(2, 9.0), 2, 0.001) == 10, "bounded"


def test_the_best_chunk_is_the_best():
    """The formula against trying all numbers of chunks."""
    stages, prompt, fixed = 3, 2.0, 0.01

    def total(chunks: int) -> float:
        return (chunks + stages - 1) * (prompt / chunks + fixed)

    best = min(range(1, 400), key=total)
    assert chunk_seconds(stages, prompt, fixed) == pytest.approx(prompt / best + fixed, rel=0.05)
    assert chunk_seconds(1, prompt, fixed) == math.inf
