"""Which layers each stage gets (pure).

A layer costs 1. The last stage pays for the head, for sampling and for the leader's own work as
well, so it gets fewer layers. Costs are in layers, from the number of weights: in a step of few
tokens time is the reading of weights, in one of many it is multiplying with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pippin.errors import ConfigError

#: What scheduling, sampling and sending cost the leader in a decode step, in weights.
LEADER_WEIGHTS = 1.0e6

#: Part of the head that is charged: prompts hardly use it, and a first stage with many more layers
#: than the last would be their bottleneck. Demo model, two stages: 18 + 12 layers instead of
#: 19 + 11 lose 2 % of decodes and win 6 % of a long prompt's time (benchmarks/pipeline.py).
HEAD_SHARE = 0.75


def layer_counts(num_layers: int, stages: int, head_layers: float) -> tuple[int, ...]:
    """Layers of each stage, such that the slowest stage is as quick as can be.

    ``head_layers``: what the last stage has to do besides its layers, in layers. Raises
    ``ConfigError`` for more stages than layers.
    """
    if stages > num_layers:
        raise ConfigError(
            f"{stages} stages, but the model has {num_layers} layers",
            hint=f"--pipeline-parallel-size {num_layers} at most",
        )
    if stages == 1:
        return (num_layers,)

    def slowest(last: int) -> float:
        rest = num_layers - last
        return max(last + head_layers, -(-rest // (stages - 1)))

    # Of equally good ones the one with least for the leader, whose work varies most.
    last = min(range(1, num_layers - stages + 2), key=lambda n: (slowest(n), n))
    rest = num_layers - last
    small, larger = divmod(rest, stages - 1)
    return (*(small + (i < larger) for i in range(stages - 1)), last)


def given_counts(given: Sequence[int], num_layers: int, stages: int) -> tuple[int, ...]:
    """``--pipeline-split`` checked. Raises ``ConfigError`` with the right numbers."""
    if sum(given) != num_layers or len(given) != stages or min(given) < 1:
        written = ",".join(map(str, given))
        even = ",".join(map(str, layer_counts(num_layers, stages, 0.0)))
        raise ConfigError(
            f"--pipeline-split {written} has {sum(given)} layers in {len(given)} stages; the model"
            f" has {num_layers}, for {stages} stages of at least one",
            hint=f"--pipeline-split {even} for example, or leave it out",
        )
    return tuple(given)


def ranges(counts: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """[first, last) of each stage."""
    found = []
    first = 0
    for count in counts:
        found.append((first, first + count))
        first += count
    return tuple(found)


def head_layers(hidden_size: int, vocab_size: int, weights: int, num_layers: int) -> float:
    """What the last stage does besides its layers, in layers.

    ``weights``: of the whole model, the embedding and the head counted once each or together.
    """
    head = hidden_size * vocab_size
    layer = max((weights - head) / num_layers, 1.0)
    return (HEAD_SHARE * head + LEADER_WEIGHTS) / layer
