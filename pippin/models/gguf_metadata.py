"""The key-value part of a GGUF file, read without numpy and without touching the tensors.

``gguf.GGUFReader`` makes numpy views of every string (seconds for a vocabulary); the API process
needs the tokenizer only, within milliseconds.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
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
_MAX_NESTING = 4

_HINT = "download or convert the file again"


def read_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs: scalars, strings and lists (arrays) of them.

    Raises ``ModelInvalid`` for a file that is not GGUF or ends too early, ``UnsupportedModel`` for
    version 1 and for big-endian files.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelInvalid(f"{path} is not a GGUF file", hint=_HINT)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(data, 4).header(path)
    except OSError as error:
        raise ModelInvalid(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, IndexError, OverflowError) as error:
        raise ModelInvalid(f"{path} is truncated or damaged (metadata)", hint=_HINT) from error


class _Cursor:
    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data = data
        self.position = position

    def header(self, path: Path) -> dict[str, Any]:
        version = self._number(_U32)
        if version & 0xFFFF == 0:
            raise UnsupportedModel(f"{path} is a big-endian GGUF file")
        if version < 2:
            raise UnsupportedModel(f"{path} is GGUF version {version}; versions 2 and 3 are read")
        self._number(_U64)  # tensors
        pairs = self._number(_U64)
        if pairs > len(self.data):
            raise IndexError
        values: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            values[key] = self._value(self._number(_U32), 0)
        return values

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
