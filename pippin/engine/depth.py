"""How many plans a pipeline of stages is given at once, and how large they are (pure).

``P`` groups of sequences take turns in ``S`` stages. A group's next token comes after its plan went
through all stages and the links between them, and after the other groups had their turn in each
stage. With a step time of ``t`` (of the slowest stage, for a group's share of the sequences) and a
delay of all links of ``d`` together, a round takes ``max(P * t, S * t + d)``. More groups fill the
time that links take; but each has fewer sequences, and a step costs something however few it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

#: Most plans in flight beyond one a stage.
MOST_EXTRA = 8

#: A change of the number of groups must be worth this share of the round: each change leaves some
#: groups small for a round or two.
_WORTH = 0.04


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """What the scheduler must know of the pipeline."""

    stages: int = 1
    delay: float = 0.0
    """Seconds that a plan spends between stages on its way round."""


def num_groups(
    shape: PipelineShape, sequences: int, seconds: Callable[[int], float], before: int
) -> int:
    """Groups into which ``sequences`` that decode are best divided.

    ``seconds(n)`` predicts the slowest stage's step with ``n`` of them; ``before`` is the number
    of groups so far, kept unless another is clearly better.
    """
    if shape.stages == 1 or sequences <= 1:
        return 1

    def round_time(groups: int) -> float:
        step = seconds(-(-sequences // groups))
        return max(groups * step, shape.stages * step + shape.delay)

    most = min(shape.stages + MOST_EXTRA, sequences)
    times = {groups: round_time(groups) for groups in range(1, most + 1)}
    best = min(times.values())
    if before in times and times[before] * (1 - _WORTH) <= best:
        return before
    # Of nearly equal ones the fewest: what a plan costs the leader is not in ``seconds``.
    return min(groups for groups, time in times.items() if time <= best * (1 + _WORTH / 2))


def num_plans(shape: PipelineShape, groups: int, step: float) -> int:
    """Most plans in flight, where a step takes ``step`` seconds in the slowest stage.

    Where nothing decodes (``groups`` is 0) there is one more than the pipe holds, so that a stage
    finds its next chunk waiting; streams would wait for it themselves.
    """
    if shape.stages == 1:
        return 1
    delayed = math.ceil(shape.delay / step - 0.25) if step > 0 else 0
    filled = shape.stages + min(max(delayed, 0), MOST_EXTRA)
    return max(filled, groups) if groups else filled + 1


def chunk_seconds(stages: int, prompt: float, step: float) -> float:
    """Best length of a chunk of prompts that take ``prompt`` seconds in all, in the slowest stage.

    ``n`` chunks take ``(n + S - 1) * (prompt / n + step)``: few leave stages idle while the pipe
    fills and empties, many pay the fixed part of a step often.
    """
    if stages == 1:
        return math.inf
    return math.sqrt(prompt * step / (stages - 1)) + step
