"""An engine in other processes, used from one thread as an ``EngineCore`` in this one is."""

from __future__ import annotations

from pippin.engine.launcher import Launched, failure_to_error
from pippin.errors import EngineError, PippinError
from pippin.transport.channel import BlockingChannel
from pippin.types.message import Abort, Add, Failed, Hello, Ready, StepOutputs
from pippin.types.request import FinishReason, Request, SequenceOutput

#: Seconds between two looks at whether the engine still lives.
_LOOK_S = 0.5


class RemoteEngine:
    """Starts ``launched`` and owns it. Raises what it failed with."""

    def __init__(self, launched: Launched) -> None:
        self._launched = launched
        self._unfinished: set[str] = set()
        self._refused: list[SequenceOutput] = []
        self.failure: PippinError | None = None
        """Why the engine cannot go on, once it has ended."""
        try:
            self.ready: Ready = launched.start()
            self._channel = BlockingChannel(launched.address, launched.keys)
        except BaseException:
            launched.stop()
            raise
        self._channel.send(Hello())

    def add(self, request: Request) -> None:
        """Queue a request. One that can never run ends with an error at the next step."""
        self._unfinished.add(request.request_id)
        if self.failure is None:
            self._channel.send(Add([request]))
        else:
            self._refused += self._fail_all()

    def abort(self, request_id: str) -> None:
        """End a request; its outputs that are under way are dropped."""
        if request_id in self._unfinished:
            self._unfinished.remove(request_id)
            if self.failure is None:
                self._channel.send(Abort([request_id]))

    def step(self) -> list[SequenceOutput]:
        """Wait for what the engine adds to the sequences next. An engine that ends gives every
        request an error, and sets ``failure``."""
        if self._refused:
            outputs, self._refused = self._refused, []
            return outputs
        while self._unfinished:
            match self._channel.receive(_LOOK_S):
                case StepOutputs(outputs):
                    known = [one for one in outputs if one.request_id in self._unfinished]
                    ended = [one.request_id for one in known if one.finish_reason is not None]
                    self._unfinished.difference_update(ended)
                    if known:
                        return known
                case Failed() as failed:
                    self.failure = failure_to_error(failed)
                    return self._fail_all()
                case None:
                    self.failure = self._launched.failure()
                    if self.failure is not None:
                        return self._fail_all()
                case Ready():
                    pass
                case other:
                    raise EngineError(f"unexpected {type(other).__name__} from the engine")
        return []

    def _fail_all(self) -> list[SequenceOutput]:
        assert self.failure is not None
        ended, self._unfinished = self._unfinished, set()
        return [
            SequenceOutput(
                request_id=one, finish_reason=FinishReason.ERROR, error=self.failure.message
            )
            for one in ended
        ]

    def close(self) -> None:
        self._channel.close()
        self._launched.stop()
