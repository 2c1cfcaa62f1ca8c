"""What travels on a link, as bytes. Pure: no sockets, no time.

A message is one or more pairs of frames ``(head, body)``. The head is ``PPN``, the protocol's
number as one byte, and a msgpack ``Header``. Hidden states above ``PART_BYTES`` are cut into parts,
each a pair of its own, so that one part is encrypted while another is on the wire and a third
decrypted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

import msgspec

from pippin.errors import ProtocolError
from pippin.types.stage import PROTOCOL
from pippin.types.step import StepPlan

#: Largest part of a tensor in bytes.
PART_BYTES = 2**20
#: Largest body of any other message, and of a whole tensor.
MAX_BODY_BYTES = 2**24
MAX_TENSOR_BYTES = 2**31
#: Bytes of an element of the hidden states that may travel.
ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}

#: Bodies up to this size are copied out of the socket's buffer, where they may lie unaligned.
_COPY_BYTES = 16_384

_MAGIC = b"PPN"
_PREFIX = _MAGIC + bytes([PROTOCOL])

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    # before work
    ANNOUNCE = 1
    ACCEPT = 2
    REFUSE = 3
    # work, in order
    PLAN = 4
    HIDDEN = 5
    CONTROL = 6
    STOP = 7
    # of the link itself
    PING = 8
    PONG = 9
    CREDIT = 10
    BYE = 11


_Natural = Annotated[int, msgspec.Meta(ge=0)]


class Header(msgspec.Struct, frozen=True, array_like=True):
    kind: Kind
    step: int = 0
    dtype: str = ""
    shape: tuple[_Natural, ...] = ()
    offset: _Natural = 0
    """Bytes of the tensor before this part."""
    total: _Natural = 0
    """Bytes of the whole tensor. Of a CREDIT: cost of all messages read so far."""
    seconds: float = 0.0
    """PLAN and HIDDEN: as the sender set it. PING and its PONG: the asking end's clock."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A step to run."""

    plan: StepPlan
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states after a stage's layers."""

    step: int
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``, little endian."""
    shape: tuple[int, int]
    """[tokens, hidden size]"""
    data: memoryview
    """C-contiguous. Handed over: the sender must not write to it any more."""
    seconds: float = 0.0
    """What the sender wants to tell of its time; the link does not look at it."""


@dataclass(frozen=True, slots=True)
class Control:
    """Whatever the engine's start-up has to say. Steps may count from anywhere after it."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Stop:
    """The last message: the sender leaves on purpose."""

    reason: str


Message = Plan | Hidden | Control | Stop

_encoder = msgspec.msgpack.Encoder()
_headers = msgspec.msgpack.Decoder(Header)
_plans = msgspec.msgpack.Decoder(StepPlan)


def encode_head(header: Header) -> bytes:
    return _PREFIX + _encoder.encode(header)


def protocol_of(head: bytes | memoryview) -> int | None:
    """The link protocol a frame is of, None if it is not Pippin's at all."""
    start = bytes(head[: len(_PREFIX)])
    return start[-1] if len(start) == len(_PREFIX) and start.startswith(_MAGIC) else None


def decode_head(head: bytes | memoryview) -> Header:
    """Raises ``ProtocolError`` for anything but a header of this protocol."""
    theirs = protocol_of(head)
    if theirs is None:
        raise ProtocolError("received a frame that is not of Pippin's links")
    if theirs != PROTOCOL:
        raise ProtocolError(
            f"the peer speaks link protocol {theirs}, this is {PROTOCOL}",
            hint="install the same Pippin on both machines",
        )
    try:
        return _headers.decode(head[len(_PREFIX) :])
    except msgspec.DecodeError as error:
        raise ProtocolError(f"received a broken header: {error}") from error


def encode(message: Message) -> Iterator[tuple[bytes, Buffer]]:
    """The frame pairs of a message. Raises ``ValueError`` for one that must not be sent."""
    match message:
        case Plan(plan, seconds):
            header = Header(Kind.PLAN, plan.step, seconds=seconds)
            yield encode_head(header), _bounded(_encoder.encode(plan))
        case Control(body):
            yield encode_head(Header(Kind.CONTROL)), _bounded(body)
        case Stop(reason):
            yield encode_head(Header(Kind.STOP)), _bounded(reason.encode())
        case Hidden():
            yield from _encode_tensor(message)


def _bounded(body: bytes) -> bytes:
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; the limit is {MAX_BODY_BYTES}")
    return body


def _encode_tensor(hidden: Hidden) -> Iterator[tuple[bytes, Buffer]]:
    data = (
        hidden.data.cast("B") if hidden.data.format != "B" or hidden.data.ndim != 1 else hidden.data
    )
    wrong = _tensor_fault(hidden.dtype, hidden.shape, data.nbytes)
    if wrong is not None:
        raise ValueError(wrong)
    for offset in range(0, max(data.nbytes, 1), PART_BYTES):
        header = Header(
            Kind.HIDDEN,
            hidden.step,
            hidden.dtype,
            hidden.shape,
            offset,
            data.nbytes,
            hidden.seconds,
        )
        yield encode_head(header), data[offset : offset + PART_BYTES]


