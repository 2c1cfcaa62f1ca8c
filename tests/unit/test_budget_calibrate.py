from __future__ import annotations

import pytest

from pippin.config import SchedulerConfig
from pippin.engine.budget import StepBudget, StepWork, attention_pairs
from pippin.engine.calibrate import LIMIT_SECONDS, PROMPTS, calibrate
from pippin.types.step import StepPlan


@pytest.mark.parametrize("num_blocks", [(1,), (5,), (400,), (400, 9)])
@pytest.mark.parametrize("max_num_seqs", [1, 4, 64])
@pytest.mark.parametrize("max_tokens", [1, 64, 2048])
def test_plans_can_be_executed(
    num_blocks: tuple[int, ...], max_num_seqs: int, max_tokens: int
) -> None:
    live: set[int] = set()
    plans: list[StepPlan] = []

    def execute(plan: StepPlan) -> float:
        live.difference_update(plan.freed)
        assert not live
        assert plan.num_tokens <= max_tokens
        assert len(plan.chunks) <= max_num_seqs
        used: list[int] = []
        for chunk in plan.chunks:
            live.add(chunk.seq)
            assert len({len(table) for table in chunk.new_blocks}) == 1
            assert len(chunk.new_blocks) == len(num_blocks)
            assert len(chunk.new_blocks[0]) * 16 >= chunk.end
            used += chunk.new_blocks[0]
        assert len(set(used)) == len(used)
        assert all(0 <= block < min(num_blocks) for block in used)
        plans.append(plan)
        return 0.001 * plan.num_tokens

    config = SchedulerConfig(max_num_batched_tokens=max_tokens)
    calibrate(
        StepBudget(config, 16),
        execute,
        num_blocks=num_blocks,
        block_size=16,
        max_num_seqs=max_num_seqs,
    )
    assert not live
    steps = [plan.step for plan in plans]
    assert steps == sorted(set(steps))
    assert steps[-1] < 0


def machine(work: StepWork) -> float:
    return 0.3 + 0.01 * work.decodes + 0.002 * work.prefill_tokens + 1e-7 * work.attention


def execute(plan: StepPlan) -> float:
    prompt = sum(len(chunk.token_ids) for chunk in plan.chunks if len(chunk.token_ids) > 1)
    decodes = [chunk for chunk in plan.chunks if len(chunk.token_ids) == 1]
    pairs = sum(
        attention_pairs(chunk.start, len(chunk.token_ids))
        for chunk in plan.chunks
        if len(chunk.token_ids) > 1
    )
    context = sum(chunk.end for chunk in decodes)
    return machine(StepWork(len(decodes), context, prompt, pairs))


def test_a_budget_learns_a_machine() -> None:
    budget = StepBudget(SchedulerConfig(), 16)
    calibrate(
        budget, execute, num_blocks=(400,), block_size=16, max_num_seqs=64, limit_seconds=60.0
    )
    for sequences in (1, 8, 16):
        work = StepWork(sequences, sequences)
        seconds = budget.decode_seconds(sequences, sequences)
        assert seconds == pytest.approx(machine(work), rel=0.05)
    assert budget.prefill_seconds(0, 0, 512, mixed=False) == pytest.approx(1.03, rel=0.1)
    assert budget.prefill_seconds(0, 0, 64, mixed=True) == pytest.approx(0.128, rel=0.1)


def test_a_slow_machine_is_not_kept_busy_for_long() -> None:
    measured = calibrate(
        StepBudget(SchedulerConfig(), 16),
        lambda plan: 10 * execute(plan),
        num_blocks=(400,),
        block_size=16,
        max_num_seqs=64,
    )
    prompts = [work.prefill_tokens for work, _ in measured if not work.decodes]
    assert max(prompts, default=0) < max(count for count, _ in PROMPTS)
    assert sum(seconds for work, seconds in measured if work.prefill_tokens) < 4 * LIMIT_SECONDS
