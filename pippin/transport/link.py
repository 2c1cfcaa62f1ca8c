"""One end of a connection between two stages.

One end binds, the other connects; after ``handshake`` both send and receive messages in order. A
link has one peer in its life: when that one is gone, both directions raise ``PeerLost`` and a new
link must be made.

What was sent and not yet *received by the other end's caller* is bounded (``window_bytes``): the
receiver gives credit as it reads, and ``send`` blocks while the window is full. So a slow stage
holds up the one before it instead of filling anybody's memory.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pippin.errors import ConfigError, LinkError, PeerLost, ProtocolError, StageMismatch
from pippin.transport.address import is_local
from pippin.transport.frames import (
    Assembler,
    Header,
    Kind,
    Message,
    encode,
    encode_head,
)
from pippin.transport.keys import CurveKeys
from pippin.transport.pump import Pump, secret_wrong
from pippin.types.stage import Announcement

logger = logging.getLogger(__name__)

PEER_TIMEOUT_S = 5.0
WINDOW_BYTES = 64 * 2**20
STALL_TIMEOUT_S = 60.0

#: What a message costs of the window besides its bytes, so that small ones are bounded too.
_MESSAGE_COST = 4096

_encoder = msgspec.msgpack.Encoder()
_announcements = msgspec.msgpack.Decoder(Announcement)


@dataclass(frozen=True, slots=True)
class LinkStats:
    bytes_sent: int
    bytes_received: int
    last_heard: float
    """``time.monotonic()`` of the last frame, heartbeats included."""
    round_trip_s: float | None
    """The shortest of the last eight heartbeats, thread changes at both ends included."""


class Link:
    """Made by ``bind`` or ``connect``. ``send`` and ``close`` may be called from any thread,
    ``receive`` from one at a time."""

    def __init__(
        self,
        address: str,
        keys: CurveKeys | None,
        *,
        bind: bool,
        trusted: bool,
        peer_timeout_s: float,
        window_bytes: int,
        stall_timeout_s: float,
        wake: Callable[[], None] | None,
    ) -> None:
        if keys is None and not trusted and not is_local(address):
            raise ConfigError(
                f"a link at {address} leaves this machine unencrypted",
                hint="give a cluster secret, or say that the cable is trusted",
            )
        self._window = window_bytes
        self._stall_timeout_s = stall_timeout_s
        self._wake = wake
        self._room = threading.Condition()
        self._order = threading.Lock()
        """Held while a message is queued, so that the parts of two do not mix."""
        self._sent_cost = 0
        self._credited_cost = 0
        self._read_cost = 0
        self._reported_cost = 0
        self._error: LinkError | None = None
        self._assembler = Assembler()
        self._assembling_cost = 0
        self._inbox: queue.SimpleQueue[tuple[Message, int] | LinkError] = queue.SimpleQueue()
        self._greetings: queue.SimpleQueue[tuple[Kind, bytes] | LinkError] = queue.SimpleQueue()
        self._open = False
        """Work may arrive: the peer's announcement is known."""
        self._shaken = False
        self._bound = bind
        self._pump = Pump(self, address, bind, keys, peer_timeout_s)
        self.address = self._pump.address
        """Where the bound end listens, with the real port."""
        self._pump.start()

    @classmethod
    def bind(
        cls,
        address: str,
        keys: CurveKeys | None = None,
        *,
        trusted: bool = False,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        window_bytes: int = WINDOW_BYTES,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        wake: Callable[[], None] | None = None,
    ) -> Link:
        """Listen at ``tcp://10.0.0.1:0`` (0: a free port, see ``address``) or ``ipc://path``.

        ``keys``: encrypted; without, plain, which off this machine must be asked for (``trusted``).
        ``peer_timeout_s``: silence after which the peer counts as lost. ``window_bytes``: see
        above. ``stall_timeout_s``: how long ``send`` waits for room. ``wake`` is called from the
        I/O thread whenever ``receive`` would return or raise.

        Raises ``PortInUse``; ``ConfigError`` for an address that is not this machine's, or plain
        text off the machine that was not asked for.
        """
        return cls(
            address,
            keys,
            bind=True,
            trusted=trusted,
            peer_timeout_s=peer_timeout_s,
            window_bytes=window_bytes,
            stall_timeout_s=stall_timeout_s,
            wake=wake,
        )

    @classmethod
    def connect(
        cls,
        address: str,
        keys: CurveKeys | None = None,
        *,
        trusted: bool = False,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        window_bytes: int = WINDOW_BYTES,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        wake: Callable[[], None] | None = None,
    ) -> Link:
        """Connect to where the other end listens, or will soon. Arguments as in ``bind``."""
        return cls(
            address,
            keys,
            bind=False,
            trusted=trusted,
            peer_timeout_s=peer_timeout_s,
            window_bytes=window_bytes,
            stall_timeout_s=stall_timeout_s,
            wake=wake,
        )

    @property
    def stats(self) -> LinkStats:
        counters = self._pump.counters
        return LinkStats(
            counters.bytes_sent,
            counters.bytes_received,
            counters.last_heard,
            counters.round_trip_s,
        )

    def handshake(
        self,
        mine: Announcement,
        check: Callable[[Announcement], str | None],
        timeout_s: float = 30.0,
    ) -> Announcement:
        """Exchange announcements; returns the peer's. The round trip is measured afterwards.

        ``check`` looks at the peer's and says why it is refused, or None. Raises at both ends
        ``StageMismatch`` if either refuses; ``ClusterSecretWrong``; ``ProtocolError`` (not Pippin,
        or another version of its links); ``PeerLost`` if nobody is there within ``timeout_s``
        seconds. The link is closed after an error.
        """
        deadline = time.monotonic() + timeout_s
        try:
            theirs = self._greet(mine, check, deadline)
        except LinkError:
            self.close()
            raise
        self._assembler.expect(theirs.dtype, theirs.hidden_size)
        self._open = True
        self._post_greeting(Kind.ACCEPT)
        try:
            self._await_greeting(Kind.ACCEPT, deadline)
            while not self._pump.measured.wait(0.05):
                if self._error is not None:
                    raise self._error
                if time.monotonic() > deadline:
                    raise self._nobody()
        except LinkError:
            self.close()
            raise
        self._shaken = True
        return theirs

    def _greet(
        self, mine: Announcement, check: Callable[[Announcement], str | None], deadline: float
    ) -> Announcement:
        self._post_greeting(Kind.ANNOUNCE, _encoder.encode(mine))
        body = self._await_greeting(Kind.ANNOUNCE, deadline)
        try:
            theirs = _announcements.decode(body)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the peer's announcement cannot be read: {error}") from error
        reason = check(theirs)
        if reason is not None:
            self._post_greeting(Kind.REFUSE, reason.encode())
            raise StageMismatch(reason)
        return theirs

    def _post_greeting(self, kind: Kind, body: bytes = b"") -> None:
        self._pump.post([(encode_head(Header(kind)), body)])

    def _await_greeting(self, wanted: Kind, deadline: float) -> bytes:
        try:
            item = self._greetings.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise self._nobody() from None
        if isinstance(item, LinkError):
            raise item
        kind, body = item
        if kind is Kind.REFUSE:
            raise StageMismatch(body.decode(errors="replace"))
        if kind is not wanted:
            raise ProtocolError(f"expected {wanted.name}, received {kind.name}")
        return body

    def _nobody(self) -> LinkError:
        refusals = self._pump.refusals
        if refusals:
            error = secret_wrong if "secret" in refusals[-1] else ProtocolError
            return error(f"nobody was let in at {self.address}; last refused was {refusals[-1]}")
        if self._bound:
            return PeerLost(
                f"nobody connected to {self.address} in time",
                hint="is the other stage running, and does a firewall let it reach this port?",
            )
        return PeerLost(
            f"nothing answered at {self.address} in time",
            hint="is the other stage running, and does a firewall let this machine reach it?",
        )

    def send(self, message: Message) -> None:
        """Queue a message; returns before it is sent. A tensor's memory is the link's from then on.

        Blocks while the window is full. Raises ``PeerLost`` (also after ``stall_timeout_s`` seconds
        without room) or what else ended the link, and ``ValueError`` for a message that is not
        well-formed.
        """
        pairs = list(encode(message))
        cost = _MESSAGE_COST + sum(memoryview(body).nbytes for _, body in pairs)
        with self._order:
            with self._room:
                if not self._room.wait_for(lambda: self._has_room(cost), self._stall_timeout_s):
                    raise PeerLost(
                        f"the peer at the other end of {self.address} has read nothing for"
                        f" {self._stall_timeout_s:.0f} s"
                    )
                if self._error is not None:
                    raise self._error
                self._sent_cost += cost
            self._pump.post(pairs)

    def _has_room(self, cost: int) -> bool:
        # The receiver reports in steps of an eighth: below that, nothing more may be to come.
        ahead = self._sent_cost - self._credited_cost
        return self._error is not None or ahead + cost <= self._window or ahead < self._window // 8

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None after ``timeout_s`` seconds (0: only what is here already).

        What arrived before an error comes before it. Raises, then and ever after, ``PeerLost`` or
        ``ProtocolError`` (wrong dtype, shape, size or order).
        """
        try:
            item = self._inbox.get(timeout_s != 0, timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, LinkError):
            self._inbox.put(item)
            raise item
        message, cost = item
        self._read_cost += cost
        if self._read_cost - self._reported_cost >= self._window // 8:
            self._reported_cost = self._read_cost
            self._pump.credit(self._read_cost)
        return message

    def close(self, linger_s: float = 1.0) -> None:
        """Send what is queued, for at most ``linger_s`` seconds, and end. Safe to repeat."""
        self._pump.finish(linger_s)
        self._pump.join(linger_s + 1.0)

    # called by the pump, in its thread

    def arrived(self, header: Header, body: memoryview) -> None:
        match header.kind:
            case Kind.CREDIT:
                with self._room:
                    self._credited_cost = header.total
                    self._room.notify_all()
                return
            case Kind.REFUSE if self._shaken:
                raise ProtocolError(f"the peer gave up: {bytes(body).decode(errors='replace')}")
            case Kind.ANNOUNCE | Kind.ACCEPT | Kind.REFUSE if not self._shaken:
                self._greetings.put((header.kind, bytes(body)))
                return
        if not self._open:
            raise ProtocolError(f"{header.kind.name} before the handshake")
        self._assembling_cost += body.nbytes
        message = self._assembler.feed(header, body)
        if message is None:
            return
        cost, self._assembling_cost = self._assembling_cost + _MESSAGE_COST, 0
        self._inbox.put((message, cost))
        if self._wake is not None:
            self._wake()

    def ended(self, error: LinkError) -> None:
        with self._room:
            self._error = error
            self._room.notify_all()
        self._greetings.put(error)
        self._inbox.put(error)
        if self._wake is not None:
            self._wake()
