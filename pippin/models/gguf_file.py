"""The GGUF container: metadata and where each tensor's bytes lie. Version 2 and 3, little-endian.

Read from https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf library's own reader
makes two arrays for every token of a vocabulary (seconds for the demo model) and fails with
library-internal exceptions on damaged files; this one reads straight from a mapped file.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from pippin.errors import ModelInvalid, UnsupportedModel

MAGIC = b"GGUF"
_SPLIT = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_SCALARS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_REFETCH = "fetch the file again, or compare its size and checksum with the source's"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """Row-major, as in numpy: [out, in] for a linear's weight (GGUF itself lists it reversed)."""
    offset: int
    """Bytes from the start of the file."""
    nbytes: int
    file: GgufFile

    def raw(self) -> NDArray[np.uint8]:
        """The bytes, [..., bytes of a row], as a view of the mapped file."""
        block, size = GGML_QUANT_SIZES[self.kind]
        flat = np.frombuffer(self.file.buffer, np.uint8, self.nbytes, self.offset)
        return flat.reshape(*self.shape[:-1], self.shape[-1] // block * size)


class GgufFile:
    """One GGUF file, mapped. Raises ``ModelInvalid`` if it is damaged or cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as stream:
            if stream.read(4) != MAGIC:
                raise ModelInvalid(
                    f"{path} is not a GGUF file: it does not begin with 'GGUF'", hint=_REFETCH
                )
            self.buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self.buffer, path)
        cursor.at = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            swapped = struct.unpack(">I", struct.pack("<I", version))[0]
            what = "big-endian" if swapped in (2, 3) else f"version {version}"
            raise UnsupportedModel(
                f"{path}: GGUF {what} is not supported (versions 2 and 3, little-endian, are)",
                hint="convert the model with a present llama.cpp, or choose another file",
            )
        num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        headers = [_tensor_header(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelInvalid(f"{path}: general.alignment is {alignment!r}", hint=_REFETCH)
        self.header_bytes = cursor.at
        start = (cursor.at + alignment - 1) // alignment * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in headers:
            if name in self.tensors:
                raise ModelInvalid(f"{path}: tensor {name!r} appears twice", hint=_REFETCH)
            self.tensors[name] = self._locate(name, kind, shape, start + offset)

    def _locate(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> GgufTensor:
        try:
            known = GGMLQuantizationType(kind)
        except ValueError as error:
            raise UnsupportedModel(
                f"{self.path}: tensor {name!r} has type {kind}, unknown to the gguf library",
                hint="pip install --upgrade gguf",
            ) from error
        block, size = GGML_QUANT_SIZES[known]
        if shape[-1] % block:
            raise ModelInvalid(
                f"{self.path}: rows of {name!r} ({shape[-1]}) are not whole blocks of {block}",
                hint=_REFETCH,
            )
        count = 1
        for length in shape:
            count *= length
        nbytes = count // block * size
        if offset + nbytes > len(self.buffer):
            raise ModelInvalid(
                f"{self.path} is truncated: tensor {name!r} ends at byte {offset + nbytes},"
                f" the file at {len(self.buffer)}",
                hint=_REFETCH,
            )
        return GgufTensor(name, known, shape, offset, nbytes, self)


def split_files(path: Path) -> list[Path]:
    """All parts of a model that is split as ``name-00001-of-00003.gguf``, in order; else itself.

    Raises ``ModelInvalid`` naming a missing part.
    """
    match = _SPLIT.match(path.name)
    if match is None:
        return [path]
    stem, count = match["stem"], int(match["count"])
    parts = [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelInvalid(
            f"{path.parent}: {len(missing)} of {count} parts are missing, first {missing[0]}",
            hint="fetch all parts of the split model into one directory",
        )
    return parts


def _tensor_header(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name = cursor.string()
    num_dims = cursor.scalar("I")
    if not 0 < num_dims <= 4:
        raise ModelInvalid(
            f"{cursor.path}: tensor {name!r} has {num_dims} dimensions", hint=_REFETCH
        )
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))
    return name, cursor.scalar("I"), shape[::-1], cursor.scalar("Q")


class _Cursor:
    """Reads values one after another; running past the end is a truncated file."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer = buffer
        self.path = path
        self.at = 0

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self.check(size)
        value = struct.unpack_from("<" + code, self.buffer, self.at)[0]
        self.at += size
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        self.check(length)
        raw = self.buffer[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            # Each item takes a byte at least: a damaged count must not start a huge loop.
            self.check(count)
            if item in _SCALARS:
                return self.scalars(_SCALARS[GGUFValueType(item)], count)
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelInvalid(f"{self.path}: unknown metadata type {kind}", hint=_REFETCH)
        return self.scalar(_SCALARS[GGUFValueType(kind)])

    def scalars(self, code: str, count: int) -> list[Any]:
        size = struct.calcsize("<" + code) * count
        self.check(size)
        values = np.frombuffer(self.buffer, np.dtype("<" + code), count, self.at).tolist()
        self.at += size
        return list(values)

    def check(self, size: int) -> None:
        if self.at + size > len(self.buffer):
            raise ModelInvalid(
                f"{self.path} is truncated: its header goes beyond the end at byte"
                f" {len(self.buffer)}",
                hint=_REFETCH,
            )
