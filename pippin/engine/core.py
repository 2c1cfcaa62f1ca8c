"""The leader's engine: schedule steps, keep the pipeline full, run its own stage, sample, commit.

Used from one thread. Processes, sockets and text live elsewhere (``engine.process``, ``server``).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pippin.backends.base import HiddenStates, SampledToken, StageRunner
from pippin.clock import Clock
from pippin.config import Config
from pippin.engine.backend import choose_backend
from pippin.engine.busy import BusyMeter
from pippin.engine.depth import PipelineShape
from pippin.engine.followers import Followers
from pippin.engine.pipeline import Pipeline
from pippin.engine.scheduler import Scheduled, Scheduler
from pippin.engine.spec import EngineSpec
from pippin.errors import LinkError, PeerLost, PippinError, RequestError
from pippin.types.message import Ready
from pippin.types.request import FinishReason, Logprobs, Request, SequenceOutput
from pippin.types.step import SchedulerStats, StepPlan

__all__ = ["EngineCore", "Stages", "choose_backend", "load"]

logger = logging.getLogger(__name__)

#: A step may take so many seconds, and so many times what the slowest one took, before the stage
#: that has it counts as lost. Peers that are silent are found sooner, by their links.
STEP_DEADLINE_S = 30.0
STEP_DEADLINE_TIMES = 20.0

#: Steps between two looks at how long the links take.
_LOOK_AT_LINKS = 32


@dataclass(slots=True)
class Stages:
    """The leader's stage and what it has to do with others."""

    runner: StageRunner
    pipeline: Pipeline | None = None
    """The stages before this one, None where it is the only one."""
    followers: Followers = field(default_factory=Followers)
    """The other ranks of this stage."""
    describe_loss: Callable[[LinkError], PippinError] = lambda error: error
    """What the parent of the other processes knows of a lost one."""
    close_others: Callable[[], None] = lambda: None

    @property
    def count(self) -> int:
        return 1 if self.pipeline is None else self.pipeline.num_stages

    def run(self, plan: StepPlan, hidden: HiddenStates | None) -> Any:
        """Execute a plan in the leader's stage; returns logits."""
        self.followers.run(plan, hidden)
        return self.runner.execute(plan, hidden)

    def timed(self, plan: StepPlan, clock: Clock) -> float:
        """Run one plan through all stages; returns the seconds of the slowest."""
        hidden, slowest = None, 0.0
        if self.pipeline is not None:
            self.pipeline.send(plan)
            if plan.chunks:
                received = self.pipeline.receive(plan.step, None)
                assert received is not None
                hidden, slowest = received
        started = clock.monotonic()
        self.run(plan, hidden)
        self.runner.synchronize()
        return max(slowest, clock.monotonic() - started)

    def close(self, reason: str) -> None:
        """Stop the others and free this stage."""
        if self.pipeline is not None:
            self.pipeline.close(reason)
        try:
            self.followers.stop(reason)
        except LinkError as error:
            logger.debug("a rank was gone already: %s", error.message)
        self.runner.close()
        self.followers.close()
        self.close_others()


@dataclass(slots=True)
class _Flight:
    """A plan that was sent and not committed."""

    scheduled: Scheduled
    sent: float
    """Monotonic."""
    logits: Any = None
    """Where this is the only stage, which has been handed the plan."""
    ended: float | None = None
    """When that stage was seen to be done with it, if it was."""


