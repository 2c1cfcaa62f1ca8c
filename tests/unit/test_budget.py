"""The step budget on simulated machines: what a stream and a long prompt do to each other."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pippin.backends.base import SampledToken
from pippin.config import SchedulerConfig
from pippin.engine.blocks import KVCacheManager
from pippin.engine.budget import (
    DELIVERY_SECONDS,
    IDLE_SECONDS,
    MAX_GAP,
    MAX_TOKENS,
    StepBudget,
    StepWork,
    attention_pairs,
)
from pippin.engine.calibrate import calibrate
from pippin.engine.scheduler import Scheduled, Scheduler
from pippin.types.model import KVGroup, KVKind
from pippin.types.request import Request, SamplingParams
from pippin.types.step import StepPlan

Machine = Callable[[StepWork], float]


def additive(work: StepWork) -> float:
    """A small CPU on which every token costs the same."""
    return (
        0.020
        + 6e-4 * work.decodes
        + 2e-7 * work.context
        + 5e-4 * work.prefill_tokens
        + 2e-8 * work.attention
    )


def roofline(work: StepWork) -> float:
    """A small CPU that hides some tokens behind reading the weights."""
    tokens = work.decodes + work.prefill_tokens
    return max(0.018, 5e-4 * tokens) + 0.002 + 2e-7 * work.context + 2e-8 * work.attention


def accelerator(work: StepWork) -> float:
    tokens = work.decodes + work.prefill_tokens
    return max(0.004, 2e-5 * tokens) + 0.001 + 1e-8 * work.context + 1e-10 * work.attention


def quick_decode(work: StepWork) -> float:
    """Small weights: decodes are quick, prompts are not."""
    return 0.005 + 0.001 * work.decodes + 0.0012 * work.prefill_tokens + 3e-8 * work.attention


def huge(work: StepWork) -> float:
    """A model that is far too large for its machine."""
    return 0.9 + 0.01 * work.decodes + 0.02 * work.prefill_tokens + 4e-7 * work.attention


MACHINES = [additive, roofline, accelerator, quick_decode, huge]


def _work(plan: StepPlan) -> StepWork:
    prompts = [len(chunk.token_ids) for chunk in plan.chunks if len(chunk.token_ids) > 1]
    decodes = len(plan.chunks) - len(prompts)
    chunks = [chunk for chunk in plan.chunks if len(chunk.token_ids) > 1]
    pairs = sum(attention_pairs(chunk.start, len(chunk.token_ids)) for chunk in chunks)
    context = sum(chunk.end for chunk in plan.chunks if len(chunk.token_ids) == 1)
    return StepWork(decodes, context, sum(prompts), pairs)


class Simulation:
    """The real scheduler on a machine that only takes time."""

    def __init__(self, machine: Machine, noise: float = 0.0, config: SchedulerConfig | None = None):
        config = config or SchedulerConfig()
        blocks = (4096,)
        self.budget = StepBudget(config, 16)
        kv = KVCacheManager((KVGroup(KVKind.FULL, (0,), 4),), blocks, 16)
        self.scheduler = Scheduler(config, kv, self.budget, 16384)
        self.machine = machine
        self.noise = noise
        self.random = random.Random(7)
        self.now = 0.0
        self.times: dict[str, list[float]] = {}
        calibrate(
            self.budget,
            lambda plan: self.seconds(_work(plan)),
            num_blocks=blocks,
            block_size=16,
            max_num_seqs=config.max_num_seqs,
        )

    def seconds(self, work: StepWork) -> float:
        return self.machine(work) * max(0.9, self.random.gauss(1, self.noise))

    def add(self, name: str, length: int, max_tokens: int) -> None:
        self.scheduler.add(
            Request(
                request_id=name,
                prompt_token_ids=[len(self.times), *range(length - 1)],
                params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                seed=0,
                max_tokens=max_tokens,
            )
        )
        self.times[name] = []

    def step(self) -> Scheduled:
        scheduled = self.scheduler.schedule(self.now)
        assert scheduled is not None
        seconds = self.seconds(scheduled.work)
        self.now += seconds + DELIVERY_SECONDS
        tokens = {row.seq: SampledToken(5) for row in scheduled.rows}
        for output in self.scheduler.commit(scheduled, tokens, {}, seconds):
            self.times[output.request_id] += [self.now] * len(output.token_ids)
        return scheduled

    def until_first_token(self, name: str) -> float:
        start = self.now
        while not self.times[name]:
            self.step()
        return self.now - start

    def gaps(self, name: str) -> list[float]:
        times = self.times[name]
        return [b - a for a, b in pairwise(times)]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("streams", [1, 8])
@pytest.mark.parametrize("met_before", [False, True])
def test_a_long_prompt_and_a_stream_bear_each_other(
    machine: Machine, streams: int, met_before: bool
) -> None:
    """Issue 2: the largest gap under 4 times the median, the prompt's wait at most 1.5 times."""
    alone = Simulation(machine, noise=0.02)
    alone.add("prompt", 6000, 1)
    best = alone.until_first_token("prompt")

    both = Simulation(machine, noise=0.02)
    if met_before:
        both.add("earlier", 6000, 4)
        both.until_first_token("earlier")
    for i in range(streams):
        both.add(f"stream {i}", 50, 3000)
    for _ in range(50):
        both.step()
    before = len(both.gaps("stream 0"))
    both.add("prompt", 6000, 1)
    waited = both.until_first_token("prompt")
    for _ in range(3):
        both.step()
    gaps = both.gaps("stream 0")
    assert max(gaps[before:]) < 4 * median(gaps[:before])
    assert waited <= 1.5 * best


