"""Pipelines give the tokens of one process: greedy, seeded, preempted, aborted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ring_kit import Ring, answers
from torch_tiny import MODELS, make_reference

from pippin.types.request import SamplingParams

pytestmark = pytest.mark.slow

LAYERS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=14, ignore_eos=True)

Make = Callable[..., Ring]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    kind, changes = MODELS["llama"]
    make_reference(kind, changes | {"num_hidden_layers": LAYERS}).save_pretrained(folder)
    return folder


@pytest.fixture
def make() -> Iterator[Make]:
    rings: list[Ring] = []

    def make(folder: Path, counts: tuple[int, ...], **sections: Any) -> Ring:
        rings.append(Ring(folder, counts, **sections))
        return rings[-1]

    yield make
    for ring in rings:
        ring.close()
        assert not ring.errors


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(3, 151) for _ in range(n)] for n in lengths]


LENGTHS = (1, 3, 9, 17, 40, 57, 90, 150, 8, 12, 5)


@pytest.mark.parametrize("counts", [(3, 3), (1, 2, 3), (2, 1, 1, 2), (1, 1, 1, 1, 1, 1)])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_stages_give_the_tokens_of_one_process(
    path: Path, make: Make, counts: tuple[int, ...], params: SamplingParams
):
    texts = prompts(LENGTHS)
    tight = {"max_num_batched_tokens": 32}
    expected = answers(make(path, (LAYERS,)).engine, texts, params)
    ring = make(path, counts, scheduler=tight)
    assert answers(ring.engine, texts, params) == expected
    assert [stage.layers[1] - stage.layers[0] for stage in ring.engine.ready.stages] == list(counts)
    # Again, with prompts found in the cache; and one alone.
    assert answers(ring.engine, texts, params) == expected
    assert answers(ring.engine, texts[:1], params) == expected[:1]
    assert len(ring.engine.busy()) == len(counts)


@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3", "qwen3_moe"])
def test_groups_that_a_stage_lacks(name: str, tmp_path: Path, make: Make):
    make_reference(*MODELS[name]).save_pretrained(tmp_path)
    texts = prompts((5, 33, 60))
    expected = answers(make(tmp_path, (3,)).engine, texts, GREEDY)
    assert answers(make(tmp_path, (1, 1, 1)).engine, texts, GREEDY) == expected


def test_preemption_with_plans_in_flight(path: Path, make: Make):
    texts = prompts((30, 31, 32, 33, 34, 35))
    roomy = make(path, (LAYERS,)).engine
    expected = answers(roomy, texts, SEEDED)
    per_block = roomy.ready.kv_bytes // roomy.ready.num_blocks[0]
    ring = make(
        path,
        (2, 2, 2),
        model={"max_model_len": 64},
        cache={"kv_cache_bytes": 8 * per_block // 3, "enable_prefix_caching": False},
    )
    assert answers(ring.engine, texts, SEEDED) == expected
    assert ring.engine.stats().num_preemptions > 0


def test_aborts_with_plans_in_flight(path: Path, make: Make):
    texts = prompts((20, 60, 5, 90, 14))
    expected = answers(make(path, (LAYERS,)).engine, texts, GREEDY)
    ring = make(path, (3, 1, 2), scheduler={"max_num_batched_tokens": 16})
    found = answers(ring.engine, texts, GREEDY, abort_after={1: 3, 2: 1, 4: 6})
    for index, wanted in enumerate(expected):
        if index in (1, 2, 4):
            assert found[index] == wanted[: len(found[index])]
            assert len(found[index]) < len(wanted)
        else:
            assert found[index] == wanted


def test_decodes_are_shared_among_plans(path: Path, make: Make):
    """Six sequences on two stages run as two groups of three, not as six in every step."""
    ring = make(path, (3, 3))
    sizes: list[int] = []
    schedule = ring.engine._scheduler.schedule

    def spy(now: float) -> Any:
        scheduled = schedule(now)
        if scheduled is not None and not scheduled.work.prefill_tokens:
            sizes.append(scheduled.work.decodes)
        return scheduled

    ring.engine._scheduler.schedule = spy  # type: ignore[method-assign]
    # A machine whose steps cost by the sequence: two groups are clearly best.
    ring.engine._scheduler._budget.decode_seconds = lambda n, context: 1.0 + n  # type: ignore
    answers(ring.engine, prompts((5,) * 6), GREEDY)
    assert sizes.count(3) > len(sizes) * 0.8, sizes
