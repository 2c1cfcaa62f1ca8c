"""The little of HTTP that the server needs, on plain ASGI: bodies in, JSON out, hang-ups noticed.

No framework on the hot path: a streamed step is one ``send``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import msgspec

from pippin.errors import BodyTooLarge, InvalidRequest, RequestTimeout

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]
Headers = list[Header]

#: Longest silence while a client sends its body, in seconds.
BODY_TIMEOUT_S = 60.0
#: A refused body is read and dropped up to these bounds, so that the client, which often writes
#: all before it reads, gets to see the refusal instead of a broken connection.
DISCARD_BYTES = 256 * 1024 * 1024
DISCARD_S = 60.0
#: A client that takes nothing of a stream for so many seconds is given up.
WRITE_TIMEOUT_S = 120.0

JSON_TYPE = b"application/json"
EVENT_STREAM_TYPE = b"text/event-stream; charset=utf-8"


class ClientGone(Exception):
    """The client has hung up; there is nobody to answer."""


class Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, arrival: float) -> None:
        """``arrival`` is in seconds since the epoch."""
        self.scope = scope
        self.arrival = arrival
        self.started = False
        """Whether the status line has been sent."""
        self.ended = False
        self.extra_headers: Headers = []
        self.writing_since: float | None = None
        self._receive = receive
        self._send = send
        self._body_read = False

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    async def body(self, limit: int) -> bytearray:
        """The whole body. Raises ``BodyTooLarge`` as soon as it must exceed ``limit`` bytes."""
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit:
            raise self._too_large(limit)
        body = bytearray()
        while True:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    message = await self._receive()
            except TimeoutError:
                raise RequestTimeout(
                    f"The request body did not arrive: {BODY_TIMEOUT_S:.0f} s without a byte."
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > limit:
                raise self._too_large(limit)
            if not message.get("more_body", False):
                self._body_read = True
                return body

    @staticmethod
    def _too_large(limit: int) -> BodyTooLarge:
        return BodyTooLarge(f"The request body is larger than {limit} bytes.")

    async def respond(
        self,
        status: int,
        body: bytes,
        content_type: bytes = JSON_TYPE,
        headers: Sequence[Header] = (),
    ) -> None:
        """Send a whole answer. A body that was not read is dropped, then the connection closed."""
        unread = not self._body_read and self._expects_body()
        head = [
            (b"content-type", content_type),
            (b"content-length", str(len(body)).encode()),
            *headers,
            *self.extra_headers,
        ]
        if unread:
            head.append((b"connection", b"close"))
        self.started = self.ended = True
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body, "more_body": unread})
        if unread:
            await self._discard()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def respond_json(self, status: int, value: Any, headers: Sequence[Header] = ()) -> None:
        await self.respond(status, msgspec.json.encode(value), headers=headers)

    def _expects_body(self) -> bool:
        length = self.header(b"content-length")
        return self.header(b"transfer-encoding") is not None or (
            length is not None and length != b"0"
        )

    async def _discard(self) -> None:
        left = DISCARD_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while left > 0:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body"):
                        return
                    left -= len(message.get("body", b""))

    async def start_stream(self, headers: Sequence[Header] = ()) -> None:
        self.started = True
        head = [
            (b"content-type", EVENT_STREAM_TYPE),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *headers,
            *self.extra_headers,
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": head})

    async def write(self, chunk: bytes) -> None:
        self.writing_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        self.writing_since = None

    async def end_stream(self, chunk: bytes = b"") -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})

    @contextlib.asynccontextmanager
    async def until_client_leaves(self) -> AsyncIterator[None]:
        """Cancel the block when the client hangs up, and raise ``ClientGone`` from it.

        To be entered after the body was read. One small task a request, none a token.
        """
        task = asyncio.current_task()
        assert task is not None
        left = False

        def leave(watcher: asyncio.Task[None]) -> None:
            nonlocal left
            if not watcher.cancelled():
                left = True
                task.cancel()

        watcher = asyncio.create_task(self._wait_for_disconnect())
        watcher.add_done_callback(leave)
        try:
            yield
        except asyncio.CancelledError:
            if left and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            watcher.remove_done_callback(leave)
            watcher.cancel()

    async def _wait_for_disconnect(self) -> None:
        """Returns when the client has hung up, or takes nothing of what is written for it."""
        while True:
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S / 4):
                    message = await self._receive()
            except TimeoutError:
                since = self.writing_since
                if since is not None and time.monotonic() - since > WRITE_TIMEOUT_S:
                    return
                continue
            if message["type"] == "http.disconnect":
                return


def check_content_type(exchange: Exchange) -> None:
    """JSON, or nothing said (as ``curl -d`` and old clients do it)."""
    value = exchange.header(b"content-type")
    if value is None:
        return
    kind = value.split(b";")[0].strip().lower()
    if kind.startswith((b"multipart/", b"audio/", b"image/", b"video/")):
        raise InvalidRequest("The content type must be application/json.")