class EngineCore:
    """One replica of one model."""

    def __init__(self, stages: Stages, scheduler: Scheduler, ready: Ready, clock: Clock) -> None:
        self._stages = stages
        self._scheduler = scheduler
        self._clock = clock
        self._refused: list[SequenceOutput] = []
        self._in_flight: deque[_Flight] = deque()
        """Oldest first."""
        self._ended = 0.0
        """When the last plan was done (monotonic)."""
        self._busy = BusyMeter(clock.monotonic())
        self._slowest = 0.0
        self._until_look = 0
        self.ready = ready
        self.failure: PippinError | None = None
        """Why the engine cannot go on, once a stage was lost."""

    def add(self, request: Request) -> None:
        """Queue a request. One that can never run ends with an error at the next step."""
        if self.failure is not None:
            self._refuse(request, self.failure.message)
            return
        try:
            self._scheduler.add(request)
        except RequestError as error:
            self._refuse(request, error.message)

    def _refuse(self, request: Request, why: str) -> None:
        self._refused.append(
            SequenceOutput(
                request_id=request.request_id, finish_reason=FinishReason.ERROR, error=why
            )
        )

    def abort(self, request_id: str) -> SequenceOutput | None:
        """End a request; None if it has ended before."""
        return self._scheduler.abort(request_id)

    def has_unfinished(self) -> bool:
        return bool(self._refused) or self._scheduler.has_unfinished()

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do, now or when a plan in flight comes back."""
        return self.has_unfinished() or bool(self._in_flight)

    @property
    def waits(self) -> bool:
        """Whether ``step`` can do nothing before a stage or a client has sent something."""
        pipeline = self._stages.pipeline
        return pipeline is not None and bool(self._in_flight) and not pipeline.pending()

    @property
    def wake(self) -> int | None:
        """File descriptor that is readable when a stage has sent something."""
        pipeline = self._stages.pipeline
        return None if pipeline is None else pipeline.wake.fileno()

    def stats(self) -> SchedulerStats:
        stats = self._scheduler.stats()
        return msgspec.structs.replace(stats, busy=self.busy())

    def busy(self) -> tuple[float, ...]:
        """Busy ratio of each stage."""
        own = round(self._busy.ratio(self._clock.monotonic()), 3)
        pipeline = self._stages.pipeline
        return (own,) if pipeline is None else (*pipeline.busy[:-1], own)

    def step(self, timeout_s: float | None = None) -> list[SequenceOutput]:
        """Bring the oldest step to its end; returns what it added to the sequences.

        With a pipeline, first sends what there is room for, and waits ``timeout_s`` seconds (None:
        as long as it takes) for the stages before this one. A lost stage ends every request with
        an error, and sets ``failure``.
        """
        now = self._clock.time()
        outputs, self._refused = self._refused, []
        outputs += self._scheduler.expire(now)
        if self.failure is not None:
            return outputs
        try:
            self._fill(now)
            if self._in_flight:
                outputs += self._finish_oldest(0.0 if outputs else timeout_s)
            if self._stages.pipeline is not None:
                self._fill(now)  # before anything is said of the last step
        except LinkError as error:
            self.failure = self._stages.describe_loss(error)
            outputs += self._scheduler.fail_all(self.failure.message)
        return outputs

    def idle(self) -> None:
        """Look after the links while there is no work."""
        if self._stages.pipeline is None or self.failure is not None or self._in_flight:
            return
        try:
            self._stages.pipeline.drain()
        except LinkError as error:
            self.failure = self._stages.describe_loss(error)

    def _fill(self, now: float) -> None:
        """Start steps until the pipeline is full or nothing can run before one is committed."""
        pipeline = self._stages.pipeline
        if pipeline is not None and self._until_look <= 0:
            self._until_look = _LOOK_AT_LINKS
            self._scheduler.set_pipeline(PipelineShape(self._stages.count, pipeline.delay))
        while self._has_room():
            scheduled = self._scheduler.schedule(now)
            if scheduled is None:
                return
            self._until_look -= 1
            flight = _Flight(scheduled, self._clock.monotonic())
            if pipeline is not None:
                pipeline.send(scheduled.plan)
            else:
                flight.logits = self._stages.run(scheduled.plan, None)
                for before in self._in_flight:
                    # The stage takes a plan when it is done with the last one.
                    before.ended = before.ended or self._clock.monotonic()
            self._in_flight.append(flight)

    def _has_room(self) -> bool:
        """Whether another plan may be in flight.

        A stage that runs ahead gets the next chunk of a prompt while it works on one. Not behind a
        plan that gives tokens: their sequences would miss the next step.
        """
        flights = self._in_flight
        if len(flights) < self._scheduler.num_plans:
            return True
        runner = self._stages.runner
        alone = self._stages.pipeline is None and runner.runs_ahead
        return alone and len(flights) == 1 and not flights[0].scheduled.rows

    def _finish_oldest(self, timeout_s: float | None) -> list[SequenceOutput]:
        flight = self._in_flight[0]
        scheduled, slowest = flight.scheduled, 0.0
        started = max(flight.sent, self._ended)
        if self._stages.pipeline is not None:
            received = self._receive(scheduled.plan.step, flight.sent, timeout_s)
            if received is None:
                return []
            hidden, slowest = received
            started = self._clock.monotonic()
            flight.logits = self._stages.run(scheduled.plan, hidden)
        tokens, prompt_logprobs = self._sample(scheduled, flight.logits)
        if flight.ended is None:
            if not scheduled.rows:
                self._stages.runner.synchronize()
            flight.ended = self._clock.monotonic()
        self._ended = flight.ended
        own = max(0.0, flight.ended - started)
        self._busy.add(own)
        self._in_flight.popleft()
        self._slowest = max(self._slowest, slowest, own)
        return self._scheduler.commit(scheduled, tokens, prompt_logprobs, max(slowest, own))

    def _receive(
        self, step: int, sent: float, timeout_s: float | None
    ) -> tuple[HiddenStates, float] | None:
        pipeline = self._stages.pipeline
        assert pipeline is not None
        limit = max(STEP_DEADLINE_S, STEP_DEADLINE_TIMES * self._slowest * self._stages.count)
        while True:
            wait = 1.0 if timeout_s is None else timeout_s
            received = pipeline.receive(step, wait)
            if received is not None:
                return received
            waited = self._clock.monotonic() - sent
            if waited > limit:
                raise PeerLost(f"step {step} has not come back in {waited:.0f} s: a stage hangs")
            if timeout_s is not None:
                return None

    def _sample(
        self, scheduled: Scheduled, logits: Any
    ) -> tuple[Mapping[int, SampledToken], Mapping[int, list[Logprobs]]]:
        sampler = self._stages.runner.sampler
        for slot in scheduled.plan.freed:
            sampler.remove(slot)
        for sequence in scheduled.entered:
            sampler.add(sequence.slot, sequence.sampling_state())
        # Prompt rows first: sampling may overwrite the logits.
        prompt_logprobs = {
            rows.seq: sampler.prompt_logprobs(logits, rows.first_row, rows.targets, rows.top)
            for rows in scheduled.prompt_rows
        }
        if not scheduled.rows:
            return {}, prompt_logprobs
        sampled = sampler.sample(logits, scheduled.rows)
        tokens = {row.seq: token for row, token in zip(scheduled.rows, sampled, strict=True)}
        return tokens, prompt_logprobs

    def close(self) -> None:
        self._stages.close(
            "the engine was closed" if self.failure is None else self.failure.message
        )


def load(asked: Config | EngineSpec, clock: Clock | None = None) -> EngineCore:
    """Find and load the model, size the KV cache, and make the engine.

    Raises ``ModelError`` (missing, broken or unsupported model), ``OutOfMemory``, ``ConfigError``.
    """
    from pippin.engine.start import start

    return start(asked if isinstance(asked, EngineSpec) else EngineSpec(config=asked), clock)
