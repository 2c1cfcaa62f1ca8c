from __future__ import annotations

import pytest
from scheduler_oracle import EOS, FakeEngine, fake_token, request, window

from pippin.engine.depth import PipelineShape
from pippin.engine.scheduler import MAX_PROMPT_ROWS, Scheduled
from pippin.errors import ContextLengthExceeded, InvalidRequest
from pippin.types.request import FinishReason


def ids(scheduled: Scheduled | None) -> list[str]:
    assert scheduled is not None
    return [seq.request.request_id for seq in scheduled.sequences]


def sizes(scheduled: Scheduled | None) -> list[int]:
    assert scheduled is not None
    return [len(chunk.token_ids) for chunk in scheduled.plan.chunks]


def prompt(length: int, first: int = 1) -> list[int]:
    return [first, *(i % 11 + 1 for i in range(length - 1))]


# Order and budget


def test_a_prompt_runs_in_chunks_and_then_decodes() -> None:
    engine = FakeEngine(max_num_batched_tokens=8)
    engine.add(request("a", prompt(18), 3))
    assert [sizes(engine.step()) for _ in range(5)] == [[8], [8], [2], [1], [1]]
    assert engine.step() is None
    engine.check_results()


def test_decodes_come_first_and_prompts_share_the_step() -> None:
    engine = FakeEngine(max_num_batched_tokens=8)
    engine.add(request("a", prompt(4), 9))
    engine.add(request("b", prompt(16, 2), 2))
    scheduled = engine.step()
    assert (ids(scheduled), sizes(scheduled)) == (["a", "b"], [4, 4])
    scheduled = engine.step()
    assert (ids(scheduled), sizes(scheduled)) == (["a", "b"], [1, 7])
    engine.run()
    engine.check_results()


def test_first_come_first_served() -> None:
    engine = FakeEngine(max_num_seqs=1)
    for name, arrival in (("late", 9.0), ("early", 3.0), ("middle", 5.0)):
        engine.add(request(name, prompt(4), 1, arrival_time=arrival, priority=int(-arrival)))
    engine.run()
    assert engine.entered == ["early", "middle", "late"]


def test_priority_goes_before_arrival() -> None:
    engine = FakeEngine(max_num_seqs=1, policy="priority")
    for name, priority, arrival in (("c", 1, 1.0), ("b", 0, 5.0), ("a", 0, 4.0)):
        engine.add(request(name, prompt(4), 1, arrival_time=arrival, priority=priority))
    engine.run()
    assert engine.entered == ["a", "b", "c"]


def test_more_sequences_than_tokens_take_turns() -> None:
    """Three plans in flight let in more sequences than a plan holds; later one plan serves all."""
    engine = FakeEngine(max_num_batched_tokens=2, max_num_seqs=5, caching=False)
    for i in range(5):
        engine.add(request(str(i), [i + 1], 40))
    for _ in range(3):
        engine.schedule()
    for _ in range(3):
        engine.commit()
    for _ in range(50):
        engine.step()
    counts = [len(engine.tokens(str(i))) for i in range(5)]
    assert min(counts) > 0
    assert max(counts) - min(counts) <= 2
    engine.run()
    engine.check_results()


def test_a_prompt_gets_its_share_of_a_step_full_of_decodes() -> None:
    engine = FakeEngine(max_num_batched_tokens=4, max_num_seqs=5)
    engine.add(request("long", prompt(40), 1, arrival_time=9.0))
    engine.step()
    for i in range(4):
        engine.add(request(str(i), [i + 2], 60))
    while not engine.tokens("long"):
        engine.step()
    assert all(len(engine.tokens(str(i))) < 60 for i in range(4))


def test_decodes_use_what_prompts_cannot() -> None:
    """Tokens kept for a prompt go to decodes when it has to wait for blocks."""
    engine = FakeEngine(
        groups=(window(4),), num_blocks=(3,), max_num_batched_tokens=1, caching=False
    )
    engine.add(request("a", prompt(3), 40))
    engine.add(request("b", prompt(30, 2), 2))
    engine.run(depth=2)
    engine.check_results()


# Several plans in flight


def test_chunks_of_a_prompt_follow_each_other_but_decodes_wait() -> None:
    engine = FakeEngine(max_num_batched_tokens=8)
    engine.add(request("a", prompt(20), 2))
    plans = [engine.schedule() for _ in range(3)]
    assert [sizes(plan) for plan in plans] == [[8], [8], [4]]
    assert engine.schedule() is None
    engine.commit()
    engine.commit()
    assert engine.schedule() is None
    engine.commit()
    assert sizes(engine.schedule()) == [1]


def costly(engine: FakeEngine) -> None:
    """Let a step cost by the sequence, so that a pipeline is best given its share to each plan."""
    engine.budget.decode_seconds = lambda sequences, context: 0.01 + 0.001 * sequences  # type: ignore[method-assign]


