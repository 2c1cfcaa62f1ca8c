"""Random traces through the scheduler, checked by the oracle at every step."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_oracle import FULL, FakeEngine, request, window

from pippin.engine.depth import PipelineShape
from pippin.errors import ContextLengthExceeded
from pippin.types.model import KVGroup, KVKind

LATENT = KVGroup(KVKind.LATENT, (2,), 4)
GROUPS = [
    (FULL,),
    (window(5),),
    (LATENT,),
    (FULL, window(3)),
    (FULL, window(8), window(13)),
    (window(1), window(2)),
]
PREFIXES = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2], [1, 2, 3, 4, 5, 5, 5, 5, 5], [7] * 20]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    prefix = draw(st.sampled_from(PREFIXES))
    head = prefix[: draw(st.integers(0, len(prefix)))]
    return head + draw(st.lists(st.integers(0, 11), min_size=not head, max_size=6))


@st.composite
def engines(draw: st.DrawFn) -> FakeEngine:
    groups = draw(st.sampled_from(GROUPS))
    tokens = draw(st.sampled_from([1, 2, 3, 5, 8, 64, None]))
    scale = draw(st.sampled_from([1e-5, 1e-3, 1.0]))
    return FakeEngine(
        groups=groups,
        num_blocks=tuple(draw(st.integers(6, 24)) for _ in groups),
        block_size=draw(st.sampled_from([1, 2, 3, 4])),
        max_model_len=draw(st.integers(20, 50)),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=tokens,
        step_time_ms=draw(st.sampled_from([None, 0.001, 5.0])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        caching=draw(st.booleans()),
        split_layers=draw(st.sampled_from([0, 2, 7])),
        seconds=lambda scheduled: scale * (10 + scheduled.plan.num_tokens),
    )


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(engines(), st.data())
def test_random_traces(engine: FakeEngine, data: st.DataObject) -> None:
    depth = data.draw(st.integers(1, 5), "depth")
    names: list[str] = []
    for _ in range(data.draw(st.integers(5, 40), "operations")):
        match data.draw(st.sampled_from("aaasssccxep"), "operation"):
            case "p":
                stages = data.draw(st.integers(1, 4), "stages")
                delay = data.draw(st.sampled_from([0.0, 0.001, 0.1]), "delay")
                engine.scheduler.set_pipeline(PipelineShape(stages, delay))
                assert engine.scheduler.num_plans >= stages
            case "a":
                name = str(len(names))
                scoring = data.draw(st.sampled_from([None, None, None, 0, 2]))
                low = 0 if scoring is None else 1
                r = request(
                    name,
                    data.draw(prompts()),
                    data.draw(st.integers(0, 12)),
                    salt=data.draw(st.sampled_from(["", "", "tenant"])),
                    priority=data.draw(st.integers(-1, 1)),
                    arrival_time=data.draw(st.sampled_from([0.0, 5.0, 6.0])),
                    deadline=data.draw(st.sampled_from([None, None, 1001.0, 1003.0])),
                    output=data.draw(st.sampled_from([[], [], [], [3, 4]])) if low == 0 else [],
                    prompt_logprobs=scoring,
                    ignore_eos=data.draw(st.booleans()),
                    stop_token_ids=data.draw(st.sampled_from([(), (5,)])),
                )
                try:
                    engine.add(r)
                except ContextLengthExceeded:
                    continue
                names.append(name)
            case "s" if len(engine.in_flight) < depth:
                engine.schedule()
            case "c" if engine.in_flight:
                engine.commit()
            case "x" if names:
                engine.abort(data.draw(st.sampled_from(names)))
            case "e":
                engine.now += 1.0
                engine.expire()
    engine.run(depth)
    engine.check_results()


@pytest.mark.parametrize("groups", GROUPS)
def test_chunks_run_a_few_layers_at_a_time(groups: tuple[KVGroup, ...]) -> None:
    """Beside decodes, with preemption in the midst of a chunk; same outputs."""
    engine = FakeEngine(
        groups=groups,
        num_blocks=tuple(16 for _ in groups),
        max_model_len=50,
        split_layers=7,
        step_time_ms=0.001,
    )
    for i in range(24):
        engine.add(request(str(i), [*PREFIXES[i % 3][: 4 + i % 7], *[i % 12] * 14], 20))
    for i in range(40):
        engine.step()
        if i % 9 == 5:
            engine.abort(str(i // 9))
    engine.run()
    engine.check_results()
    assert engine.num_parts > 50


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 60)), min_size=1, max_size=40),
)
def test_groups_stay_balanced(stages: int, lengths: list[tuple[int, int]]) -> None:
    """However sequences come and go: no plan takes more than its share of the decodes, and nobody
    waits longer than a round for the next token."""
    engine = FakeEngine(num_blocks=(2000,), max_num_seqs=64, caching=False)
    scheduler = engine.scheduler
    scheduler.set_pipeline(PipelineShape(stages))
    for i, (prompt, output) in enumerate(lengths):
        engine.add(request(str(i), [i % 11] * prompt, output))
    last: dict[str, int] = {}
    while True:
        while len(engine.in_flight) < stages:
            decoding = sum(len(seq.tokens) > seq.num_prompt for seq in scheduler._running)
            scheduled = engine.schedule()
            if scheduled is None:
                break
            assert scheduled.work.decodes <= -(-decoding // max(1, scheduler._groups))
            for seq in scheduled.sequences:
                name = seq.request.request_id
                if len(seq.tokens) > seq.num_prompt and name in last:
                    assert scheduled.plan.step - last[name] <= 2 * stages
                last[name] = scheduled.plan.step
        if not engine.in_flight:
            break
        engine.commit()
    engine.check_results()


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("depth", [1, 3])
def test_crowded_pools(groups: tuple[KVGroup, ...], depth: int) -> None:
    """Pools that hold one request and a little: much preemption, same outputs."""
    engine = FakeEngine(
        groups=groups,
        num_blocks=tuple(10 for _ in groups),
        block_size=4,
        max_model_len=40,
        max_num_batched_tokens=8,
    )
    for i in range(24):
        engine.add(request(str(i), [*PREFIXES[i % 3][: 4 + i % 7], i % 12], 20))
    engine.run(depth)
    engine.check_results()
