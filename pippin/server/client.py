"""The API process's view of one engine: requests in, token streams out, over one socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from pippin.errors import EngineError, EngineUnavailable, PippinError
from pippin.transport.channel import ClientChannel
from pippin.transport.keys import CurveKeys
from pippin.types.message import Abort, Add, Failed, Hello, Ready, StepOutputs
from pippin.types.request import FinishReason, Request, SequenceOutput
from pippin.types.step import SchedulerStats

logger = logging.getLogger(__name__)

#: An engine with unfinished requests that reports nothing for this many seconds is frozen.
PROGRESS_TIMEOUT_S = 120.0

_IDLE = SchedulerStats(0, 0, 0.0, 0, 0, 0, 0, 0.0)


class _Stream:
    """Outputs of one group of requests that the reader has not taken yet."""

    __slots__ = ("buffer", "unfinished", "wake")

    def __init__(self, request_ids: set[str]) -> None:
        self.buffer: list[SequenceOutput] = []
        self.unfinished = request_ids
        self.wake: asyncio.Future[None] | None = None

    def notify(self) -> None:
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)


class EngineClient:
    """Streams of one engine. All methods belong to one event loop.

    ``on_step`` is called with every ``StepOutputs`` after it was handed out (metrics).
    """

    def __init__(
        self,
        address: str,
        ended: Callable[[], Awaitable[PippinError]],
        on_step: Callable[[StepOutputs], None] = lambda step: None,
        keys: CurveKeys | None = None,
    ) -> None:
        """``ended`` resolves, with the reason, when the engine process has ended."""
        self._channel = ClientChannel(address, keys)
        self._ended = ended
        self.on_step = on_step
        self._streams: dict[str, _Stream] = {}
        self._last_progress = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self.ready: Ready
        self.stats: SchedulerStats = _IDLE
        self.failure: PippinError | None = None
        self.failed = asyncio.Event()

    async def start(self) -> Ready:
        """Connect. Raises ``EngineError`` if the engine answers with anything but ``Ready``."""
        await self._channel.send(Hello())
        answer = await self._channel.receive()
        if not isinstance(answer, Ready):
            raise EngineError(f"the engine is not ready: {answer}")
        self.ready = answer
        self._tasks = [
            asyncio.create_task(self._read(), name="engine-reader"),
            asyncio.create_task(self._watch_process(), name="engine-process-watch"),
            asyncio.create_task(self._watch_progress(), name="engine-progress-watch"),
        ]
        return answer

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    async def generate(
        self, requests: Sequence[Request]
    ) -> AsyncGenerator[list[SequenceOutput], None]:
        """Outputs of ``requests``, as they come, until each has its ``finish_reason``.

        Leaving the iterator early (also by cancellation) aborts what is unfinished. An engine that
        fails ends every request with ``FinishReason.ERROR``. Raises ``EngineUnavailable`` if it
        has failed before.
        """
        if self.failure is not None:
            raise EngineUnavailable(f"the engine has failed: {self.failure}")
        stream = _Stream({request.request_id for request in requests})
        if len(stream.unfinished) != len(requests) or stream.unfinished & self._streams.keys():
            raise ValueError("request ids must be unique among unfinished requests")
        if not self._streams:
            self._last_progress = time.monotonic()
        for request_id in stream.unfinished:
            self._streams[request_id] = stream
        try:
            await self._channel.send(Add(list(requests)))
            while stream.unfinished or stream.buffer:
                if not stream.buffer:
                    stream.wake = asyncio.get_running_loop().create_future()
                    await stream.wake
                    stream.wake = None
                taken, stream.buffer = stream.buffer, []
                yield taken
        finally:
            if stream.unfinished:
                left = list(stream.unfinished)
                for request_id in left:
                    del self._streams[request_id]
                stream.unfinished.clear()
                await self._channel.send(Abort(left))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End some requests of a running stream; each still gets its ending, ``ABORT``."""
        if left := [name for name in request_ids if name in self._streams]:
            await self._channel.send(Abort(left))

    async def _read(self) -> None:
        while True:
            try:
                message = await self._channel.receive()
            except EngineError as error:
                self._fail(error)
                return
            if isinstance(message, StepOutputs):
                self._last_progress = time.monotonic()
                self.stats = message.stats
                self._hand_out(message.outputs)
                self.on_step(message)
            elif isinstance(message, Failed):
                self._fail(EngineError(message.error, hint=message.hint))
                return

    def _hand_out(self, outputs: list[SequenceOutput]) -> None:
        touched: set[_Stream] = set()
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:  # aborted here while the output was on its way
                continue
            stream.buffer.append(output)
            if output.finish_reason is not None:
                stream.unfinished.discard(output.request_id)
                del self._streams[output.request_id]
            touched.add(stream)
        for stream in touched:
            stream.notify()

    async def _watch_process(self) -> None:
        self._fail(await self._ended())

    async def _watch_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_TIMEOUT_S / 10)
            silent = time.monotonic() - self._last_progress
            if self._streams and silent > PROGRESS_TIMEOUT_S:
                self._fail(
                    EngineError(f"the engine made no progress for {silent:.0f} s: it is frozen")
                )
                return

    def _fail(self, error: PippinError) -> None:
        if self.failure is not None:
            return
        self.failure = error
        self._hand_out(
            [
                SequenceOutput(
                    request_id=request_id, finish_reason=FinishReason.ERROR, error=str(error)
                )
                for request_id in list(self._streams)
            ]
        )
        self.failed.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._channel.close()