def test_a_pipeline_shares_the_decodes_among_its_plans() -> None:
    engine = FakeEngine(num_blocks=(400,), max_num_seqs=32, caching=False)
    costly(engine)
    engine.scheduler.set_pipeline(PipelineShape(2))
    for i in range(32):
        engine.add(request(str(i), [i % 11 + 1], 30))
    while any(not engine.tokens(str(i)) for i in range(32)):
        engine.step()
    first, second = engine.schedule(), engine.schedule()
    assert (len(sizes(first)), len(sizes(second))) == (16, 16)
    assert not set(ids(first)) & set(ids(second))
    assert engine.scheduler.num_plans == 2
    assert engine.schedule() is None
    # Ten of one group end: the groups even out within a round.
    for name in ids(first)[:10]:
        engine.abort(name)
    counts = []
    for _ in range(6):
        engine.commit()
        counts.append(len(sizes(engine.schedule())))
    assert counts[0] == 6
    assert counts[2:] == [11, 11, 11, 11]
    engine.run(depth=2)
    engine.check_results()


def test_one_sequence_is_not_held_back_by_a_pipeline() -> None:
    engine = FakeEngine()
    engine.scheduler.set_pipeline(PipelineShape(4, 0.5))
    engine.add(request("a", prompt(5), 6))
    steps = 0
    while engine.step() is not None:
        steps += 1
    assert steps == 6
    engine.check_results()


def test_a_prompt_alone_fills_a_pipeline_with_small_chunks() -> None:
    """Few large chunks would leave stages idle while the pipe fills."""
    one, four = (
        FakeEngine(
            num_blocks=(900,),
            max_model_len=3000,
            seconds=lambda scheduled: 0.01 + 0.001 * scheduled.plan.num_tokens,
        )
        for _ in range(2)
    )
    four.scheduler.set_pipeline(PipelineShape(4))
    chunks = []
    for engine in (one, four):
        engine.add(request("a", prompt(2000), 1))
        count = 0
        while engine.step() is not None:
            count += 1
        chunks.append(count)
    assert chunks[1] > 2 * chunks[0]


def test_an_aborted_sequence_keeps_its_blocks_while_a_plan_uses_them() -> None:
    engine = FakeEngine(max_num_batched_tokens=8)
    engine.add(request("a", prompt(16), 2))
    engine.schedule()
    engine.schedule()
    engine.abort("a")
    assert engine.outputs["a"][-1].finish_reason is FinishReason.ABORT
    assert engine.kv.usage > 0
    engine.commit()
    assert engine.kv.usage > 0
    engine.commit()
    assert engine.kv.usage == 0
    assert not engine.scheduler.has_unfinished()
    # The next plan tells the stages.
    engine.add(request("b", prompt(3), 1))
    scheduled = engine.step()
    assert scheduled is not None
    assert scheduled.plan.freed == (0,)
    assert scheduled.plan.chunks[0].seq != 0


# Endings


def test_tokens_until_a_stop() -> None:
    engine = FakeEngine()
    text = prompt(5)
    first = fake_token(text)
    engine.add(request("stop", text, 9, stop_token_ids=(first,)))
    engine.add(request("go on", text, 9, stop_token_ids=(first,), min_tokens=2))
    engine.run()
    engine.check_results()
    last = engine.outputs["stop"][-1]
    assert (last.token_ids, last.finish_reason, last.stop_reason) == (
        [first],
        FinishReason.STOP,
        first,
    )
    assert len(engine.tokens("go on")) > 1


