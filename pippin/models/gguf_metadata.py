"""The header of a GGUF file, read without numpy and without touching the tensors' data.

``gguf.GGUFReader`` makes numpy views of every string (seconds for a vocabulary); the API process
needs the tokenizer only, within milliseconds.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pippin.errors import ModelInvalid, UnsupportedModel

_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MAX_NESTING = _MAX_DIMS = 4

MAGIC = b"GGUF"
REFETCH = "fetch the file again, or compare its size and checksum with the source's"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    name: str
    kind: int
    """GGML's number of its type."""
    shape: tuple[int, ...]
    """Row-major, as in numpy: [out, in] for a linear's weight (GGUF itself lists it reversed)."""
    offset: int
    """Bytes from the start of the data section."""


@dataclass(frozen=True, slots=True)
class Header:
    metadata: dict[str, Any]
    """Scalars, strings and lists (arrays) of them."""
    tensors: list[TensorHeader]
    nbytes: int
    """Length of the header; the data section starts at the next multiple of the alignment."""


def read_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs. Raises as ``map_file`` and ``read_header`` do."""
    with map_file(path) as data:
        return read_header(data, path).metadata


def map_file(path: Path) -> mmap.mmap:
    """Map a GGUF file. Raises ``ModelInvalid`` for another file or an unreadable one."""
    try:
        with path.open("rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                raise ModelInvalid(
                    f"{path} is not a GGUF file: it does not begin with 'GGUF'", hint=REFETCH
                )
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelInvalid(f"cannot read {path}: {error.strerror}") from error


def read_header(data: mmap.mmap, path: Path) -> Header:
    """Everything before the tensors' data.

    Raises ``ModelInvalid`` for a header that is damaged or ends too early, ``UnsupportedModel`` for
    versions other than 2 and 3 and for big-endian files. ``path`` is for the messages.
    """
    try:
        return _Cursor(data, len(MAGIC)).header(path)
    except (struct.error, IndexError, OverflowError) as error:
        raise ModelInvalid(
            f"{path} is truncated or damaged: its header cannot be read ({len(data)} bytes)",
            hint=REFETCH,
        ) from error


class _Cursor:
    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data = data
        self.position = position

    def header(self, path: Path) -> Header:
        version = self._number(_U32)
        if version not in (2, 3):
            big_endian = version & 0xFFFF == 0
            raise UnsupportedModel(
                f"{path}: GGUF {'big-endian' if big_endian else f'version {version}'} is not"
                " supported (versions 2 and 3, little-endian, are)",
                hint="convert the model with a present llama.cpp, or choose another file",
            )
        num_tensors, num_pairs = self._number(_U64), self._number(_U64)
        if max(num_tensors, num_pairs) > len(self.data):
            raise IndexError
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            metadata[key] = self._value(self._number(_U32), 0)
        tensors = [self._tensor() for _ in range(num_tensors)]
        return Header(metadata, tensors, self.position)

    def _tensor(self) -> TensorHeader:
        name = self._string()
        num_dims = self._number(_U32)
        if not 0 < num_dims <= _MAX_DIMS:
            raise IndexError
        shape = tuple(self._number(_U64) for _ in range(num_dims))
        return TensorHeader(name, self._number(_U32), shape[::-1], self._number(_U64))

    def _number(self, layout: struct.Struct) -> Any:
        value = layout.unpack_from(self.data, self.position)[0]
        self.position += layout.size
        return value

    def _string(self) -> str:
        start = self.position + 8
        end = start + _U64.unpack_from(self.data, self.position)[0]
        if end > len(self.data):
            raise IndexError
        self.position = end
        return self.data[start:end].decode("utf-8", "replace")

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise IndexError
            return self._number(_SCALARS[kind])
        inner = self._number(_U32)
        count = self._number(_U64)
        if depth >= _MAX_NESTING or count > len(self.data):
            raise IndexError
        if inner in _SCALARS:
            layout = struct.Struct(f"<{count}{_SCALARS[inner].format[1:]}")
            values = layout.unpack_from(self.data, self.position)
            self.position += layout.size
            return list(values)
        if inner == _STRING:
            return self._strings(count)
        return [self._value(inner, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """As ``_string``, ``count`` times; a vocabulary has hundreds of thousands."""
        data, end, size = self.data, self.position, len(self.data)
        length_at = _U64.unpack_from
        values = []
        for _ in range(count):
            start = end + 8
            end = start + length_at(data, end)[0]
            if end > size:
                raise IndexError
            values.append(data[start:end].decode("utf-8", "replace"))
        self.position = end
        return values
