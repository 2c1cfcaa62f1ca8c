"""What each step computes (pure): continuous batching, chunked prefill, preemption.

Tokens are scheduled, not phases: a sequence has tokens that are not computed yet, and each step
takes some of them. Decodes come first, then the prompts of running sequences, then waiting ones.
Several plans may be in flight. A sequence may be in more than one of them, as consecutive chunks
of a prompt; a decode waits until its token was sampled. In a pipeline each plan takes its share of
the decodes, so that every stage has one to work on (``engine.depth``).
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Mapping
from operator import attrgetter

from pippin.backends.base import SampledToken
from pippin.config import SchedulerConfig
from pippin.engine.blocks import KVCacheManager
from pippin.engine.budget import PART_TOKENS, StepBudget
from pippin.engine.depth import PipelineShape, chunk_seconds, num_groups, num_plans
from pippin.engine.sequence import Part, Rank, Sequence, SequenceState
from pippin.engine.step import PromptRows, Scheduled, StepBuilder
from pippin.errors import ContextLengthExceeded, InvalidRequest
from pippin.types.request import FinishReason, Logprobs, Request, SequenceOutput
from pippin.types.step import SchedulerStats

__all__ = ["PromptRows", "Scheduled", "Scheduler"]

#: Most rows of prompt logits in a chunk: they are as wide as the vocabulary.
MAX_PROMPT_ROWS = 256

_rank = attrgetter("rank")


class Scheduler:
    """Chooses the tokens of each step and turns what was sampled into outputs.

    Slot numbers stay below twice ``max_num_seqs`` plus the sequences that were aborted while a
    plan in flight held them. A slot is given away only in a later plan than the one in whose
    ``freed`` it stands.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        budget: StepBudget,
        max_model_len: int,
        *,
        split_layers: int = 0,
    ) -> None:
        """``split_layers``: number of layers, where the backend can run a chunk a few of them at a
        time and there is one stage; 0 elsewhere."""
        self._config = config
        self._kv = kv
        self._budget = budget
        self._max_model_len = max_model_len
        self._split_layers = split_layers
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._ended_in_flight: list[Sequence] = []
        self._deadlines: list[tuple[float, str]] = []
        self._free_slots: list[int] = []
        self._num_slots = 0
        self._freed: list[int] = []
        self._num_added = 0
        self._next_step = 0
        self._turn = 0
        """Where the round of decodes goes on when not all fit in a step."""
        self._overtaken: Sequence | None = None
        """It lacked blocks while sequences behind it were in flight."""
        self._shape = PipelineShape()
        self._groups = 0
        """Groups that the decoding sequences take turns in; 0 while none decodes."""
        self._num_preemptions = 0
        self._last_tokens = 0
        self._last_seconds = 0.0

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises ``InvalidRequest`` for an empty prompt, impossible token ids or an id in use,
        ``ContextLengthExceeded`` where the request can never fit.
        """
        prompt, output = len(request.prompt_token_ids), request.max_tokens
        if not prompt:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        for tokens in (request.prompt_token_ids, request.output_token_ids):
            if tokens and not 0 <= min(tokens) <= max(tokens) < 2**32:
                raise InvalidRequest("Token ids must be in [0, 2**32).", param="prompt")
        if request.request_id in self._sequences:
            raise InvalidRequest(f"Request id {request.request_id!r} is in use already.")
        if prompt + output > self._max_model_len:
            raise ContextLengthExceeded(
                f"The context length is {self._max_model_len} tokens; the prompt has {prompt} and"
                f" max_tokens asks for {output} more.",
                param="messages",
            )
        seq = Sequence(request, self._rank_of(request), len(self._kv.groups))
        if not self._kv.fits_alone(seq.max_computed):
            raise ContextLengthExceeded(
                f"The KV cache is too small for a request of {prompt + output} tokens.",
                hint="lower max_tokens, or give the server more memory",
            )
        self._num_added += 1
        self._sequences[request.request_id] = seq
        insort(self._waiting, seq, key=_rank)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.request_id))

    def _rank_of(self, request: Request) -> Rank:
        priority = request.priority if self._config.policy == "priority" else 0
        return priority, request.arrival_time, self._num_added

    def abort(self, request_id: str) -> SequenceOutput | None:
        """End a request in whatever state. None if it is unknown or has ended."""
        seq = self._sequences.get(request_id)
        return None if seq is None else self._end_early(seq, FinishReason.ABORT)

    def expire(self, now: float) -> list[SequenceOutput]:
        """End the requests whose deadline is at or before ``now`` (seconds since the epoch)."""
        outputs = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            seq = self._sequences.get(request_id)
            # The id may have been used again since.
            if seq is not None and seq.request.deadline == deadline:
                error = (
                    f"The request's deadline passed after {seq.num_output} of at most"
                    f" {seq.request.max_tokens} tokens."
                )
                outputs.append(self._end_early(seq, FinishReason.ERROR, error))
        return outputs

    def fail_all(self, error: str) -> list[SequenceOutput]:
        """End every request that has no ending yet, with an error."""
        live = list(self._sequences.values())
        return [self._end_early(seq, FinishReason.ERROR, error) for seq in live]

    def _end_early(
        self, seq: Sequence, reason: FinishReason, error: str | None = None
    ) -> SequenceOutput:
        output = seq.output([], finish_reason=reason, error=error)
        self._finish(seq)
        return output

    def has_unfinished(self) -> bool:
        """Whether any request has no ending yet."""
        return bool(self._sequences)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_cache_usage=self._kv.usage,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._kv.num_queries,
            prefix_cache_hits=self._kv.num_hits,
            num_tokens=self._last_tokens,
            step_seconds=self._last_seconds,
        )

    # Scheduling

    def set_pipeline(self, shape: PipelineShape) -> None:
        """What the plans go through from now on."""
        self._shape = shape

    @property
    def num_plans(self) -> int:
        """Plans that should be in flight, as far as there is something to run."""
        step = self._last_seconds or self._budget.decode_seconds(1, 1)
        return num_plans(self._shape, self._groups, step)

    def schedule(self, now: float) -> Scheduled | None:
        """Plan the next step; None if nothing can run before a plan in flight is committed.

        ``now`` is in seconds since the epoch.
        """
        step = StepBuilder(self._budget.max_tokens)
        self._serve_overtaken(step)
        prefills, withheld = self._schedule_decodes(step)
        if self._schedule_prefills(step, prefills):
            self._admit(step, now)
        for seq in withheld:
            if step.tokens_left and seq.state is SequenceState.RUNNING:
                self._decode(step, seq)
        if not step:
            return None
        scheduled = step.build(self._next_step, tuple(self._freed))
        self._next_step += 1
        for slot in self._freed:
            heapq.heappush(self._free_slots, slot)
        self._freed.clear()
        return scheduled

    def _schedule_decodes(self, step: StepBuilder) -> tuple[list[Sequence], list[Sequence]]:
        """Add the decodes. Returns the sequences with prompt tokens to run, and the decodes that
        the token budget left out."""
        prefills: list[Sequence] = []
        ready: list[Sequence] = []
        decoders = context = 0
        order = self._running
        tokens_kept = next((seq.part.count for seq in order if seq.part is not None), 0)
        scarce = len(order) > step.tokens_left - tokens_kept
        if scarce:
            tokens_kept = tokens_kept or self._share_for_prefills(step.tokens_left)
        if scarce or self._shape.stages > 1:
            order = order[self._turn :] + order[: self._turn]
        for seq in order:
            total = len(seq.tokens)
            remaining = total - seq.num_scheduled
            fresh = total == seq.num_prompt or not (seq.entered and seq.wants_token)
            if fresh or remaining > 1:
                if remaining:
                    prefills.append(seq)
                continue
            decoders += 1
            context += total
            if remaining:
                ready.append(seq)
        share = self._share(decoders, context)
        withheld = self._decode_share(step, ready, share, tokens_kept)
        step.mixed = bool(ready)
        if decoders:
            step.seconds = self._budget.allowance(share, context * share // decoders)
        else:
            step.seconds = min(self._budget.allowance(0, 0), self._chunk_seconds(prefills))
        return prefills, withheld

    def _share(self, decoders: int, context: int) -> int:
        """Decodes of one plan."""
        if not decoders:
            self._groups = 0
            return 0
        each = context // decoders
        self._groups = num_groups(
            self._shape,
            decoders,
            lambda count: self._budget.decode_seconds(count, count * each),
            self._groups,
        )
        return -(-decoders // self._groups)

    def _decode_share(
        self, step: StepBuilder, ready: list[Sequence], share: int, tokens_kept: int
    ) -> list[Sequence]:
        """Add ``share`` of the sequences that can decode; returns those without a token left."""
        withheld: list[Sequence] = []
        left_out: Sequence | None = None
        taken = 0
        for seq in ready:
            if seq.state is not SequenceState.RUNNING:
                continue
            if taken + len(withheld) == share:
                left_out = seq
                break
            if step.tokens_left > tokens_kept:
                before = step.tokens_left
                self._decode(step, seq)
                taken += before - step.tokens_left  # none where it found no blocks
            else:
                withheld.append(seq)
        first = withheld[0] if withheld else left_out
        if first is not None:
            self._turn = next((i for i, s in enumerate(self._running) if s is first), 0)
        return withheld

    def _chunk_seconds(self, prefills: list[Sequence]) -> float:
        """Longest useful chunk in a pipeline that no sequence decodes in."""
        if self._shape.stages == 1:
            return math.inf
        tokens = 0
        for seq in (*prefills, *self._waiting):
            # All of each, so that chunks do not get smaller and smaller towards a prompt's end.
            tokens += len(seq.tokens)
            if tokens >= 4 * self._budget.max_tokens:
                break
        prompts = self._budget.prefill_seconds(0, 0, tokens, mixed=False)
        return chunk_seconds(self._shape.stages, prompts, self._budget.decode_seconds(1, 1))

    def _share_for_prefills(self, tokens: int) -> int:
        """Tokens kept for prompts when there are more sequences than tokens in a step."""
        if all(len(seq.tokens) - seq.num_scheduled <= 1 for seq in self._running):
            return 0
        return min(self._kv.block_size, (tokens + self._next_step % 2) // 2)

    def _decode(self, step: StepBuilder, seq: Sequence) -> None:
        if self._make_room(step, seq):
            step.add_decode(seq, self._kv.take_new_blocks(seq))

    def _make_room(self, step: StepBuilder, seq: Sequence) -> bool:
        """See to it that the next token of ``seq`` has its blocks."""
        end = seq.num_scheduled + 1
        if end > seq.capacity:
            while not self._kv.extend(seq, end):
                if not self._preempt_behind(seq, step):
                    return False
        return True

    def _serve_overtaken(self, step: StepBuilder) -> None:
        """Let a sequence have its blocks first that lacked them, held by others in flight."""
        seq, self._overtaken = self._overtaken, None
        if seq is not None and seq.state is SequenceState.RUNNING:
            self._make_room(step, seq)

    def _schedule_prefills(self, step: StepBuilder, prefills: list[Sequence]) -> bool:
        """Add chunks of running sequences' prompts. Whether the budget may have room for more."""
        # A chunk that was begun goes on first, and has the step's prefill for itself.
        prefills.sort(key=lambda seq: (seq.part is None, seq.rank))
        for seq in prefills:
            if seq.state is not SequenceState.RUNNING or not self._rows_left(step, seq):
                continue
            count = 0
            if seq.part is None:
                count = self._chunk(step, seq, seq.num_scheduled)
                if not count and not self._begin_part(step, seq):
                    return False
            if seq.part is not None:
                self._take_part(step, seq)
                return False
            self._prefill(step, seq, count)
        return True

    def _begin_part(self, step: StepBuilder, seq: Sequence) -> bool:
        """Begin a chunk that will run a few layers at a time, if the step has no prefill yet."""
        if not self._can_split(step):
            return False
        start = seq.num_scheduled
        wanted = min(len(seq.tokens) - start, self._rows_left(step, seq), -(-step.tokens_left // 2))
        count = self._budget.part(step.seconds, start, wanted, self._split_layers)
        count = self._back(step, seq, count)
        if count:
            seq.part = Part(count, 0)
        return bool(count)

    def _can_split(self, step: StepBuilder) -> bool:
        if not self._split_layers or not step.tokens_left:
            return False
        return step.mixed and not step.prefill_tokens

    def _take_part(self, step: StepBuilder, seq: Sequence) -> None:
        """Add some more layers of the chunk that was begun."""
        assert seq.part is not None
        left = self._split_layers - seq.part.layers
        if step.mixed:
            left = self._budget.part_layers(
                step.seconds, seq.num_scheduled, seq.part.count, left, self._split_layers
            )
        blocks = self._kv.take_new_blocks(seq)
        step.add_part(seq, seq.part, left, blocks, self._split_layers)

    def _rows_left(self, step: StepBuilder, seq: Sequence) -> int:
        """Most tokens of ``seq`` in this step as far as rows of logits go."""
        if seq.needs_prompt_logits:
            return MAX_PROMPT_ROWS - step.num_prompt_rows
        return len(seq.tokens)

    def _chunk(self, step: StepBuilder, seq: Sequence, start: int) -> int:
        """Tokens from ``start`` on that the budget allows; the first prompt always gets some.

        0 for it too where a chunk is so small that it is better to take more, a few layers at a
        time (``_begin_part``)."""
        wanted = min(len(seq.tokens) - start, self._rows_left(step, seq))
        before, left = step.prefill_tokens, step.tokens_left
        count = self._budget.chunk(step.seconds, before, start, wanted, left, mixed=step.mixed)
        if not before:
            if self._split_layers and step.mixed and count < min(wanted, left, PART_TOKENS):
                return 0
            if not count:
                count = self._budget.least_chunk(wanted, left)
        return count

    def _back(self, step: StepBuilder, seq: Sequence, count: int) -> int:
        """See to blocks for the next ``count`` tokens; returns for how many there are some."""
        enough = min(count, self._kv.block_size)
        while (backed := self._kv.backed(seq)) < enough:
            if not self._preempt_behind(seq, step):
                break
        count = max(0, min(count, backed))
        if count:
            self._kv.extend(seq, seq.num_scheduled + count)
        return count

    def _prefill(self, step: StepBuilder, seq: Sequence, count: int) -> None:
        """Add a chunk of ``count`` tokens, or of as many as there are blocks for."""
        count = self._back(step, seq, count)
        if not count:
            return
        start = seq.num_scheduled
        step.seconds -= self._budget.prefill_seconds(
            step.prefill_tokens, start, count, mixed=step.mixed
        )
        step.add_prefill(seq, count, self._kv.take_new_blocks(seq))

    def _admit(self, step: StepBuilder, now: float) -> None:
        """Start waiting sequences, first come first served.

        One that waits for a running sequence to compute their common prefix is passed over; it
        holds nothing, and what it waits for moves on, or is given up and no longer waited for.
        """
        most = self._config.max_num_seqs
        passed = 0
        while passed < min(len(self._waiting), most) and len(self._running) < most:
            seq = self._waiting[passed]
            if step.preempted:
                return
            if not self._rows_left(step, seq) or self._kv.awaits(seq):
                passed += 1
                continue
            hit = self._kv.lookup(seq)
            if self._kv.awaits(seq, hit):
                passed += 1
                continue
            count = self._chunk(step, seq, hit * self._kv.block_size)
            whole = count or not self._can_split(step)
            if (whole and not count) or not self._kv.admit(seq, hit, headroom=len(self._running)):
                return
            del self._waiting[passed]
            insort(self._running, seq, key=_rank)
            seq.state = SequenceState.RUNNING
            seq.slot = self._new_slot()
            if seq.first_scheduled is None:
                seq.first_scheduled = now
                seq.num_cached_tokens = min(seq.num_computed, seq.num_prompt)
            if not count:
                if self._begin_part(step, seq):
                    self._take_part(step, seq)
                return
            self._prefill(step, seq, count)

    def _new_slot(self) -> int:
        if self._free_slots:
            return heapq.heappop(self._free_slots)
        self._num_slots += 1
        return self._num_slots - 1

    def _preempt_behind(self, seq: Sequence, step: StepBuilder) -> bool:
        """Take the blocks of the last sequence behind ``seq`` that no plan in flight uses.

        The first in rank always gets its blocks so, in the next step if not in this one; any other
        that finds no victim keeps what it has and waits for those before it.
        """
        for victim in reversed(self._running):
            if victim.rank <= seq.rank:
                break
            if victim.in_flight:
                if self._overtaken is None or seq.rank < self._overtaken.rank:
                    self._overtaken = seq
            else:
                self._running.remove(victim)
                self._put_back(victim)
                self._num_preemptions += 1
                step.preempted = True
                return True
        return False

    def _put_back(self, seq: Sequence) -> None:
        """Let a running sequence, taken from the list of these, start anew."""
        self._release(seq)
        seq.state = SequenceState.WAITING
        insort(self._waiting, seq, key=_rank)

    def _release(self, seq: Sequence) -> None:
        if seq.entered:
            self._freed.append(seq.slot)
        elif seq.slot >= 0:
            heapq.heappush(self._free_slots, seq.slot)
        self._kv.release(seq)

    # Results

    def commit(
        self,
        scheduled: Scheduled,
        tokens: Mapping[int, SampledToken],
        prompt_logprobs: Mapping[int, list[Logprobs]],
        seconds: float,
    ) -> list[SequenceOutput]:
        """Take the results of the oldest plan in flight.

        ``tokens`` by slot, one for each of ``scheduled.rows``; ``prompt_logprobs`` by slot, one
        entry for each target of ``scheduled.prompt_rows``; ``seconds`` is what the step took.
        """
        self._budget.observe(scheduled.work, seconds)
        self._last_tokens = scheduled.plan.num_tokens
        self._last_seconds = seconds
        outputs = []
        for chunk, seq in zip(scheduled.plan.chunks, scheduled.sequences, strict=True):
            seq.in_flight -= 1
            if seq.state is SequenceState.FINISHED:
                if not seq.in_flight:
                    self._ended_in_flight.remove(seq)
                    self._release(seq)
                continue
            if chunk.layers is not None and chunk.layers[1] < self._split_layers:
                continue
            end = chunk.start + len(chunk.token_ids)
            seq.num_computed = end
            if end >= seq.next_event:
                self._kv.computed(seq)
            if seq.prompt_logprobs is not None:
                seq.prompt_logprobs += prompt_logprobs.get(chunk.seq, ())
            if end == len(seq.tokens):
                outputs.append(self._advance(seq, tokens))
        return outputs

    def _advance(self, seq: Sequence, tokens: Mapping[int, SampledToken]) -> SequenceOutput:
        """All tokens of ``seq`` are computed: append the one sampled behind them, if any."""
        if not seq.wants_token:
            output = seq.output([], finish_reason=FinishReason.LENGTH)
            self._finish(seq)
            return output
        sampled = tokens[seq.slot]
        seq.tokens.append(sampled.token_id)
        logprobs = None if sampled.logprobs is None else [sampled.logprobs]
        ending = seq.ending(self._max_model_len)
        if ending is None and self._kv.must_start_anew(seq):
            self._running.remove(seq)
            self._put_back(seq)
            seq.hashes.clear()
        if ending is None:
            return seq.output([sampled.token_id], logprobs)
        reason, stop = ending
        output = seq.output([sampled.token_id], logprobs, finish_reason=reason, stop_reason=stop)
        self._finish(seq)
        return output

    def _finish(self, seq: Sequence) -> None:
        """Forget a sequence whose ending was made; its blocks go when no plan uses them."""
        del self._sequences[seq.request.request_id]
        (self._waiting if seq.state is SequenceState.WAITING else self._running).remove(seq)
        seq.state = SequenceState.FINISHED
        if seq.in_flight:
            self._ended_in_flight.append(seq)
        else:
            self._release(seq)

    def check(self) -> None:
        """Assert the invariants of sequences and blocks; for tests."""
        self._kv.check([*self._running, *self._ended_in_flight])
        assert self._waiting == sorted(self._waiting, key=_rank)
        assert self._running == sorted(self._running, key=_rank)
        assert len(self._running) <= self._config.max_num_seqs
        live = [*self._waiting, *self._running]
        assert sorted(self._sequences) == sorted(seq.request.request_id for seq in live)
        slots = [seq.slot for seq in [*self._running, *self._ended_in_flight]]
        assert len({*slots, *self._freed, *self._free_slots}) == self._num_slots
        assert len(slots) + len(self._freed) + len(self._free_slots) == self._num_slots
