"""The engine process: load the model, then turn the loop until told to stop.

Started as ``python -m pippin.engine.process ADDRESS`` with an ``EngineSpec`` as one JSON line on
standard input. Standard input stays open for life: its end means that the parent is gone, and the
engine goes too, so that no orphan keeps the accelerator's memory.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections import defaultdict

import msgspec

from pippin import log
from pippin.clock import SystemClock
from pippin.engine import core
from pippin.engine.spec import EngineSpec
from pippin.engine.worker import say
from pippin.errors import PippinError
from pippin.transport.channel import LeaderChannel
from pippin.types.message import Abort, Add, Failed, FromEngine, Hello, Shutdown, StepOutputs
from pippin.types.request import SequenceOutput

logger = logging.getLogger(__name__)

#: Longest sleep while idle, in seconds: deadlines are looked at this often.
IDLE_WAIT_S = 0.5


class Leader:
    """Drain the inbox, step, send each client its outputs."""

    def __init__(self, channel: LeaderChannel, engine: core.EngineCore) -> None:
        self._channel = channel
        self._engine = engine
        self._owners: dict[str, bytes] = {}
        self._clients: set[bytes] = set()
        self._busy_told: tuple[float, ...] = ()
        self._stopping = False

    def run(self) -> None:
        """Returns when told to stop, or when the engine has failed and everybody was told."""
        engine = self._engine
        while not self._stopping and engine.failure is None:
            if not engine.has_work:
                self._channel.wait(IDLE_WAIT_S, engine.wake)
                engine.idle()
                self._tell_busy()
            elif engine.waits:
                self._channel.wait(IDLE_WAIT_S, engine.wake)
            self._drain()
            self._emit(engine.step(0.0))
        if engine.failure is not None:
            error = engine.failure
            logger.error("%s", error.message)
            for client in self._clients:
                failure = Failed(error.message, error.code, error.hint, error.exit_code)
                self._channel.send(client, failure)

    def stop(self) -> None:
        self._stopping = True

    def _drain(self) -> None:
        for client, message in self._channel.receive():
            match message:
                case Hello():
                    self._clients.add(client)
                    self._busy_told = ()
                    self._channel.send(client, self._engine.ready)
                case Add(requests):
                    for request in requests:
                        self._owners[request.request_id] = client
                        self._engine.add(request)
                case Abort(request_ids):
                    for request_id in request_ids:
                        output = self._engine.abort(request_id)
                        if output is not None:
                            self._emit([output])
                case Shutdown():
                    self._stopping = True

    def _tell_busy(self) -> None:
        """Steps carry the busy ratios; without steps they are sent by themselves as they fall."""
        if self._engine.busy() == self._busy_told:
            return
        stats = msgspec.structs.replace(self._engine.stats(), num_tokens=0)
        self._busy_told = stats.busy
        for client in self._clients:
            self._channel.send(client, StepOutputs([], stats))

    def _emit(self, outputs: list[SequenceOutput]) -> None:
        if not outputs:
            return
        by_client: dict[bytes, list[SequenceOutput]] = defaultdict(list)
        for output in outputs:
            by_client[self._owners[output.request_id]].append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
        stats = self._engine.stats()
        for client, own in by_client.items():
            self._channel.send(client, StepOutputs(own, stats))


def _answer_and_exit(channel: LeaderChannel, failure: FromEngine) -> None:
    """Tell whoever waits for ``Ready`` why it will not come."""
    if channel.wait(5.0):
        for client, message in channel.receive():
            if isinstance(message, Hello):
                channel.send(client, failure)
    channel.close()


def _exit_with_parent() -> None:
    sys.stdin.read()
    logger.info("the parent process is gone; leaving")
    # The main thread may be inside a long step; nothing of value is lost by not waiting for it.
    os._exit(0)


def main() -> int:
    address = sys.argv[1]
    line = sys.stdin.readline()
    if not line.endswith("\n"):  # the parent has gone while it started us
        return 0
    spec = msgspec.json.decode(line, type=EngineSpec)
    log.setup("engine", spec.config.log_level)
    # A group of its own keeps Ctrl-C away; this one is for whoever signals all of a session.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        channel = LeaderChannel(address, None if spec.rank is None else spec.rank.keys)
    except PippinError as error:
        say(error)
        return error.exit_code
    try:
        engine = core.load(spec, SystemClock())
    except PippinError as error:
        if spec.rank is not None:
            say(error)
        _answer_and_exit(channel, Failed(error.message, error.code, error.hint, error.exit_code))
        return error.exit_code
    leader = Leader(channel, engine)
    signal.signal(signal.SIGTERM, lambda *_: leader.stop())
    gc.collect()
    gc.freeze()
    try:
        leader.run()
    finally:
        engine.close()
        channel.close()
    if engine.failure is not None and spec.rank is not None:
        say(engine.failure)
    return 0 if engine.failure is None else engine.failure.exit_code


if __name__ == "__main__":
    sys.exit(main())
