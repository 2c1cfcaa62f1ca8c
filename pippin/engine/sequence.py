"""One sequence on its way through the engine (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pippin.backends.base import SamplingState
from pippin.types.request import FinishReason, Logprobs, Request, SequenceOutput


class SequenceState(Enum):
    WAITING = "waiting"
    """Not started, or preempted: holds no blocks and no slot."""
    RUNNING = "running"
    FINISHED = "finished"
    """Its ending was emitted. Blocks and slot go back when no plan in flight uses them."""


#: Order of service: priority, arrival in seconds since the epoch, running number. Smaller is first.
Rank = tuple[int, float, int]


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk that runs a few layers at a time."""

    count: int
    """Tokens."""
    layers: int
    """Scheduled so far."""


@dataclass(slots=True, eq=False)
class Sequence:
    """What the scheduler and the block manager know of a request.

    Positions: ``0 <= num_computed <= num_scheduled <= len(tokens)``. Chunks in
    ``[num_computed, num_scheduled)`` are in flight. A sequence whose every token is scheduled
    waits for the next one to be sampled.
    """

    request: Request
    rank: Rank
    num_groups: int
    tokens: list[int] = field(init=False)
    """Prompt and output."""
    num_prompt: int = field(init=False)
    wants_token: bool = field(init=False)
    """Tokens are to be sampled: not when scoring a prompt, nor if a moved request has them all."""
    state: SequenceState = SequenceState.WAITING
    slot: int = -1
    """Number in the plans, -1 while waiting."""
    entered: bool = False
    """Its slot was in a plan since it was last admitted."""
    num_scheduled: int = 0
    num_computed: int = 0
    in_flight: int = 0
    """Plans in flight that hold a chunk of it."""
    part: Part | None = None
    """A chunk behind ``num_scheduled`` of which some layers were scheduled."""

    # Set by KVCacheManager.
    tables: list[list[int]] = field(init=False)
    """Per KV group, as in ``Chunk.new_blocks``."""
    num_sent: list[int] = field(init=False)
    """Per KV group: table entries that the stages have."""
    capacity: int = 0
    """Positions for which every group has a block."""
    hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of ``tokens``, as far as they were needed."""
    num_registered: int = 0
    """Leading blocks that are in the prefix cache or were offered to it."""
    num_announced: int = 0
    """Blocks ``[num_registered, num_announced)`` are announced as being computed."""
    num_left: list[int] = field(init=False)
    """Per KV group: leading blocks given back because the window left them behind."""
    next_event: int = 0
    """``num_computed`` at which the block manager has something to do."""
    awaits: bytes | None = None
    """Hash of the block another sequence computes and this one waits for."""

    # Set by Scheduler.
    prompt_logprobs: list[Logprobs | None] | None = None
    """Collected so far, starting with the None of position 0; None: not asked for, or delivered."""
    first_scheduled: float | None = None
    """Seconds since the epoch."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when it was first admitted."""
    had_output: bool = False

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt = len(request.prompt_token_ids)
        self.wants_token = len(request.output_token_ids) < request.max_tokens
        # A moved request's client has its prompt logprobs already.
        if request.params.prompt_logprobs is not None and not request.output_token_ids:
            self.prompt_logprobs = [None]
        self.clear()

    def clear(self) -> None:
        """Forget everything computed; tokens, hashes and collected logprobs stay."""
        self.slot = -1
        self.entered = False
        self.num_scheduled = self.num_computed = self.in_flight = 0
        self.part = None
        self.tables = [[] for _ in range(self.num_groups)]
        self.num_sent = [0] * self.num_groups
        self.num_left = [0] * self.num_groups
        self.capacity = self.num_registered = self.num_announced = self.next_event = 0
        self.awaits = None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def needs_prompt_logits(self) -> bool:
        """Some prompt position's log probabilities are still to be collected."""
        collected = self.prompt_logprobs
        return collected is not None and len(collected) < self.num_prompt

    @property
    def max_computed(self) -> int:
        """Most positions that will ever be computed: the last sampled token never is."""
        last = 1 if self.request.max_tokens else 0
        return max(len(self.tokens), self.num_prompt + self.request.max_tokens - last)

    def sampling_state(self) -> SamplingState:
        """What the sampler needs when the sequence enters, or enters again."""
        request = self.request
        return SamplingState(
            params=request.params,
            seed=request.seed,
            choice=request.choice,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=self.tokens[self.num_prompt :],
            stop_token_ids=frozenset((*request.params.stop_token_ids, *request.eos_token_ids)),
            bad_words_token_ids=request.bad_words_token_ids,
        )

    def ending(self, max_model_len: int) -> tuple[FinishReason, int | None] | None:
        """Reason and stop token id if the newest output token ends the sequence."""
        request = self.request
        params = request.params
        count = len(self.tokens) - self.num_prompt
        if count >= params.min_tokens:
            token = self.tokens[-1]
            if token in request.eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP, None
            if token in params.stop_token_ids:
                return FinishReason.STOP, token
        if count >= request.max_tokens or len(self.tokens) >= max_model_len:
            return FinishReason.LENGTH, None
        return None

    def output(
        self,
        token_ids: list[int],
        logprobs: list[Logprobs] | None = None,
        *,
        finish_reason: FinishReason | None = None,
        stop_reason: int | None = None,
        error: str | None = None,
    ) -> SequenceOutput:
        """What a step added; the first one also tells of the prompt, the cache and the queue."""
        if self.had_output:
            return SequenceOutput(
                request_id=self.request.request_id,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                error=error,
            )
        self.had_output = True
        scores = None if self.needs_prompt_logits else self.prompt_logprobs
        if scores is not None:
            self.prompt_logprobs = None
        arrival = self.request.arrival_time
        waited = 0.0
        if self.first_scheduled is not None and arrival > 0:
            waited = max(0.0, self.first_scheduled - arrival)
        return SequenceOutput(
            request_id=self.request.request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=scores,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=self.num_cached_tokens,
            queue_seconds=waited,
            error=error,
        )
