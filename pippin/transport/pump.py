"""The I/O thread of a link: the only one that touches its sockets.

It sends what was posted, hands on what arrived, beats, and watches the connection. Encryption and
TCP are libzmq's, in a thread of its own without Python's lock; so are the ZMTP heartbeats that find
a frozen peer or a cut cable. They do not depend on Python getting to run, neither here nor there:
a peer that holds the lock for long (loading a model) is not taken for dead.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from pippin.errors import ClusterSecretWrong, ConfigError, LinkError, PeerLost
from pippin.errors import ProtocolError as BrokenProtocol
from pippin.transport.address import bind_error
from pippin.transport.frames import (
    MAX_BODY_BYTES,
    Buffer,
    Header,
    Kind,
    decode_head,
    encode_head,
    protocol_of,
)
from pippin.transport.keys import CurveKeys, guard, use_as_client, use_as_server

logger = logging.getLogger(__name__)

#: Seconds between two heartbeats (fewer where the peer's timeout is short).
BEAT_S = 0.5

#: Failed handshakes with nothing but a closed connection after which the secret is to blame.
_BROKEN_HANDSHAKES = 3

#: Frames read before the outbox gets its turn again.
_READS_IN_A_ROW = 64

_RTT_SAMPLES = 8
_QUICK_PINGS = 4

_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_WATCHED = (
    _FAILED
    | zmq.Event.ACCEPTED
    | zmq.Event.CONNECTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.DISCONNECTED
)

# Values of HANDSHAKE_FAILED_PROTOCOL, from zmq.h.
_CRYPTOGRAPHIC = 0x11000001
_MECHANISM_MISMATCH = 0x11000002

Frames = Sequence[Buffer]


#: How long an end that leaves because of the other waits for it to hear why, in seconds.
_GOODBYE_S = 0.5


class Receiver(Protocol):
    """Called from the I/O thread."""

    def arrived(self, header: Header, body: memoryview) -> None:
        """A frame pair from the peer. A ``LinkError`` raised here ends the link."""

    def ended(self, error: LinkError) -> None:
        """The link is dead; called once."""


@dataclass(slots=True)
class Counters:
    bytes_sent: int = 0
    bytes_received: int = 0
    last_heard: float = 0.0
    round_trip_s: float | None = None


class Pump(threading.Thread):
    """One socket with at most one peer."""

    def __init__(
        self, receiver: Receiver, address: str, bind: bool, keys: CurveKeys | None, timeout_s: float
    ) -> None:
        """Binds or starts to connect. Raises ``PortInUse``, ``ConfigError`` (no such address)."""
        super().__init__(name=f"link {address}", daemon=True)
        self.counters = Counters(last_heard=time.monotonic())
        self.measured = threading.Event()
        """Set when the round trip is known."""
        self.refusals: list[str] = []
        """Bound end: who was not let in, and why."""
        self._receiver = receiver
        self._bound = bind
        self._encrypted = keys is not None
        self._timeout_s = timeout_s
        self._beat_s = min(BEAT_S, timeout_s / 8)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        if keys is not None and bind:
            guard(self._context, keys)
        self._open(address, keys)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._woken = False
        self._outbox: deque[Frames] = deque()
        self._credit: int | None = None
        self._peer = b""
        """Bound end: the peer's routing id, empty until it has announced itself."""
        self._descriptor = -1
        """Of the peer's connection."""
        self._connected = False
        """Connecting end: the handshake of libzmq is done."""
        self._strangers: dict[int, str] = {}
        """Bound end: addresses by descriptor."""
        self._broken_handshakes = 0
        self._round_trips: deque[float] = deque(maxlen=_RTT_SAMPLES)
        self._pings = 0
        self._beating = False
        self._closing = False
        self._leaving = False
        """This end has said that nothing more will come from it."""
        self._linger_s = 0.0

    def _open(self, address: str, keys: CurveKeys | None) -> None:
        socket = self._context.socket(zmq.ROUTER if self._bound else zmq.DEALER)
        self._socket = socket
        socket.linger = 0
        # Bounded by the links' credits; a full queue in libzmq would stop it from hearing beats.
        socket.sndhwm = socket.rcvhwm = 0
        socket.maxmsgsize = MAX_BODY_BYTES + 65_536
        beat_ms = int(self._beat_s * 1000)
        socket.heartbeat_ivl = beat_ms
        # Counted from an unanswered beat, which comes up to an interval after the last sign.
        socket.heartbeat_timeout = int(self._timeout_s * 1000) - 2 * beat_ms
        socket.handshake_ivl = 5_000
        socket.reconnect_ivl = 100
        socket.reconnect_ivl_max = 1_000
        socket.ipv6 = "[" in address
        if keys is not None:
            (use_as_server if self._bound else use_as_client)(socket, keys)
        self._monitor = socket.get_monitor_socket(_WATCHED)
        if not self._bound:
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                self._close()
                raise ConfigError(f"cannot connect to {address}: {error.strerror}") from error
            self.address = address
            return
        socket.router_mandatory = True
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._close()
            raise bind_error(address, error) from error
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def post(self, pairs: Sequence[Frames]) -> None:
        """Send frame pairs; from any thread, never blocks. The bound end keeps them until it has a
        peer."""
        self._outbox.extend(pairs)
        self._wake()

    def credit(self, total: int) -> None:
        """Tell the peer what was read; from any thread."""
        self._credit = total
        self._wake()

    def finish(self, linger_s: float) -> None:
        """Send what was posted for at most so many seconds, then end. From any thread."""
        self._linger_s = linger_s
        self._closing = True
        self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            with contextlib.suppress(BlockingIOError, OSError):  # full: awake; closed: ended
                os.write(self._wake_write, b"\0")

    def run(self) -> None:
        error: LinkError = PeerLost("the link was closed")
        try:
            self._loop()
            self._leave(Header(Kind.BYE), b"", self._linger_s)
        except BrokenProtocol as raised:
            error = raised
            self._leave(Header(Kind.REFUSE), raised.message.encode(), _GOODBYE_S)
        except LinkError as raised:
            error = raised
        except zmq.ZMQError as raised:
            if raised.errno == errno.EHOSTUNREACH:
                error = self._lost()
            else:
                error = PeerLost(f"the connection with {self.address} broke: {raised}")
        finally:
            self._receiver.ended(error)
            self._close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()  # waits for the socket's linger; the guard's thread ends by it

    def _loop(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake_read):
            poller.register(source, zmq.POLLIN)
        next_beat = time.monotonic() + self._beat_s
        while True:
            wait_ms = max(0, int(1000 * (next_beat - time.monotonic())) + 1)
            ready = dict(poller.poll(wait_ms))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                self._woken = False
            self._flush()
            if self._closing:
                return
            if self._monitor in ready:
                self._watch()
            if self._socket in ready:
                self._read(_READS_IN_A_ROW)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._beat_s
                if self._beating:
                    self._ping()

    # sending

    def _flush(self) -> None:
        if self._bound and not self._peer:
            return
        credit, self._credit = self._credit, None
        if credit is not None:
            self._send((encode_head(Header(Kind.CREDIT, total=credit)), b""))
        while self._outbox:
            self._send(self._outbox.popleft())

    def _send(self, pair: Frames) -> None:
        frames = (self._peer, *pair) if self._bound else pair
        self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        self.counters.bytes_sent += sum(memoryview(frame).nbytes for frame in pair)

    def _leave(self, header: Header, why: bytes, wait_s: float) -> None:
        """Tell the peer that, or why, this end leaves, and hear it out until it leaves as well.

        A connection that is closed while something in it is unread is reset by the system (RFC
        2525, 2.17), and then what the peer has not read yet is lost.
        """
        self._leaving = True
        self._socket.linger = int(wait_s * 1000)
        if not (self._peer or self._connected):
            return
        poller = zmq.Poller()
        for source in (self._socket, self._monitor):
            poller.register(source, zmq.POLLIN)
        deadline = time.monotonic() + wait_s
        with contextlib.suppress(LinkError, zmq.ZMQError):  # it left
            self._send((encode_head(header), why))
            while self._beating and (left_s := deadline - time.monotonic()) > 0:
                ready = dict(poller.poll(int(left_s * 1000) + 1))
                if self._socket in ready:
                    self._read(_READS_IN_A_ROW)
                if self._monitor in ready:
                    self._watch()

    def _ping(self) -> None:
        self._send((encode_head(Header(Kind.PING, seconds=time.monotonic())), b""))

    # receiving

    def _read(self, most: int | None) -> None:
        count = 0
        while most is None or count < most:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            count += 1
            if self._bound and not self._admit(frames):
                continue
            pair = frames[1:] if self._bound else frames
            head = pair[0].buffer
            if not (self._bound or self._beating) and protocol_of(head) is None:
                raise self._not_pippin()
            if len(pair) != 2:
                raise BrokenProtocol(f"received a message of {len(pair)} frames, not 2")
            body = pair[1].buffer
            self.counters.bytes_received += head.nbytes + body.nbytes
            self.counters.last_heard = time.monotonic()
            self._dispatch(decode_head(head), body)

    def _dispatch(self, header: Header, body: memoryview) -> None:
        match header.kind:
            case Kind.PING:
                self._send((encode_head(Header(Kind.PONG, seconds=header.seconds)), b""))
                return
            case Kind.PONG:
                self._round_trips.append(time.monotonic() - header.seconds)
                self.counters.round_trip_s = min(self._round_trips)
                self._pings += 1
                if self._pings < _QUICK_PINGS:
                    self._ping()
                else:
                    self.measured.set()
                return
            case Kind.BYE:
                if not self._leaving:
                    self._socket.linger = int(_GOODBYE_S * 1000)
                    self._send((encode_head(Header(Kind.BYE)), b""))
                raise self._lost()
            case Kind.ACCEPT:
                self._beating = True
                self._ping()
        self._receiver.arrived(header, body)

    def _admit(self, frames: list[zmq.Frame]) -> bool:
        """Bound end: whether a message is the peer's. The first to announce itself becomes it."""
        sender = frames[0].bytes
        if sender == self._peer:
            return True
        try:
            kind = decode_head(frames[1].buffer).kind if len(frames) == 3 else None
        except BrokenProtocol as error:
            if not self._peer and protocol_of(frames[1].buffer) is not None:
                self._peer = sender  # the peer, but of another version: both must be told
                raise
            logger.warning("%s: dropped a stranger's message: %s", self.address, error)
            return False
        if kind is Kind.BYE:
            return False
        if kind is not Kind.ANNOUNCE:
            logger.warning("%s: dropped a stranger's message", self.address)
            return False
        if self._peer:
            logger.warning("%s: refused a second peer", self.address)
            body = f"the link at {self.address} has its peer already".encode()
            with contextlib.suppress(zmq.ZMQError):  # it may have left
                self._socket.send_multipart(
                    (sender, encode_head(Header(Kind.REFUSE)), body), zmq.NOBLOCK
                )
            return False
        self._peer = sender
        self._descriptor = int(frames[1].get(zmq.SRCFD))
        self._flush()
        return True

    # watching the connection

    def _watch(self) -> None:
        while self._monitor.poll(0):
            happened = recv_monitor_message(self._monitor)
            event, value = zmq.Event(happened["event"]), happened["value"]
            if event is zmq.Event.ACCEPTED:
                self._strangers[value] = _remote(value)
            elif event is zmq.Event.CONNECTED:
                self._descriptor = value
            elif event is zmq.Event.HANDSHAKE_SUCCEEDED:
                self._connected = True
            elif event in _FAILED:
                self._handshake_failed(event, value)
            elif event is zmq.Event.DISCONNECTED:
                self._disconnected(value)

    def _disconnected(self, descriptor: int) -> None:
        self._strangers.pop(descriptor, None)
        if descriptor != self._descriptor or not (self._bound or self._connected):
            return
        self._read(None)  # what it sent before it went
        raise self._lost()

    def _lost(self) -> PeerLost:
        silent = time.monotonic() - self.counters.last_heard
        if silent > 0.6 * self._timeout_s:
            return PeerLost(
                f"the peer at the other end of {self.address} has been silent for {silent:.1f} s:"
                " its process is frozen, its machine down, or the cable cut"
            )
        return PeerLost(
            f"the peer at the other end of {self.address} closed the connection: its process ended"
        )

    def _handshake_failed(self, event: zmq.Event, value: int) -> None:
        if self._bound:
            # The event does not tell whose it was; the latest to knock is it almost always.
            who = next(reversed(self._strangers.values()), "somebody")
            why = _why_failed(event, value)
            self.refusals.append(f"{who}: {why}")
            if len(self.refusals) <= 10:
                logger.warning("%s: refused %s: %s", self.address, who, why)
            return
        if event is zmq.Event.HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISM_MISMATCH:
            raise BrokenProtocol(
                f"{self.address}: one end of the link is encrypted, the other is not",
                hint="start both with the cluster secret, or both without",
            )
        if event is zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            if value in (errno.ETIMEDOUT, errno.EAGAIN):
                return
            self._broken_handshakes += 1
            if self._broken_handshakes < _BROKEN_HANDSHAKES:
                return
        if self._encrypted:
            raise secret_wrong(f"{self.address} broke off the encrypted handshake")
        raise self._not_pippin()

    def _not_pippin(self) -> BrokenProtocol:
        return BrokenProtocol(
            f"what listens at {self.address} is not a link of Pippin",
            hint="check address and port",
        )


def secret_wrong(what: str) -> ClusterSecretWrong:
    return ClusterSecretWrong(
        f"{what}: the two machines were given different cluster secrets",
        hint="copy the cluster secret of the first machine to the other",
    )


def _why_failed(event: zmq.Event, value: int) -> str:
    if event is zmq.Event.HANDSHAKE_FAILED_AUTH or value == _CRYPTOGRAPHIC:
        return "its cluster secret is another one"
    if value == _MECHANISM_MISMATCH:
        return "one end is encrypted, the other is not"
    if event is zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
        return "it does not speak this protocol"
    return "it broke off the handshake"


def _remote(descriptor: int) -> str:
    """The address at the other end of libzmq's connection, for a log."""
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as copy:
            name = copy.getpeername()
    except OSError:
        return "somebody"
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a local process"
