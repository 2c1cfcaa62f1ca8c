"""Linears on the compiled kernels: float32 arithmetic, weights as small as they come.

On CPUs without matrix instructions these are at least as fast as oneDNN's at every number of rows
(benchmarks/notes_torch.md), and few rows are bound by the bytes of the weights.
"""

from __future__ import annotations

import torch

from pippin.backends.torch.native.ops import Kernels, PackedWeight
from pippin.models.quant import QuantizedTensor


class NativeLinear:
    """A ``linear.Linear`` over a packed weight."""

    def __init__(
        self, kernels: Kernels, weight: PackedWeight, columns: torch.Tensor | None = None
    ) -> None:
        """``columns``: int64 [in], the order in which the weight takes its inputs."""
        self._kernels = kernels
        self._weight = weight
        self._columns = columns
        self.nbytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.linear(self._ordered(x), self._weight, None)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._kernels.linear(self._ordered(x), self._weight, residual)

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous() if self._columns is None else x[:, self._columns]


def native_quantized(
    kernels: Kernels, weight: QuantizedTensor, bias: torch.Tensor | None
) -> NativeLinear:
    columns = None if weight.columns is None else torch.from_numpy(weight.columns).long()
    kind = 4 if weight.bits <= 4 else 8
    packed = kernels.pack(
        torch.from_numpy(weight.codes),
        kind,
        bias,
        scales=torch.from_numpy(weight.scales),
        biases=torch.from_numpy(weight.biases),
        group=weight.group_size,
    )
    return NativeLinear(kernels, packed, columns)


def native_dense(kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeLinear:
    """``weight`` [out, in], bfloat16 or float32, which it stays in memory."""
    kind = 16 if weight.dtype == torch.bfloat16 else 32
    return NativeLinear(kernels, kernels.pack(weight.contiguous(), kind, bias))
