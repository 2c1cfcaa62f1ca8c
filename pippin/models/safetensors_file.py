"""One safetensors file, mapped. Layout: https://huggingface.co/docs/safetensors (Format)."""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pippin.errors import ModelInvalid, UnsupportedModel
from pippin.models.tensor import DenseDType, DenseTensor

_DTYPES: dict[str, tuple[DenseDType, str]] = {
    "F64": ("float64", "<f8"),
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16", "<u2"),
    "F8_E4M3": ("float8_e4m3", "u1"),
    "F8_E5M2": ("float8_e5m2", "u1"),
    "I64": ("int64", "<i8"),
    "I32": ("int32", "<i4"),
    "I16": ("int16", "<i2"),
    "I8": ("int8", "i1"),
    "U64": ("uint64", "<u8"),
    "U32": ("uint32", "<u4"),
    "U16": ("uint16", "<u2"),
    "U8": ("uint8", "u1"),
    "BOOL": ("bool", "?"),
}
_REFETCH = "fetch the file again, or compare its size and checksum with the source's"
_LFS = b"version https://git-lfs"
_MAX_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies."""

    dtype: DenseDType
    layout: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


class SafetensorsFile:
    """Header and mapped data. Raises ``ModelInvalid`` if damaged or cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        if self.size < 8:
            raise ModelInvalid(f"{path} is truncated: it has {self.size} bytes", hint=_REFETCH)
        with path.open("rb") as stream:
            self._buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        if self._buffer[: len(_LFS)] == _LFS:
            raise ModelInvalid(
                f"{path} is a Git LFS pointer, not the weights", hint="git lfs pull fetches them"
            )
        length = int.from_bytes(self._buffer[:8], "little")
        if length > _MAX_HEADER:
            raise ModelInvalid(
                f"{path} is not a safetensors file: its header would have {length} bytes",
                hint=_REFETCH,
            )
        if 8 + length > self.size:
            raise ModelInvalid(
                f"{path} is truncated: its header ends at byte {8 + length}, the file at"
                f" {self.size}",
                hint=_REFETCH,
            )
        header = self._parse(self._buffer[8 : 8 + length])
        header.pop("__metadata__", None)
        self.entries = {name: self._entry(name, 8 + length, v) for name, v in header.items()}

    def tensor(self, name: str) -> DenseTensor:
        """A view of the mapped file. Raises ``KeyError``."""
        entry = self.entries[name]
        if entry.nbytes == 0:
            return DenseTensor(np.empty(entry.shape, entry.layout), entry.dtype)
        count = entry.nbytes // np.dtype(entry.layout).itemsize
        flat = np.frombuffer(self._buffer, entry.layout, count, entry.offset)
        return DenseTensor(flat.reshape(entry.shape), entry.dtype)

    def _parse(self, raw: bytes) -> dict[str, Any]:
        try:
            header = json.loads(raw)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ModelInvalid(
                f"{self.path}: its safetensors header is corrupt", hint=_REFETCH
            ) from error
        if not isinstance(header, dict):
            raise ModelInvalid(f"{self.path}: its safetensors header is corrupt", hint=_REFETCH)
        return header

    def _entry(self, name: str, base: int, value: Any) -> Entry:
        match value:
            case {
                "dtype": str(dtype),
                "shape": list(shape),
                "data_offsets": [int(start), int(stop)],
            }:
                pass
            case _:
                raise ModelInvalid(
                    f"{self.path}: the header's entry of {name!r} is corrupt", hint=_REFETCH
                )
        if dtype not in _DTYPES:
            raise UnsupportedModel(
                f"{self.path}: tensor {name!r} has type {dtype}, which is not supported",
                hint=f"supported: {', '.join(_DTYPES)}",
            )
        kind, layout = _DTYPES[dtype]
        if not all(isinstance(length, int) and length >= 0 for length in shape):
            raise ModelInvalid(f"{self.path}: shape of {name!r} is {shape}", hint=_REFETCH)
        nbytes = np.dtype(layout).itemsize
        for length in shape:
            nbytes *= length
        if start < 0 or stop - start != nbytes:
            raise ModelInvalid(
                f"{self.path}: tensor {name!r} has {stop - start} bytes for shape {shape} of"
                f" {dtype}",
                hint=_REFETCH,
            )
        if base + stop > self.size:
            raise ModelInvalid(
                f"{self.path} is truncated: tensor {name!r} ends at byte {base + stop}, the file"
                f" at {self.size}",
                hint=_REFETCH,
            )
        return Entry(kind, layout, tuple(shape), base + start, nbytes)
