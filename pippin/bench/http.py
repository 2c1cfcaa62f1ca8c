"""A streaming HTTP/1.1 client that costs little: it shares the machine with the server it measures.

One connection a request, parsed as bytes arrive, no task per chunk.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pippin.bench.metrics import Record
from pippin.errors import ConfigError, EngineUnavailable

_LARGEST_HEAD = 64 * 1024


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    tls: bool
    prefix: str
    """Path before the endpoint's own, without a slash at its end."""
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Target:
        """Raises ``ConfigError`` for anything but ``http(s)://host[:port][/path]``."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url} is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url} is not a URL", hint="give it as http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        return cls(
            parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"), api_key
        )

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{self.prefix}"

    def head(self, method: str, path: str, length: int) -> bytes:
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Accept: text/event-stream, application/json",
            "Content-Type: application/json",
            f"Content-Length: {length}",
            "Connection: close",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class _Body:
    """Takes the bytes of one response apart."""

    __slots__ = ("_buffer", "_left", "_skip", "chunked", "complete", "length", "status")

    def __init__(self) -> None:
        self._buffer = b""
        self.status: int | None = None
        self.chunked = False
        self.length: int | None = None
        self.complete = False
        # Bytes missing of a chunked body's current chunk, and of the line end behind it.
        self._left = 0
        self._skip = 0

    def feed(self, data: bytes) -> bytes:
        """Body bytes in ``data``. Raises ``ValueError`` for what is not HTTP."""
        if self.status is None:
            self._buffer += data
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _LARGEST_HEAD:
                    raise ValueError("the answer's head is too long")
                return b""
            self._read_head(self._buffer[:end])
            data, self._buffer = self._buffer[end + 4 :], b""
        if self.chunked:
            return self._unchunk(data)
        if self.length is not None:
            self.length -= len(data)
            self.complete = self.length <= 0
        return data

    def _read_head(self, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/"):
            raise ValueError("the answer is not HTTP")
        self.status = int(rest[:3])
        for line in lines[1:]:
            name, _, value = line.partition(":")
            match name.strip().lower():
                case "transfer-encoding":
                    self.chunked = "chunked" in value.lower()
                case "content-length":
                    self.length = int(value)
                case _:
                    pass
        if self.length == 0 and not self.chunked:
            self.complete = True

    def _unchunk(self, data: bytes) -> bytes:
        data = self._buffer + data
        self._buffer = b""
        parts = []
        while data:
            if self._left:
                taken = data[: self._left]
                parts.append(taken)
                data = data[len(taken) :]
                self._left -= len(taken)
                self._skip = 0 if self._left else 2
            elif self._skip:
                skipped = min(self._skip, len(data))
                data = data[skipped:]
                self._skip -= skipped
            else:
                size, found, rest = data.partition(b"\r\n")
                if not found:
                    self._buffer = data
                    break
                self._left = int(size.split(b";")[0], 16)
                if not self._left:
                    self.complete = True
                    break
                data = rest
        return b"".join(parts)


class _Exchange(asyncio.Protocol):
    """One request and its answer, read into a record."""

    def __init__(self, request: bytes, record: Record, keep_text: bool) -> None:
        self._request = request
        self._record = record
        self._keep_text = keep_text
        self._body = _Body()
        self._rest = b""
        self._text: list[str] = []
        self._seen_choice = False
        self._seen_done = False
        self._transport: asyncio.BaseTransport | None = None
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        try:
            body = self._body.feed(data)
            if self._body.status == 200:
                self._read_events(body, now)
            else:
                self._rest += body
        except (ValueError, msgspec.DecodeError) as error:
            self._finish(f"unreadable answer: {error}")
            return
        if self._body.complete:
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        ended = self._body.status is not None and not self._body.chunked
        complete = self._body.complete or self._seen_done or (ended and self._body.length is None)
        self._finish(None if complete else f"connection lost: {exc or 'closed by the server'}")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _read_events(self, data: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self._seen_done = True
                continue
            self._read_event(_decode(payload), now)

    def _read_event(self, event: _Event, now: float) -> None:
        record = self._record
        if event.error is not None:
            record.error = record.error or f"error in the stream: {event.error}"
        if event.usage is not None:
            record.usage_prompt_tokens = event.usage.prompt_tokens
            record.usage_completion_tokens = event.usage.completion_tokens
        if not event.choices:
            return
        self._seen_choice = True
        record.end = now
        choice = event.choices[0]
        delta = choice.delta
        text = choice.text or (
            delta and (delta.content or delta.reasoning_content or delta.reasoning)
        )
        if text:
            record.chunk_times.append(now)
            if self._keep_text:
                self._text.append(text)

    def _finish(self, error: str | None) -> None:
        if self.finished.done():
            return
        record = self._record
        status = self._body.status
        if error is None and status is not None and status != 200:
            error = f"HTTP {status}: {self._rest[:500].decode('utf-8', 'replace')}"
        if error is None and not self._seen_choice:
            error = "the answer is not a stream of choices"
        record.error = record.error or error
        record.end = record.end or time.perf_counter()
        record.text = "".join(self._text)
        self.finished.set_result(None)
        self.close()


async def stream(
    target: Target,
    path: str,
    body: bytes,
    *,
    prompt_len: int,
    timeout: float,
    keep_text: bool = False,
) -> Record:
    """Post ``body`` and read the stream of events. Failures are in the record, not raised.

    ``timeout``: seconds for the whole request.
    """
    record = Record(prompt_len, start=time.perf_counter())
    exchange = _Exchange(target.head("POST", path, len(body)) + body, record, keep_text)
    try:
        async with asyncio.timeout(timeout):
            await _connect(target, exchange)
            await exchange.finished
    except TimeoutError:
        record.error = f"no complete answer within {timeout:g} s"
    except OSError as error:
        record.error = f"cannot connect to {target.url}: {error.strerror or error}"
    finally:
        exchange.close()
    record.end = record.end or time.perf_counter()
    return record


async def get_json(target: Target, path: str, timeout: float) -> Any:
    """A GET's answer. Raises ``EngineUnavailable`` if there is none."""
    context = ssl.create_default_context() if target.tls else None
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(target.host, target.port, ssl=context)
            writer.write(target.head("GET", path, 0))
            body = _Body()
            content = b""
            while not body.complete and (data := await reader.read(65536)):
                content += body.feed(data)
            writer.close()
        if body.status != 200:
            raise ValueError(f"HTTP {body.status}")
        return msgspec.json.decode(content)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise EngineUnavailable(
            f"no answer from {target.url}{path}: {reason or type(error).__name__}",
            hint="start one with: pippin serve demo",
        ) from error


async def _connect(target: Target, exchange: _Exchange) -> None:
    context = ssl.create_default_context() if target.tls else None
    await asyncio.get_running_loop().create_connection(
        lambda: exchange, target.host, target.port, ssl=context
    )
