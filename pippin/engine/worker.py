"""One rank of a stage before the leader's (or a rank above 0 of any stage), as a process.

Started as ``python -m pippin.engine.worker`` with its ``StageSpec`` as one JSON line on standard
input, whose end means that the parent is gone. It runs what arrives at its inbox, in order, and
hands plan and hidden states on. If it cannot start, it says why in one JSON line on standard
output; a lost peer ends it with one line in the log.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time

import msgspec

from pippin import log
from pippin.backends.base import HiddenStates, StageRunner
from pippin.config import environment
from pippin.engine.backend import load_runner
from pippin.engine.budget import MAX_TOKENS
from pippin.engine.busy import WINDOW_S, BusyMeter
from pippin.engine.followers import Followers
from pippin.engine.pipeline import SWITCH_INTERVAL_S, announcement, facts, greet
from pippin.engine.spec import (
    Allocate,
    Gather,
    Report,
    StageFacts,
    StageSpec,
    decode_note,
    encode_note,
)
from pippin.errors import LinkError, PippinError, ProtocolError
from pippin.models.files import resolve
from pippin.transport.frames import Control, Hidden, Plan, Stop
from pippin.transport.link import Link
from pippin.types.message import Failed

logger = logging.getLogger(__name__)


class Worker:
    """Runs what arrives until it is told to stop or a peer is lost."""

    def __init__(
        self,
        spec: StageSpec,
        runner: StageRunner,
        inbox: Link,
        outbox: Link | None,
        followers: Followers,
    ) -> None:
        """``outbox``: to the next stage; None for ranks above 0, which answer to their inbox."""
        self._spec = spec
        self._runner = runner
        self._inbox = inbox
        self._outbox = outbox
        self._followers = followers
        self._busy = BusyMeter(time.monotonic())
        self._reported = (0.0, 0.0)
        self._next_report = 0.0
        self._to_leader = spec.stage == spec.num_stages - 2
        self._takes_hidden = spec.stage > 0

    def run(self) -> str:
        """Returns the reason that the stage before gave for the end. Raises ``LinkError``."""
        while True:
            message = self._inbox.receive(WINDOW_S)
            match message:
                case None:
                    pass
                case Plan():
                    self._step(message)
                case Control(body):
                    self._note(body)
                case Stop(reason):
                    return self.pass_on_stop(reason)
                case _:
                    raise ProtocolError(f"received {type(message).__name__} without a plan")
            self._report()

    def pass_on_stop(self, reason: str) -> str:
        if self._outbox is not None:
            self._outbox.send(Stop(reason))
        self._followers.stop(reason)
        return reason

    def _step(self, message: Plan) -> None:
        plan, seconds = message.plan, message.seconds
        outbox = self._outbox
        if outbox is not None and not self._to_leader:
            outbox.send(Plan(plan))
        hidden = None
        if self._takes_hidden and plan.chunks:
            received = self._inbox.receive()
            if not isinstance(received, Hidden) or received.step != plan.step:
                raise ProtocolError(f"expected the hidden states of step {plan.step}")
            hidden = HiddenStates(received.dtype, received.shape, received.data)
            seconds = received.seconds
        started = time.monotonic()
        self._followers.run(plan, hidden)
        result = self._runner.execute(plan, hidden)
        spent = time.monotonic() - started
        self._busy.add(spent)
        if outbox is not None and plan.chunks:
            assert isinstance(result, HiddenStates)
            outbox.send(
                Hidden(plan.step, result.dtype, result.shape, result.data, max(seconds, spent))
            )

    def _note(self, body: bytes) -> None:
        note = decode_note(body)
        match note:
            case Gather(stages):
                own = self._followers.gather(self._facts())
                note = Gather((*stages, own))
            case Allocate(num_blocks, block_size):
                self._followers.allocate(note)
                self._runner.allocate_kv(num_blocks, block_size)
                gc.collect()
                gc.freeze()
        (self._outbox or self._inbox).send(Control(encode_note(note)))

    def _facts(self) -> StageFacts:
        config = self._spec.config
        available = config.cache.kv_cache_bytes or self._runner.available_kv_bytes(
            config.scheduler.max_num_batched_tokens or MAX_TOKENS, config.scheduler.max_num_seqs
        )
        return facts(self._spec, self._runner, available)

    def _report(self) -> None:
        now = time.monotonic()
        if self._outbox is None or now < self._next_report:
            return
        self._next_report = now + WINDOW_S / 2
        current = (
            round(self._busy.ratio(now), 3),
            (self._inbox.stats.round_trip_s or 0.0) / 2,
        )
        if current != self._reported:
            self._reported = current
            report = Report(self._spec.stage, *current)
            self._outbox.send(Control(encode_note(report)))


def connect(spec: StageSpec) -> tuple[Link, Link | None, Followers]:
    """The links of a worker: inbox, outbox, and those to the other ranks of its stage."""
    assert spec.inbox is not None, "a worker has an inbox"
    keys = spec.keys
    inbox = Link.bind(spec.inbox, keys)
    outbox = None if spec.next is None else Link.connect(spec.next, keys)
    return inbox, outbox, Followers([Link.connect(address, keys) for address in spec.followers])


def serve(spec: StageSpec) -> str:
    """Load the stage and run it to its end; returns the reason for that.

    Raises ``PippinError``: what went wrong while loading, or the lost peer.
    """
    environ = environment()
    files = resolve(
        spec.config.model.model,
        revision=spec.config.model.revision,
        offline=environ.hub_offline,
        home=environ.home,
    )
    inbox, outbox, followers = connect(spec)
    runner = load_runner(spec.backend, spec.config, files, spec.layers, spec.group)
    try:
        mine = announcement(spec, runner, runner.info.dtype)
        links = [inbox, *([] if outbox is None else [outbox]), *followers.links]
        greet(links, spec, mine)
        return Worker(spec, runner, inbox, outbox, followers).run()
    except LinkError as error:
        # Those behind this stage hear the reason rather than a broken connection.
        tell_and_close(error.message, outbox, followers)
        raise
    finally:
        runner.close()
        for link in (inbox, outbox, *followers.links):
            if link is not None:
                link.close()


def tell_and_close(reason: str, outbox: Link | None, followers: Followers) -> None:
    for link in (outbox, *followers.links):
        if link is not None:
            try:
                link.send(Stop(reason))
            except LinkError:
                continue


def _exit_with_parent() -> None:
    sys.stdin.read()
    # The main thread may be inside a long step; nothing of value is lost by not waiting for it.
    os._exit(0)


def main() -> int:
    line = sys.stdin.readline()
    if not line.endswith("\n"):  # the parent has gone while it started us
        return 0
    spec = msgspec.json.decode(line, type=StageSpec)
    if spec.cpus:
        os.sched_setaffinity(0, spec.cpus)  # before any library counts cores or starts threads
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    log.setup(f"stage {spec.stage}" + (f".{spec.group_rank}" if spec.group else ""),
              spec.config.log_level)  # fmt: skip
    # A group of its own keeps Ctrl-C away; this one is for whoever signals all of a session.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        serve(spec)
    except LinkError as error:
        logger.error("%s ends: %s", spec.name, error.message)
        say(error)
        return error.exit_code
    except PippinError as error:
        say(error)
        return error.exit_code
    return 0


def say(error: PippinError) -> None:
    """For the parent, which reads one line."""
    failure = Failed(error.message, error.code, error.hint, error.exit_code)
    sys.stdout.buffer.write(msgspec.json.encode(failure) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
