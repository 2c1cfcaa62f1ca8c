"""The ring of stages as the leader, which is the last of them, sees it.

The leader sends plans to the first stage and receives hidden states from the one before itself.
Links have threads of their own: sending returns at once, and what arrives waits here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from pippin import __version__
from pippin.backends.base import HiddenStates, StageRunner
from pippin.engine.spec import (
    Allocate,
    Gather,
    Report,
    StageFacts,
    StageSpec,
    decode_note,
    encode_note,
)
from pippin.errors import LinkError, PeerLost, PippinError, ProtocolError, StageMismatch
from pippin.transport.frames import Control, Hidden, Message, Plan, Stop
from pippin.transport.link import Link
from pippin.types.stage import Announcement, mismatch
from pippin.types.step import StepPlan

#: Loading takes as long as it takes; what fails says so earlier.
LOAD_TIMEOUT_S = 3600.0

#: Seconds that a stop may take to go round: a stage finishes its step first.
_STOP_WAIT_S = 2.0

#: Seconds after which a thread that wants Python's lock gets it. The links' threads want it for a
#: moment right after a send, while the sender goes on: at Python's own 5 ms, a plan would wait for
#: the leader to hand out tokens (measured: 0.2 ms a hop).
SWITCH_INTERVAL_S = 1e-4

#: Seconds between two looks at whether the processes that load still live.
_WATCH_S = 0.2


class Wake:
    """Lets a poller of file descriptors wait for links. Any thread may call ``notify``."""

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()
        self._here.setblocking(False)
        self._there.setblocking(False)

    def fileno(self) -> int:
        return self._here.fileno()

    def notify(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: awake; closed: too late
            self._there.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._here.recv(4096):
                pass

    def close(self) -> None:
        self._here.close()
        self._there.close()


class Pipeline:
    """The stages before the leader's. Used from one thread."""

    def __init__(self, to_first: Link, from_last: Link, num_stages: int, wake: Wake) -> None:
        self._to_first = to_first
        self._from_last = from_last
        self.num_stages = num_stages
        self._delays = [0.0] * num_stages
        self.busy = [0.0] * num_stages
        """Ratio a stage, as last reported."""
        self.wake = wake
        self._ahead: Message | None = None
        """Received already, not taken yet."""

    @property
    def delay(self) -> float:
        """Seconds that a plan spends on links on its way round, the work of stages left out."""
        ends = (self._to_first, self._from_last)
        return sum(self._delays) + sum((link.stats.round_trip_s or 0.0) / 2 for link in ends)

    def gather(self, own: StageFacts) -> list[StageFacts]:
        """What all stages say of themselves, in the order of their layers."""
        note = self._round(Gather(()))
        assert isinstance(note, Gather)
        return [*note.stages, own]

    def allocate(self, sizes: Allocate) -> None:
        """Have all other stages allocate their KV pools, and wait until they have."""
        self._round(sizes)

    def _round(self, note: Gather | Allocate) -> Gather | Allocate:
        self._to_first.send(Control(encode_note(note)))
        while True:
            message = self._from_last.receive()
            if isinstance(message, Stop):
                raise PeerLost(message.reason)
            if not isinstance(message, Control):
                raise ProtocolError(f"expected a note, received {type(message).__name__}")
            answer = decode_note(message.body)
            if isinstance(answer, Report):
                self._take(answer)
            else:
                return answer

    def pending(self) -> bool:
        """Whether ``receive`` would return or raise at once."""
        self.wake.clear()
        if self._ahead is None:
            try:
                self._ahead = self._from_last.receive(0)
            except LinkError:  # receive raises it again
                return True
        return self._ahead is not None

    def send(self, plan: StepPlan) -> None:
        """Start a step. Raises ``LinkError``."""
        self._to_first.send(Plan(plan))

    def receive(self, step: int, timeout_s: float | None) -> tuple[HiddenStates, float] | None:
        """Hidden states of the oldest step that was sent, and the seconds of the slowest stage.

        None after ``timeout_s`` seconds (None: for ever, 0: only what is here). Raises
        ``LinkError``.
        """
        while True:
            message, self._ahead = self._ahead, None
            message = message or self._from_last.receive(timeout_s)
            match message:
                case None:
                    return None
                case Hidden() if message.step == step:
                    states = HiddenStates(message.dtype, message.shape, message.data)
                    return states, message.seconds
                case Control(body):
                    note = decode_note(body)
                    if isinstance(note, Report):
                        self._take(note)
                        continue
                    raise ProtocolError(f"unexpected {type(note).__name__} between steps")
                case Stop(reason):
                    raise PeerLost(reason)
                case _:
                    raise ProtocolError(f"expected step {step}, received {message}")

    def drain(self) -> None:
        """Take the reports that are here while nothing is in flight. Raises ``LinkError``."""
        taken = self.receive(-(2**62), 0)
        if taken is not None:
            raise ProtocolError("received hidden states that nobody asked for")

    def _take(self, report: Report) -> None:
        if not 0 <= report.stage < self.num_stages - 1:
            raise ProtocolError(f"a report of stage {report.stage}, which there is not")
        self.busy[report.stage] = report.busy_ratio
        # The leader's own links are measured here.
        self._delays[report.stage] = report.delay if report.stage else 0.0

    def close(self, reason: str = "the leader leaves") -> None:
        """Have the other stages end; waits a moment until the word has gone round."""
        with contextlib.suppress(LinkError):
            self._to_first.send(Stop(reason))
            deadline = time.monotonic() + _STOP_WAIT_S
            while (left := deadline - time.monotonic()) > 0:
                message = self._from_last.receive(left)
                if message is None or isinstance(message, Stop):
                    break
        self._to_first.close()
        self._from_last.close()
        self.wake.close()


