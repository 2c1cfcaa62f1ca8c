"""Linears whose weights stay at four bits, on the kernels that torch brings along.

    CPU   aten::_weight_int4pack_mm_for_cpu   bfloat16, float16 (float32 runs, but slowly)
    CUDA  aten::_weight_int4pack_mm           bfloat16, few rows; many rows unpack the weight first

Both compute ``scale * (q - 8) + zero`` per group in the dtype of the activations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pippin.models.quant import QuantizedTensor

_GROUPS = (32, 64, 128, 256)

#: Rows from which unpacking the weight pays (CUDA): its kernel reads the weight once per 16 rows.
_UNPACK_ROWS = 64

_CUDA_TILES = 8


def fits_int4(weight: QuantizedTensor, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether an ``Int4Linear`` can hold this weight without loss."""
    out, width = weight.shape
    if weight.bits > 4 or not any(weight.group_size % group == 0 for group in _GROUPS):
        return False
    if device.type == "cuda":
        enough = torch.cuda.get_device_capability(device) >= (8, 0)
        return enough and dtype == torch.bfloat16 and width % 128 == 0 and out % 8 == 0
    return device.type == "cpu" and out % 16 == 0 and width % 2 == 0


class Int4Linear:
    """``weight`` must pass ``fits_int4``."""

    def __init__(
        self,
        weight: QuantizedTensor,
        bias: torch.Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._group = next(g for g in reversed(_GROUPS) if weight.group_size % g == 0)
        weight = weight.regroup(self._group)
        codes = torch.from_numpy(weight.codes).to(device)
        scales = torch.from_numpy(weight.scales).to(device)
        zeros = torch.from_numpy(weight.biases).to(device) + 8 * scales
        self._scales_zeros = torch.stack((scales.t(), zeros.t()), -1).contiguous().to(dtype)
        self._columns = None
        if weight.columns is not None:
            self._columns = torch.from_numpy(weight.columns).long().to(device)
        self._bias = bias
        self._nibbles: torch.Tensor | None = None
        if device.type == "cuda":
            self._nibbles = codes[:, ::2] << 4 | codes[:, 1::2]
            self._packed = torch.ops.aten._convert_weight_to_int4pack(self._nibbles, _CUDA_TILES)
        else:
            self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        held = (self._packed, self._scales_zeros, self._nibbles, bias)
        self.nbytes = sum(tensor.nbytes for tensor in held if tensor is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._columns is not None:
            x = x[:, self._columns]
        if self._nibbles is None:
            result: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.contiguous(), self._packed, self._group, self._scales_zeros
            )
        elif x.shape[0] < _UNPACK_ROWS:
            result = torch.ops.aten._weight_int4pack_mm(
                x.contiguous(), self._packed, self._group, self._scales_zeros
            )
        else:
            result = F.linear(x, self._unpacked(self._nibbles))
        return result if self._bias is None else result.add_(self._bias)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))

    def _unpacked(self, nibbles: torch.Tensor) -> torch.Tensor:
        """[out, in] in the dtype of the scales, stored columns in their order."""
        codes = torch.stack((nibbles >> 4, nibbles & 15), -1)
        codes = codes.view(nibbles.shape[0], -1, self._group)
        scales, zeros = self._scales_zeros.transpose(0, 1).unbind(-1)
        weight = (codes.to(scales.dtype) - 8) * scales[..., None] + zeros[..., None]
        return weight.flatten(1)
