"""The other ranks of a stage, as its rank 0 sees them: they get every plan and hidden state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from pippin.backends.base import HiddenStates
from pippin.engine.spec import Allocate, Gather, StageFacts, decode_note, encode_note
from pippin.errors import PeerLost, ProtocolError
from pippin.transport.frames import Control, Hidden, Message, Plan, Stop
from pippin.transport.link import Link
from pippin.types.step import StepPlan

N = TypeVar("N", Gather, Allocate)


class Followers:
    """Links to the ranks above 0. Without any, every method does nothing."""

    def __init__(self, links: Sequence[Link] = ()) -> None:
        self.links = tuple(links)

    def run(self, plan: StepPlan, hidden: HiddenStates | None) -> None:
        """Have them execute what rank 0 is about to. Raises ``LinkError``."""
        self._send(Plan(plan))
        if hidden is not None:
            self._send(Hidden(plan.step, hidden.dtype, hidden.shape, hidden.data))

    def gather(self, own: StageFacts) -> StageFacts:
        """The facts of rank 0 and of the others together."""
        self._send(Control(encode_note(Gather(()))))
        for link in self.links:
            note = expect_note(link, Gather)
            (other,) = note.stages
            own = msgspec.structs.replace(
                own,
                weights_bytes=own.weights_bytes + other.weights_bytes,
                available_kv_bytes=min(own.available_kv_bytes, other.available_kv_bytes),
            )
        return own

    def allocate(self, sizes: Allocate) -> None:
        """Have them allocate, and wait until they have."""
        self._send(Control(encode_note(sizes)))
        for link in self.links:
            expect_note(link, Allocate)

    def stop(self, reason: str) -> None:
        self._send(Stop(reason))

    def close(self) -> None:
        for link in self.links:
            link.close()

    def _send(self, message: Message) -> None:
        for link in self.links:
            link.send(message)


def expect_note(link: Link, kind: type[N]) -> N:
    """The next message, which must be such a note. Raises ``LinkError``."""
    message = link.receive()
    if isinstance(message, Control):
        note = decode_note(message.body)
        if isinstance(note, kind):
            return note
    if isinstance(message, Stop):
        raise PeerLost(message.reason)
    raise ProtocolError(f"expected {kind.__name__}, received {type(message).__name__}")
