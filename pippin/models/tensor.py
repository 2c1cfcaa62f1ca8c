"""A dense weight as it lies in a checkpoint: numpy only, usually a view of a mapped file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
DenseDType = Literal[
    "float32", "float16", "bfloat16", "float64", "float8_e4m3", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
]  # fmt: skip

_FLOATS = ("float32", "float16", "float64")


@dataclass(frozen=True, slots=True, eq=False)
class DenseTensor:
    """An array with the type that numpy cannot name.

    ``data`` holds bfloat16 as uint16 bits and fp8 as uint8 bits, everything else as itself. It may
    be a read-only view of a mapped file: copy before writing.
    """

    data: NDArray[Any]
    dtype: DenseDType

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def to_float32(self) -> FloatArray:
        """The values as float32, of the same shape (a view where they already are)."""
        if self.dtype == "bfloat16":
            wide: FloatArray = (self.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
            return wide
        if self.dtype in ("float8_e4m3", "float8_e5m2"):
            return np.asarray(_fp8_table(self.dtype)[self.data], dtype=np.float32)
        return np.asarray(self.data, dtype=np.float32)

    def rows(self, start: int, stop: int) -> DenseTensor:
        """``[start, stop)`` of the first axis, as a view."""
        return DenseTensor(self.data[start:stop], self.dtype)

    def cut(self, start: int, stop: int) -> DenseTensor:
        """``[start, stop)`` of the last axis, as a view."""
        return DenseTensor(self.data[..., start:stop], self.dtype)

    def take_rows(self, index: NDArray[np.intp]) -> DenseTensor:
        """Rows of the first axis in the order of ``index``, as a copy."""
        return DenseTensor(self.data[index], self.dtype)


def bfloat16_bits(values: FloatArray) -> NDArray[np.uint16]:
    """Round float32 to the nearest bfloat16 (ties to even) and return its bits. NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _fp8_table(dtype: str) -> FloatArray:
    """The 256 values of an fp8 type (OCP FP8: e4m3fn has no infinities, e5m2 does)."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if dtype == "float8_e4m3" else (5, 2, 15)
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    normal = (1 + fraction) * np.exp2(exponent - bias)
    table = sign * np.where(exponent == 0, fraction * np.exp2(1 - bias), normal)
    if dtype == "float8_e4m3":
        table[(code & 0x7F) == 0x7F] = np.nan
    else:
        top = exponent == 31
        table[top] = np.where(mantissa[top] == 0, sign[top] * np.inf, np.nan)
    return np.asarray(table, dtype=np.float32)