def test_streams_pause_less_where_prompts_ride_for_free() -> None:
    both = Simulation(roofline)
    both.add("stream", 50, 3000)
    both.until_first_token("stream")
    both.add("prompt", 6000, 1)
    both.until_first_token("prompt")
    assert max(both.gaps("stream")[-20:]) < 0.8 * MAX_GAP * median(
        both.gaps("stream")[:5] or [0.02]
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_alone_a_prompt_runs_in_long_but_bounded_steps(machine: Machine) -> None:
    alone = Simulation(machine)
    alone.add("prompt", 6000, 1)
    steps = []
    while not alone.times["prompt"]:
        start = alone.now
        work = alone.step().work
        steps.append((work.prefill_tokens, alone.now - start))
    assert all(tokens <= MAX_TOKENS for tokens, _ in steps)
    fixed = machine(StepWork())
    assert all(seconds < 1.3 * max(IDLE_SECONDS, 5 * fixed) for _, seconds in steps)
    least = machine(StepWork(prefill_tokens=6000, attention=attention_pairs(0, 6000)))
    # Five steps' worth of the fixed part a step: a quarter more than without any steps.
    assert alone.now < 1.35 * least


def test_a_machine_that_slows_down_is_followed() -> None:
    slowdown = 1.0
    both = Simulation(lambda work: slowdown * additive(work))
    both.add("stream", 50, 3000)
    both.until_first_token("stream")
    slowdown = 3.0
    for _ in range(30):
        both.step()
    assert both.budget.decode_seconds(1, 80) == pytest.approx(
        3 * additive(StepWork(1, 80)), rel=0.1
    )


def test_outliers_change_little() -> None:
    both = Simulation(additive)
    both.add("stream", 50, 3000)
    both.until_first_token("stream")
    for number in range(60):
        both.machine = (lambda work: 50 * additive(work)) if number % 10 == 5 else additive
        both.step()
    usual = additive(StepWork(1, 110))
    assert both.budget.decode_seconds(1, 110) == pytest.approx(usual, rel=0.1)


def test_the_wished_step_time_is_kept() -> None:
    config = SchedulerConfig(step_time_ms=40.0)
    both = Simulation(additive, config=config)
    both.add("stream", 50, 3000)
    both.until_first_token("stream")
    both.add("prompt", 6000, 1)
    both.until_first_token("prompt")
    gaps = both.gaps("stream")
    assert 0.030 < median(gaps) < 0.042
    assert max(gaps) < 0.045


def test_a_step_time_below_a_decode_still_lets_prompts_go_on() -> None:
    config = SchedulerConfig(step_time_ms=1.0)
    both = Simulation(additive, config=config)
    both.add("stream", 50, 3000)
    both.until_first_token("stream")
    both.add("prompt", 100, 1)
    for _ in range(14):
        both.step()
    assert both.times["prompt"]


@given(
    st.floats(-1, 10),
    st.integers(0, 10_000),
    st.integers(1, 10_000),
    st.integers(1, 3000),
    st.booleans(),
)
def test_chunks_keep_to_their_bounds(
    seconds: float, start: int, wanted: int, tokens_left: int, mixed: bool
) -> None:
    budget = StepBudget(SchedulerConfig(), 16)
    count = budget.chunk(seconds, 0, start, wanted, tokens_left, mixed=mixed)
    assert 0 <= count <= min(wanted, tokens_left)
    if count:
        assert budget.prefill_seconds(0, start, count, mixed=mixed) <= seconds * 1.001
    if 128 < count < min(wanted, tokens_left):
        assert (start + count) % 16 == 0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 64), st.integers(0, 10**6), st.integers(0, 4096), st.floats(0, 100)
        ),
        max_size=40,
    )
)
def test_no_observation_breaks_the_model(steps: list[tuple[int, int, int, float]]) -> None:
    budget = StepBudget(SchedulerConfig(), 16)
    for decodes, context, tokens, seconds in steps:
        if decodes or tokens:
            pairs = attention_pairs(context, tokens)
            budget.observe(StepWork(decodes, context if decodes else 0, tokens, pairs), seconds)
    assert 0 < budget.decode_seconds(1, 1) < 1e6
    assert 0 < budget.prefill_seconds(0, 0, 16, mixed=True) < 1e6
    assert budget.least_chunk(5000, 2048) == 8