def test_the_context_length_ends_a_sequence() -> None:
    engine = FakeEngine(max_model_len=10)
    engine.add(request("a", prompt(6), 4))
    engine.run()
    assert len(engine.tokens("a")) == 4
    assert engine.outputs["a"][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("scores", [None, 2])
def test_a_prompt_alone_is_computed_and_ends(scores: int | None) -> None:
    engine = FakeEngine(max_num_batched_tokens=4)
    engine.add(request("a", prompt(10), 0, prompt_logprobs=scores))
    engine.run()
    engine.check_results()
    (output,) = engine.outputs["a"]
    assert output.token_ids == []
    assert output.finish_reason is FinishReason.LENGTH
    assert (output.prompt_logprobs is None) == (scores is None)


def test_abort_in_every_state() -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.add(request("running", prompt(4), 5))
    engine.add(request("waiting", prompt(4), 5))
    engine.step()
    engine.abort("waiting")
    engine.abort("running")
    assert engine.scheduler.abort("running") is None
    assert engine.scheduler.abort("unknown") is None
    engine.check_results()


def test_deadlines() -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.add(request("running", prompt(4), 50, deadline=1001.0))
    engine.add(request("waiting", prompt(4), 50, deadline=1001.0))
    engine.add(request("in time", prompt(4), 2, deadline=1002.0))
    engine.step()
    engine.now = 1000.9
    engine.expire()
    assert not engine.ended("running")
    engine.now = 1001.0
    engine.expire()
    for name in ("running", "waiting"):
        last = engine.outputs[name][-1]
        assert last.finish_reason is FinishReason.ERROR
        assert last.error is not None
        assert "deadline" in last.error
    engine.run()
    assert engine.outputs["in time"][-1].finish_reason is FinishReason.LENGTH
    engine.now = 1003.0
    engine.expire()
    engine.check_results()


def test_an_old_deadline_does_not_end_a_later_request_of_the_same_id() -> None:
    engine = FakeEngine()
    engine.add(request("a", prompt(4), 1, deadline=1001.0))
    engine.run()
    engine.add(request("a", prompt(4), 5, deadline=1005.0))
    engine.now = 1002.0
    engine.expire()
    assert engine.outputs["a"] == []


# Refusals


def test_what_can_never_run_is_refused() -> None:
    engine = FakeEngine(max_model_len=40, num_blocks=(8,))
    with pytest.raises(InvalidRequest, match="empty"):
        engine.add(request("a", [], 4))
    for token in (-1, 2**32):
        with pytest.raises(InvalidRequest, match="Token ids"):
            engine.add(request("a", [1, token, 2], 4))
    with pytest.raises(ContextLengthExceeded, match=r"40 tokens.*38.*3"):
        engine.add(request("a", prompt(38), 3))
    with pytest.raises(ContextLengthExceeded, match="KV cache"):
        engine.add(request("a", prompt(20), 14))
    engine.add(request("a", prompt(20), 13))
    with pytest.raises(InvalidRequest, match="'a'"):
        engine.add(request("a", prompt(4), 1))
    engine.run()
    engine.check_results()


# Preemption


def test_the_last_arrived_gives_way_and_comes_back_with_its_output() -> None:
    engine = FakeEngine(num_blocks=(8,), caching=False)
    engine.add(request("a", prompt(8), 20))
    engine.add(request("b", prompt(8, 2), 20))
    entered = []
    for _ in range(200):
        scheduled = engine.schedule()
        if scheduled is None:
            break
        entered += [
            (s.request.request_id, len(s.sampling_state().output_token_ids))
            for s in scheduled.entered
        ]
        engine.commit()
    assert engine.scheduler.stats().num_preemptions == 1
    assert [name for name, _ in entered] == ["a", "b", "b"]
    assert entered[-1][1] > 0
    engine.check_results()


def test_the_lowest_priority_gives_way() -> None:
    engine = FakeEngine(num_blocks=(8,), caching=False, policy="priority")
    engine.add(request("low", prompt(8), 20, priority=1, arrival_time=1.0))
    engine.add(request("high", prompt(8, 2), 20, priority=0, arrival_time=2.0))
    engine.run()
    assert engine.entered == ["high", "low", "low"]
    engine.check_results()


def test_a_newcomer_leaves_the_running_a_block_each() -> None:
    engine = FakeEngine(num_blocks=(8,), caching=False)
    engine.add(request("a", prompt(15), 5))
    engine.add(request("b", prompt(14, 2), 2))
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0
    assert engine.entered == ["a", "b"]
    engine.add(request("c", prompt(15), 5))
    engine.add(request("d", prompt(16, 2), 1))
    assert ids(engine.step()) == ["c"]
    engine.run()
    engine.check_results()


def test_a_preempted_prompt_is_not_scored_twice() -> None:
    engine = FakeEngine(num_blocks=(14,), max_num_batched_tokens=4)
    engine.add(request("stream", prompt(8), 40))
    engine.step()
    engine.step()
    engine.add(request("scored", prompt(40, 2), 2, prompt_logprobs=0))
    rows = 0
    while (scheduled := engine.step()) is not None:
        rows += sum(len(r.targets) for r in scheduled.prompt_rows)
    assert engine.scheduler.stats().num_preemptions > 0
    assert engine.entered[:2] == ["stream", "scored"]
    assert rows == 39
    engine.check_results()


def test_a_prompt_is_not_starved_by_streams_behind_it() -> None:
    """Decodes come first in a step, but what ranks first gets the blocks."""
    engine = FakeEngine(
        groups=(window(8),),
        num_blocks=(5,),
        max_num_batched_tokens=8,
        caching=False,
        policy="priority",
    )
    engine.add(request("stream", prompt(8, 2), 60, priority=1))
    for _ in range(4):
        engine.step()
    engine.add(request("prompt", prompt(80), 2, priority=0))
    steps = 0
    while not engine.tokens("prompt"):
        engine.step()
        steps += 1
    assert steps <= 14
    assert not engine.ended("stream")
    engine.run()
    engine.check_results()


# Prefix cache


def test_choices_of_one_prompt_compute_it_once() -> None:
    engine = FakeEngine(max_num_batched_tokens=16)
    for i in range(4):
        engine.add(request(str(i), prompt(33), 3))
    prefilled = 0
    while (scheduled := engine.step()) is not None:
        prefilled += scheduled.work.prefill_tokens
    # Each of the other three computes its last token alone.
    assert prefilled == 33 + 3
    assert [engine.outputs[str(i)][0].num_cached_tokens for i in range(4)] == [0, 32, 32, 32]
    engine.check_results()


def test_a_waiter_goes_on_when_the_other_is_aborted() -> None:
    engine = FakeEngine(max_num_batched_tokens=8)
    engine.add(request("a", prompt(40), 3))
    engine.add(request("b", prompt(40), 3))
    engine.add(request("c", prompt(4, 9), 1))
    engine.step()
    engine.abort("a")
    scheduled = engine.step()
    # What was computed before the abort is not computed again.
    assert ids(scheduled) == ["b"]
    assert scheduled is not None
    assert scheduled.plan.chunks[0].start == 8
    engine.run()
    engine.check_results()


def test_a_waiter_lets_others_pass() -> None:
    engine = FakeEngine(max_num_batched_tokens=12)
    engine.add(request("a", prompt(12), 9))
    engine.step()
    engine.add(request("b", prompt(30), 1))
    engine.add(request("c", prompt(30), 1))
    engine.add(request("d", prompt(2, 7), 1))
    assert ids(engine.step()) == ["a", "b"]
    engine.run()
    engine.check_results()
    assert engine.entered.index("d") < engine.entered.index("c")


def test_first_output_tells_of_the_queue_and_the_cache() -> None:
    engine = FakeEngine()
    engine.add(request("a", prompt(12), 2, arrival_time=990.0))
    engine.run()
    engine.now = 1010.0
    engine.add(request("b", prompt(12), 2, arrival_time=1005.0))
    engine.run()
    first, second = engine.outputs["b"]
    assert (first.queue_seconds, first.num_cached_tokens) == (5.0, 8)
    assert (second.queue_seconds, second.num_cached_tokens) == (0.0, 0)
    assert engine.outputs["a"][0].queue_seconds == 10.0
    stats = engine.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (24, 8)


# Prompt logprobs


def test_prompt_logprobs_ask_for_every_position_in_bounded_chunks() -> None:
    length = MAX_PROMPT_ROWS * 2 + 10
    engine = FakeEngine(num_blocks=(400,), max_model_len=1000)
    engine.add(request("warm", prompt(length), 1))
    engine.run()
    engine.add(request("a", prompt(length), 2, prompt_logprobs=3))
    engine.add(request("b", prompt(5), 2, prompt_logprobs=0))
    scheduled = engine.step()
    assert scheduled is not None
    chunk = scheduled.plan.chunks[0]
    assert (chunk.start, chunk.num_logits) == (0, MAX_PROMPT_ROWS)
    rows = scheduled.prompt_rows[0]
    assert (rows.first_row, rows.top) == (0, 3)
    assert list(rows.targets) == prompt(length)[1 : MAX_PROMPT_ROWS + 1]
    engine.run()
    engine.check_results()


def test_one_row_scores_nothing_for_a_prompt_of_one_token() -> None:
    engine = FakeEngine()
    engine.add(request("a", [4], 1, prompt_logprobs=1))
    scheduled = engine.step()
    assert scheduled is not None
    assert scheduled.prompt_rows == ()
    assert engine.outputs["a"][0].prompt_logprobs == [None]


# Requests from another replica


def test_a_moved_request_goes_on() -> None:
    text = prompt(6)
    output = [fake_token(text)]
    output.append(fake_token([*text, *output]))
    engine = FakeEngine()
    engine.add(request("a", text, 5, output=output))
    engine.add(request("done", text, 2, output=output))
    engine.run()
    engine.check_results()
    assert len(engine.tokens("a")) == 3
    assert engine.tokens("done") == []


# Windows


def test_a_window_group_holds_little_of_a_long_sequence() -> None:
    engine = FakeEngine(groups=(window(8),), num_blocks=(6,), max_num_batched_tokens=4)
    engine.add(request("a", prompt(100), 60))
    engine.run()
    engine.check_results()
    assert engine.max_held[0] <= 4


# Stats


def test_stats() -> None:
    engine = FakeEngine(max_num_seqs=1, num_blocks=(10,), seconds=lambda scheduled: 0.25)
    engine.add(request("a", prompt(12), 2, ignore_eos=True))
    engine.add(request("b", prompt(12), 2))
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert stats.kv_cache_usage == pytest.approx(0.3)
    assert (stats.num_tokens, stats.step_seconds) == (12, 0.25)
    assert EOS not in prompt(12)
