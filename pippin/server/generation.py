"""From engine outputs to pieces of text: one object a choice, one pass a step."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pippin.clock import Clock
from pippin.errors import EngineError, RequestTimeout
from pippin.server.admission import Ticket
from pippin.server.detokenizer import DetokenizedStep, Detokenizer
from pippin.server.logprobs import TokenLogprobs
from pippin.server.metrics import SequenceTimes
from pippin.server.tokenizer import Tokenizer
from pippin.types.message import Ready, StepOutputs
from pippin.types.request import FinishReason, Logprobs, Request, SequenceOutput
from pippin.types.step import SchedulerStats

#: The engine ends a request at its deadline; if it does not, the server does, so much later.
DEADLINE_GRACE_S = 2.0


class Engine(Protocol):
    """What the server needs of ``EngineClient``; tests have a fake."""

    ready: Ready
    stats: SchedulerStats
    on_step: Callable[[StepOutputs], None]

    @property
    def failure(self) -> Exception | None: ...

    def generate(
        self, requests: Sequence[Request]
    ) -> AsyncGenerator[list[SequenceOutput], None]: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...


@dataclass(slots=True)
class Piece:
    """What one step added to one choice."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    """Of the tokens whose text has become certain with this step."""
    prompt_logprobs: list[Logprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Choice:
    """One sequence on its way."""

    __slots__ = (
        "_detokenizer",
        "_drop",
        "_times",
        "_unsettled",
        "ended",
        "index",
        "num_cached_tokens",
        "num_tokens",
        "request",
        "stopped_here",
    )

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer,
        times: SequenceTimes,
        *,
        drop: bool = False,
    ) -> None:
        """``drop`` throws away what is generated: only the prompt is of interest."""
        self.index = index
        self._drop = drop
        self.request = request
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.ended = False
        self.stopped_here = False
        """Ended by a stop string, which the engine does not know of."""
        self._detokenizer = Detokenizer(tokenizer, request.params, request.prompt_token_ids)
        self._times = times
        self._unsettled: deque[tuple[int, Logprobs]] = deque()

    def push(self, output: SequenceOutput, now: float) -> Piece:
        """Raises ``EngineError`` if the engine gave the sequence up."""
        if output.finish_reason is FinishReason.ERROR:
            raise EngineError(output.error or "the engine gave up the request")
        finished = output.finish_reason is not None
        # The engine stops of its own at tokens only, and then that token is the last one.
        stopped = output.finish_reason is FinishReason.STOP
        step = self._detokenizer.push(output.token_ids, finished, stopped)
        kept = 0 if self._drop else step.num_tokens_kept
        if self.num_tokens == 0:
            self.num_cached_tokens = output.num_cached_tokens
        self.num_tokens += kept
        if output.token_ids:
            self._times.tokens(now, kept, output.queue_seconds, output.num_cached_tokens)
        piece = Piece(
            self.index,
            "" if self._drop else step.text,
            output.token_ids if kept == len(output.token_ids) else output.token_ids[:kept],
            self._settle(output, step, kept),
            output.prompt_logprobs,
        )
        if self._drop:
            piece.finish_reason = FinishReason.LENGTH.value
        elif step.stop is not None:
            self.stopped_here = not finished
            piece.finish_reason, piece.stop_reason = FinishReason.STOP.value, step.stop
        elif output.finish_reason is not None:
            piece.finish_reason = output.finish_reason.value
            piece.stop_reason = output.stop_reason
        if piece.finish_reason is not None:
            self.end(now, piece.finish_reason)
        return piece

    def _settle(
        self, output: SequenceOutput, step: DetokenizedStep, kept: int
    ) -> list[TokenLogprobs]:
        """Log probabilities wait until the text of their tokens is certain."""
        if output.logprobs is None or self._drop:
            return []
        self._unsettled.extend(zip(output.token_ids[:kept], output.logprobs[:kept], strict=True))
        made = []
        for text, data, offset in zip(step.pieces, step.piece_bytes, step.offsets, strict=True):
            token_id, entry = self._unsettled.popleft()
            made.append(TokenLogprobs(token_id, text, data, offset, entry))
        return made

    def end(self, now: float, reason: str) -> None:
        self.ended = True
        self._times.end(now, reason)


@dataclass(slots=True)
class Generation:
    """All sequences of one HTTP request."""

    engine: Engine
    clock: Clock
    ticket: Ticket
    choices: list[Choice]
    deadline: float | None
    """Seconds since the epoch."""
    _by_id: dict[str, Choice] = field(default_factory=dict)

    @property
    def num_prompt_tokens(self) -> int:
        """A prompt with several choices counts once, as in OpenAI's usage."""
        return sum(
            len(choice.request.prompt_token_ids)
            for choice in self.choices
            if choice.request.choice == 0
        )

    @property
    def num_cached_tokens(self) -> int:
        return sum(
            choice.num_cached_tokens for choice in self.choices if choice.request.choice == 0
        )

    @property
    def num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @contextlib.asynccontextmanager
    async def within_deadline(self) -> AsyncIterator[None]:
        """Raise ``RequestTimeout`` from the block when the deadline has passed."""
        try:
            async with asyncio.timeout(self._seconds_left()):
                yield
        except TimeoutError:
            raise self._timed_out() from None
        except EngineError:
            if self._is_late():
                raise self._timed_out() from None
            raise

    async def steps(self) -> AsyncGenerator[list[Piece], None]:
        """Pieces as the engine makes them, until each choice has ended.

        Raises ``EngineError`` if the engine gives up. However it is left, the engine frees what is
        unfinished and each choice is counted once. To be closed by the task that opened it.
        """
        self._by_id = {choice.request.request_id: choice for choice in self.choices}
        reason = FinishReason.ABORT.value
        try:
            outputs = self.engine.generate([choice.request for choice in self.choices])
            async with contextlib.aclosing(outputs):
                async for step in outputs:
                    pieces = self._take(step)
                    if pieces:
                        yield pieces
                    if all(choice.ended for choice in self.choices):
                        return
                    await self._abort_stopped()
        except EngineError:
            reason = FinishReason.ERROR.value
            raise
        finally:
            if self._is_late():
                reason = FinishReason.ERROR.value
            now = time.monotonic()
            for choice in self.choices:
                if not choice.ended:
                    choice.end(now, reason)

    def _take(self, outputs: list[SequenceOutput]) -> list[Piece]:
        now = time.monotonic()
        pieces = []
        for output in outputs:
            choice = self._by_id[output.request_id]
            if choice.ended:  # stopped here; these tokens were under way
                continue
            piece = choice.push(output, now)
            pieces.append(piece)
            if piece.finish_reason is not None:
                self.ticket.end_one()
        return pieces

    async def _abort_stopped(self) -> None:
        """End in the engine what a stop string has ended here, while other choices go on."""
        stopped = [choice for choice in self.choices if choice.stopped_here]
        if stopped:
            for choice in stopped:
                choice.stopped_here = False
            await self.engine.abort([choice.request.request_id for choice in stopped])

    def _seconds_left(self) -> float | None:
        if self.deadline is None:
            return None
        return max(self.deadline - self.clock.time(), 0.0) + DEADLINE_GRACE_S

    def _is_late(self) -> bool:
        return self.deadline is not None and self.clock.time() >= self.deadline

    @staticmethod
    def _timed_out() -> RequestTimeout:
        return RequestTimeout("The request did not finish within the server's time limit.")