def _tensor_fault(dtype: str, shape: tuple[int, ...], total: int) -> str | None:
    size = ITEM_SIZES.get(dtype)
    if size is None:
        return f"hidden states of dtype {dtype!r}; known are {', '.join(ITEM_SIZES)}"
    if len(shape) != 2:
        return f"hidden states of shape {shape}, not [tokens, hidden size]"
    if total != math.prod(shape) * size:
        return f"{total} bytes of hidden states for {dtype} of shape {shape}"
    if total > MAX_TENSOR_BYTES:
        return f"{total} bytes of hidden states; the limit is {MAX_TENSOR_BYTES}"
    return None


class Assembler:
    """Turns checked frame pairs into messages, in order. One for each direction of a link.

    After ``expect``, hidden states must have the dtype and hidden size that the peer announced.
    """

    def __init__(self) -> None:
        self._dtype: str | None = None
        self._hidden_size: int | None = None
        self._last_plan: int | None = None
        self._last_hidden: int | None = None
        self._first: Header | None = None
        """Header of the first part of a tensor that is not whole yet."""
        self._buffer = bytearray()
        self._filled = 0

    def expect(self, dtype: str, hidden_size: int) -> None:
        self._dtype = dtype
        self._hidden_size = hidden_size

    def feed(self, header: Header, body: bytes | memoryview) -> Message | None:
        """The message that these frames complete, None inside a tensor of several parts.

        ``body`` may be kept (zero-copy). Raises ``ProtocolError``.
        """
        if self._first is not None and header.kind is not Kind.HIDDEN:
            raise ProtocolError(f"{header.kind.name} inside the hidden states of a step")
        match header.kind:
            case Kind.HIDDEN:
                return self._feed_tensor(header, memoryview(body))
            case Kind.PLAN:
                return self._plan(header, body)
            case Kind.CONTROL:
                self._last_plan = self._last_hidden = None
                return Control(bytes(body))
            case Kind.STOP:
                return Stop(bytes(body).decode(errors="replace"))
            case _:
                raise ProtocolError(f"unexpected {header.kind.name} message")

    def _plan(self, header: Header, body: bytes | memoryview) -> Plan:
        try:
            plan = _plans.decode(body)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"received a broken plan: {error}") from error
        if plan.step != header.step:
            raise ProtocolError(f"a header of step {header.step} with a plan of step {plan.step}")
        self._last_plan = _next_step("plan", self._last_plan, plan.step)
        return Plan(plan, header.seconds)

    def _feed_tensor(self, header: Header, body: memoryview) -> Hidden | None:
        if self._first is None:
            self._check_first(header)
            if body.nbytes == header.total:
                data = memoryview(bytearray(body)) if body.nbytes <= _COPY_BYTES else body
                return _hidden(header, data)
            self._first = header
            self._buffer = bytearray(header.total)
            self._filled = 0
        first = self._first
        if header != msgspec.structs.replace(first, offset=self._filled):
            raise ProtocolError(
                f"step {first.step}: expected the part of its hidden states at byte"
                f" {self._filled}, received {header}"
            )
        end = self._filled + body.nbytes
        if body.nbytes == 0 or end > first.total:
            raise ProtocolError(
                f"step {first.step}: a part of {body.nbytes} bytes at byte {self._filled}"
                f" of {first.total}"
            )
        self._buffer[self._filled : end] = body
        self._filled = end
        if end < first.total:
            return None
        self._first = None
        return _hidden(first, memoryview(self._buffer))

    def _check_first(self, header: Header) -> None:
        wrong = _tensor_fault(header.dtype, header.shape, header.total)
        if wrong is None and self._dtype is not None and header.dtype != self._dtype:
            wrong = f"hidden states in {header.dtype}; the peer announced {self._dtype}"
        if wrong is None and self._hidden_size is not None and header.shape[1] != self._hidden_size:
            wrong = f"hidden states of width {header.shape[1]}; the model has {self._hidden_size}"
        if wrong is None and header.offset != 0:
            wrong = f"hidden states that begin at byte {header.offset}"
        if wrong is not None:
            raise ProtocolError(f"step {header.step}: {wrong}")
        self._last_hidden = _next_step("hidden states", self._last_hidden, header.step)


def _hidden(header: Header, data: memoryview) -> Hidden:
    tokens, width = header.shape
    return Hidden(header.step, header.dtype, (tokens, width), data, header.seconds)


def _next_step(what: str, last: int | None, step: int) -> int:
    if last is not None and step <= last:
        raise ProtocolError(f"{what} of step {step} after those of step {last}")
    return step
