"""The one form of quantised weights inside Pippin: group-wise affine, ``w = scale * q + bias``.

Every format that can be written so without loss (GGUF's block types, GPTQ, AWQ, MLX affine) becomes
a ``QuantizedTensor``; backends pack it for their own kernels or dequantise it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pippin.models.tensor import DenseTensor, FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A matrix of codes with a scale and a bias for each group of neighbours in a row.

    ``stored[o, i] = scales[o, i // group_size] * codes[o, i] + biases[o, i // group_size]``.

    With ``columns`` (GPTQ's act-order), the stored columns are sorted so that groups are
    neighbours: stored column ``i`` is column ``columns[i]`` of the weight, so that
    ``weight @ x == stored @ x[columns]``.
    """

    codes: NDArray[np.uint8]
    """[out, in], one code a byte, each below ``2**bits``."""
    scales: FloatArray
    """[out, in / group_size]."""
    biases: FloatArray
    """[out, in / group_size]. Symmetric formats have ``-zero * scale`` here."""
    bits: int
    """1 to 8: bits that the codes need, not how they are stored here."""
    group_size: int
    columns: NDArray[np.int32] | None = None
    """[in], a permutation, or None where columns are in their own order."""

    def __post_init__(self) -> None:
        out, width = self.codes.shape
        if width % self.group_size:
            raise ValueError(f"{width} columns are not whole groups of {self.group_size}")
        groups = (out, width // self.group_size)
        if self.scales.shape != groups or self.biases.shape != groups:
            raise ValueError(f"scales {self.scales.shape}, biases {self.biases.shape} for {groups}")
        if self.columns is not None and self.columns.shape != (width,):
            raise ValueError(f"{self.columns.shape} column numbers for {width} columns")

    @property
    def shape(self) -> tuple[int, int]:
        out, width = self.codes.shape
        return out, width

    def dequantize(self) -> FloatArray:
        """The weight as float32 [out, in], columns in the weight's own order."""
        out, width = self.codes.shape
        stored = self.codes.reshape(out, -1, self.group_size).astype(np.float32)
        stored *= self.scales[:, :, None]
        stored += self.biases[:, :, None]
        weight = stored.reshape(out, width)
        if self.columns is None:
            return weight
        result = np.empty_like(weight)
        result[:, self.columns] = weight
        return result

    def rows(self, start: int, stop: int) -> QuantizedTensor:
        """Rows ``[start, stop)``, as views."""
        part = slice(start, stop)
        return replace(
            self, codes=self.codes[part], scales=self.scales[part], biases=self.biases[part]
        )

    def cut(self, start: int, stop: int) -> Tensor:
        """Columns ``[start, stop)`` of the weight's own order, without loss, as copies.

        Groups that do not end there become smaller ones. Where columns are permuted, each part has
        some of many groups: it comes dequantised.
        """
        if self.columns is not None:
            return DenseTensor(np.ascontiguousarray(self.dequantize()[:, start:stop]), "float32")
        fine = self.regroup(math.gcd(self.group_size, start, stop))
        columns = slice(start, stop)
        groups = slice(start // fine.group_size, stop // fine.group_size)
        return replace(
            fine,
            codes=np.ascontiguousarray(fine.codes[:, columns]),
            scales=np.ascontiguousarray(fine.scales[:, groups]),
            biases=np.ascontiguousarray(fine.biases[:, groups]),
        )

    def take_rows(self, index: NDArray[np.intp]) -> QuantizedTensor:
        """Rows in the order of ``index``, as copies."""
        return replace(
            self, codes=self.codes[index], scales=self.scales[index], biases=self.biases[index]
        )

    def can_concat(self, other: QuantizedTensor) -> bool:
        """Whether both read their input columns in the same order and have the same width."""
        if self.shape[1] != other.shape[1]:
            return False
        if self.columns is None or other.columns is None:
            return self.columns is other.columns
        return bool(np.array_equal(self.columns, other.columns))

    def concat(self, others: Sequence[QuantizedTensor]) -> QuantizedTensor:
        """Stack along ``out`` (fused qkv, gate and up), without loss.

        Mixed bits become the largest, mixed group sizes the greatest common divisor. Raises
        ``ValueError`` unless ``can_concat`` holds for all.
        """
        parts = [self, *others]
        if not all(self.can_concat(other) for other in others):
            raise ValueError("cannot stack weights of different width or column order")
        group = math.gcd(*(part.group_size for part in parts))
        parts = [part.regroup(group) for part in parts]
        return replace(
            self,
            codes=np.concatenate([part.codes for part in parts]),
            scales=np.concatenate([part.scales for part in parts]),
            biases=np.concatenate([part.biases for part in parts]),
            bits=max(part.bits for part in parts),
            group_size=group,
        )

    def regroup(self, group_size: int) -> QuantizedTensor:
        """The same weight in smaller groups; ``group_size`` must divide the present one."""
        if group_size == self.group_size:
            return self
        if self.group_size % group_size:
            raise ValueError(f"groups of {self.group_size} cannot be cut into {group_size}")
        times = self.group_size // group_size
        return replace(
            self,
            scales=np.repeat(self.scales, times, axis=1),
            biases=np.repeat(self.biases, times, axis=1),
            group_size=group_size,
        )


Tensor = DenseTensor | QuantizedTensor
