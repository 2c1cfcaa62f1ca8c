"""Linear layers: how a weight lies in memory and which kernel multiplies it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F

#: Rows that the blocked layout is chosen for: fast from one row on (measured: chosen for one, it is
#: half as fast at 2 to 8 and no faster at one).
_PACK_ROWS = 32

_POINTWISE: Any = torch.ops.mkldnn._linear_pointwise


class Linear(Protocol):
    """``x`` [T, in] times the transposed weight [out, in]."""

    nbytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, out]."""
        ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``residual + self(x)``; ``residual`` [T, out] may be overwritten."""
        ...


class DenseLinear:
    """Any device: torch's own matrix product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(F.linear(x, self._weight, self._bias))


class OneDnnLinear:
    """CPU: oneDNN with the weight in the kernel's own blocked layout, residual add fused."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _POINTWISE.default(x, self._weight, self._bias, "none", [], "")
        return result

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _POINTWISE.binary(x, residual, self._weight, self._bias, "add")
        return result


class BothLinear:
    """One kernel for few rows, another for many, each with the weight in its own form."""

    def __init__(self, few: Linear, many: Linear, limit: int) -> None:
        """``few`` is used below ``limit`` rows."""
        self._few = few
        self._many = many
        self._limit = limit
        self.nbytes = few.nbytes + many.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._few(x) if x.shape[0] < self._limit else self._many(x)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        chosen = self._few if x.shape[0] < self._limit else self._many
        return chosen.add(x, residual)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed kernels run here."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """``weight`` [out, in] on its device and in its dtype."""
    if can_pack(weight.device, weight.dtype):
        return OneDnnLinear(weight, bias)
    return DenseLinear(weight, bias)
