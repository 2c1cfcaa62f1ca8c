"""One ZeroMQ stream between an engine's leader and its clients, carrying msgpack messages.

The leader binds a ROUTER, each client connects a DEALER: a client may go and another come while
the leader lives. With ``keys`` (made of the cluster secret) the stream is encrypted and only
members of the cluster get in; without, it is for Unix sockets and loopback. Messages are the unions
of ``types.message``; anything else is dropped and logged by the leader, raised by the client.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import msgspec
import zmq
import zmq.asyncio

from pippin.errors import EngineError
from pippin.transport.address import bind_error
from pippin.transport.keys import CurveKeys, guard, use_as_client, use_as_server
from pippin.types.message import FromEngine, ToEngine

logger = logging.getLogger(__name__)

#: Messages that may wait unsent for one client; a client that reads nothing loses its stream.
HIGH_WATER_MARK = 100_000

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


class LeaderChannel:
    """The engine's end. Used from one thread; sending never blocks."""

    def __init__(self, address: str, keys: CurveKeys | None = None) -> None:
        """Raises ``PortInUse``, or ``ConfigError`` for an address that is not this machine's."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 2_000)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        try:
            if keys is not None:
                guard(self._context, keys)
                use_as_server(self._socket, keys)
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise bind_error(address, error) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        """With the port that was chosen, where ``address`` left it open."""

    def wait(self, timeout_s: float, also: int | None = None) -> bool:
        """True as soon as a message can be read, False after ``timeout_s`` seconds.

        ``also``: a file descriptor that ends the wait, too, when it is readable.
        """
        if also is None:
            return bool(self._socket.poll(int(timeout_s * 1000)))
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(also, zmq.POLLIN)
        return any(source is self._socket for source, _ in poller.poll(int(timeout_s * 1000)))

    def receive(self) -> Iterator[tuple[bytes, ToEngine]]:
        """All messages that have arrived, with their senders; does not wait."""
        while True:
            try:
                sender, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                yield sender, _to_engine.decode(payload)
            except msgspec.DecodeError as error:
                logger.warning("dropped a message that is not of this protocol: %s", error)

    def send(self, client: bytes, message: FromEngine) -> None:
        try:
            self._socket.send_multipart((client, _encoder.encode(message)), zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("client %s reads too slowly: dropped a message", client.hex())

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class ClientChannel:
    """A client's end, for asyncio."""

    def __init__(self, address: str, keys: CurveKeys | None = None) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        if keys is not None:
            use_as_client(self._socket, keys)
        self._socket.connect(address)

    async def send(self, message: ToEngine) -> None:
        await self._socket.send(_encoder.encode(message))

    async def receive(self) -> FromEngine:
        """Raises ``EngineError`` on a message that is not of this protocol."""
        payload = await self._socket.recv()
        try:
            return _from_engine.decode(payload)
        except msgspec.DecodeError as error:
            raise EngineError(
                f"the engine speaks another protocol: {error}",
                hint="stop the old engine process and start again",
            ) from error

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class BlockingChannel:
    """A client's end, for one thread."""

    def __init__(self, address: str, keys: CurveKeys | None = None) -> None:
        # The process's shared context is never ended. Ending one waits for its sockets, for ever if
        # an interrupt came while one was being made.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        if keys is not None:
            use_as_client(self._socket, keys)
        self._socket.connect(address)

    def send(self, message: ToEngine) -> None:
        self._socket.send(_encoder.encode(message))

    def receive(self, timeout_s: float) -> FromEngine | None:
        """None after ``timeout_s`` seconds. Raises ``msgspec.DecodeError``."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        return _from_engine.decode(self._socket.recv())

    def close(self) -> None:
        self._socket.close()


def ask(
    address: str, message: ToEngine, timeout_s: float, keys: CurveKeys | None = None
) -> FromEngine | None:
    """Send one message and wait for one answer; None after ``timeout_s`` seconds."""
    with contextlib.closing(BlockingChannel(address, keys)) as channel:
        channel.send(message)
        return channel.receive(timeout_s)