def announcement(spec: StageSpec, runner: StageRunner, hidden_dtype: str) -> Announcement:
    info = runner.info
    return Announcement(
        version=__version__,
        rank=spec.stage,
        layers=spec.layers,
        num_layers=info.num_layers,
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
        dtype=hidden_dtype,
        fingerprint=info.fingerprint,
        backend=spec.backend,
        device=runner.device,
        tensor_parallel_size=spec.group.size if spec.group is not None else 1,
        pid=os.getpid(),
    )


def facts(spec: StageSpec, runner: StageRunner, available_kv_bytes: int) -> StageFacts:
    return StageFacts(
        stage=spec.stage,
        node=spec.node or socket.gethostname(),
        pid=os.getpid(),
        layers=spec.layers,
        backend=spec.backend,
        device=runner.device,
        weights_bytes=runner.info.weights_bytes,
        available_kv_bytes=available_kv_bytes,
        kv_groups=runner.info.kv_groups,
    )


def check_neighbour(spec: StageSpec, mine: Announcement, theirs: Announcement) -> str | None:
    """Why the stages at a link's ends do not fit, by their places in the ring."""
    last = spec.num_stages - 1
    if theirs.rank == spec.stage:  # ranks of one stage
        if (mine.layers, mine.tensor_parallel_size) != (theirs.layers, theirs.tensor_parallel_size):
            return (
                f"two ranks of stage {spec.stage} hold layers {mine.layers} of"
                f" {mine.tensor_parallel_size} parts and {theirs.layers} of"
                f" {theirs.tensor_parallel_size} parts"
            )
        return mismatch(mine, _elsewhere(theirs), follows=False)
    before, after = (mine, theirs) if mine.rank < theirs.rank else (theirs, mine)
    if {mine.rank, theirs.rank} == {0, last} and spec.num_stages > 2:
        return mismatch(before, after, follows=False)
    return mismatch(before, after, follows=True)


def _elsewhere(announced: Announcement) -> Announcement:
    """As if it were another stage's: what both must have in common is compared then."""
    return msgspec.structs.replace(announced, rank=announced.rank + 1)


def greet(
    links: Sequence[Link],
    spec: StageSpec,
    mine: Announcement,
    failed: Callable[[], PippinError | None] = lambda: None,
    timeout_s: float = LOAD_TIMEOUT_S,
) -> list[Announcement]:
    """Shake hands on all links at once. ``failed`` says whether waiting is in vain.

    Raises that error, ``StageMismatch`` and what else ``Link.handshake`` raises.
    """
    answers: list[Announcement | PippinError | None] = [None] * len(links)

    def shake(index: int, link: Link) -> None:
        try:
            answers[index] = link.handshake(
                mine, lambda theirs: check_neighbour(spec, mine, theirs), timeout_s
            )
        except PippinError as error:
            answers[index] = error

    threads = [
        threading.Thread(target=shake, args=(index, link), daemon=True)
        for index, link in enumerate(links)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        for thread in threads:
            thread.join(_WATCH_S / len(threads))
        found = [answer for answer in answers if isinstance(answer, PippinError)]
        if found:
            # A stage that refuses its neighbour takes the other links with it.
            found.sort(key=lambda error: not isinstance(error, StageMismatch))
            raise failed() or found[0]
        error = failed()
        if error is not None:
            raise error
    for answer in answers:
        if isinstance(answer, PippinError):
            raise failed() or answer
    return [answer for answer in answers if isinstance(answer, Announcement)]
