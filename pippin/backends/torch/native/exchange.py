"""A rank's end of memory that the ranks of one host share: see ``reduce.cpp``."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from typing import Any

import torch

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_COUNTERS = 4096
_LINE = 128

#: Most ranks whose counters have a place.
MOST_RANKS = _COUNTERS // _LINE


class _Struct(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("rank", "size", "capacity")),
        ("shared", c_void_p),
        *((name, c_int64) for name in ("turn", "done", "published")),
    ]  # fmt: skip


def region_bytes(size: int, capacity: int) -> int:
    """Of the shared memory for ``size`` ranks with buffers of ``capacity`` bytes."""
    return _COUNTERS + 2 * size * capacity


class Exchange:
    """Calls return -1 when done, or a rank that did not come within ``patience`` ns: the same call
    again, with the same arguments, goes on waiting."""

    def __init__(
        self, library: ctypes.CDLL, rank: int, size: int, capacity: int, shared: int
    ) -> None:
        """``shared``: address of ``region_bytes`` zero bytes, the same memory on every rank."""
        self._struct = _Struct(rank=rank, size=size, capacity=capacity, shared=shared)
        self._pointer = ctypes.addressof(self._struct)
        self._reduce = library.pippin_reduce
        self._reduce.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64]
        self._reduce.restype = c_int64
        self._gather = library.pippin_gather
        self._gather.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64]
        self._gather.restype = c_int64

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether ``reduce`` adds numbers of this type."""
        return dtype in _DTYPES

    def reduce(
        self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, patience: int
    ) -> int:
        """``out`` = sum of all ranks' ``x`` (+ ``residual``), all contiguous, of one shape and
        dtype; ``out`` may be one of the others."""
        missing: int = self._reduce(
            self._pointer,
            _DTYPES[x.dtype],
            x.data_ptr(),
            x.numel(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            patience,
        )
        return missing

    def gather(
        self, part: torch.Tensor, widths: Any, out: torch.Tensor | None, patience: int
    ) -> int:
        """``part`` [rows, columns of this rank] of every rank, side by side into rank 0's ``out``.
        ``widths``: a ctypes array of int64, the bytes of each rank's columns."""
        missing: int = self._gather(
            self._pointer,
            part.data_ptr(),
            part.shape[0],
            ctypes.addressof(widths),
            None if out is None else out.data_ptr(),
            patience,
        )
        return missing
