"""From a checkpoint's tensors to torch modules and linears, one tensor at a time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from pippin.backends.torch.linear import Linear, make_linear
from pippin.backends.torch.native.ops import Kernels
from pippin.backends.torch.quantized import Int4Linear, fits_int4
from pippin.errors import ModelInvalid
from pippin.models.checkpoint import Checkpoint, DenseTensor, QuantizedTensor, Tensor

_BITS = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


class Weights:
    """Loads weights onto ``device`` in ``dtype``; counts their bytes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        *,
        keep_quantized: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        """``keep_quantized``: leave linears at four bits where ``fits_int4`` lets them."""
        self._checkpoint = checkpoint
        self._names = checkpoint.names()
        self.device = device
        self.dtype = dtype
        self.nbytes = 0
        self.kernels = kernels
        """For the layers, where this machine has them."""
        self._keep = keep_quantized

    def has(self, name: str) -> bool:
        return name in self._names

    def dense(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One weight as a dense tensor. Raises ``ModelInvalid`` if it is missing."""
        tensor = self._read(name, dtype or self.dtype)
        self.nbytes += tensor.nbytes
        return tensor

    def linear(
        self,
        names: Sequence[str],
        biases: Sequence[str] = (),
        *,
        columns: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        row_scale: torch.Tensor | None = None,
    ) -> Linear:
        """One linear of several weights stacked along their outputs.

        ``columns`` [in] multiplies the input columns; ``rows`` [out] lists the output rows in their
        new order, which ``row_scale`` [out] then multiplies. A weight that stays quantised takes
        none of these.
        """
        if columns is None and rows is None and row_scale is None:
            quantized = self._quantized(names)
            if quantized is not None:
                bias = self.stacked(biases) if biases else None
                kept = Int4Linear(quantized, bias, self.device, self.dtype)
                self.nbytes += kept.nbytes
                return kept
        weight = self.stacked(names)
        bias = self.stacked(biases) if biases else None
        if rows is not None:
            rows = rows.to(self.device)
            weight = weight[rows]
            bias = bias[rows] if bias is not None else None
        if columns is not None:
            weight = weight * columns
        if row_scale is not None:
            row_scale = row_scale.to(self.device)
            weight = weight * row_scale[:, None]
            bias = bias * row_scale if bias is not None else None
        return self.make(weight, bias)

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A linear of a loaded weight [out, in], counted in ``nbytes``."""
        linear = make_linear(weight, bias)
        self.nbytes += linear.nbytes
        return linear

    def _quantized(self, names: Sequence[str]) -> QuantizedTensor | None:
        """The weights stacked, if all are quantised and stay so."""
        if not self._keep:
            return None
        parts = [self._tensor(name) for name in names]
        first, *others = parts
        if not isinstance(first, QuantizedTensor):
            return None
        same = [p for p in others if isinstance(p, QuantizedTensor) and first.can_concat(p)]
        if len(same) < len(others):
            return None
        whole = first.concat(same) if same else first
        return whole if fits_int4(whole, self.device, self.dtype) else None

    def stacked(self, names: Sequence[str]) -> torch.Tensor:
        """Several weights, stacked along their first axis; not counted in ``nbytes``."""
        parts = [self._read(name, self.dtype) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Replace the meta parameters and buffers of a transformers module by the checkpoint's."""
        for owner_name, owner in module.named_modules():
            path = f"{prefix}.{owner_name}" if owner_name else prefix
            for name, parameter in owner.named_parameters(recurse=False):
                loaded = self._parameter(f"{path}.{name}", parameter)
                setattr(owner, name, nn.Parameter(loaded, requires_grad=False))
            for name, buffer in owner.named_buffers(recurse=False):
                if name not in owner._non_persistent_buffers_set:
                    setattr(owner, name, self._parameter(f"{path}.{name}", buffer))

    def _parameter(self, name: str, like: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if like.dtype == torch.float32 else self.dtype
        # Modules are made in the compute dtype; what they pin to float32 stays so.
        if self.has(name):
            loaded = self.dense(name, dtype)
        elif ".experts." in name:
            loaded = self._experts(name, like.shape, dtype)
            self.nbytes += loaded.nbytes
        else:
            raise _missing(name)
        if loaded.shape != like.shape:
            raise ModelInvalid(
                f"weight {name} has shape {list(loaded.shape)}, the configuration asks for"
                f" {list(like.shape)}",
                hint="config.json and the weights belong to different models",
            )
        return loaded

    def _experts(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """All experts' weights, which checkpoints keep apart, as transformers' one tensor."""
        prefix, kind = name.rsplit(".", 1)
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        if parts is None:
            raise _missing(name)
        out = torch.empty(shape, dtype=dtype, device=self.device)
        for expert in range(shape[0]):
            first = 0
            for part in parts:
                weight = self._read(f"{prefix}.{expert}.{part}.weight", dtype)
                out[expert, first : first + weight.shape[0]] = weight
                first += weight.shape[0]
        return out

    def _tensor(self, name: str) -> Tensor:
        if name not in self._names:
            raise _missing(name)
        return self._checkpoint.tensor(name)

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._tensor(name)
        if isinstance(tensor, QuantizedTensor):
            return torch.from_numpy(tensor.dequantize()).to(self.device, dtype)
        # A copy: the checkpoint maps its file.
        return to_torch(tensor).to(self.device, dtype, copy=True)


def to_torch(tensor: DenseTensor) -> torch.Tensor:
    """The same bits, as a torch tensor that may share the checkpoint's memory: do not write."""
    data = np.ascontiguousarray(tensor.data)
    with warnings.catch_warnings():
        # torch cannot mark a tensor read-only and warns of a mapped file; nothing writes here.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        result = torch.from_numpy(data)
    bits = _BITS.get(tensor.dtype)
    return result if bits is None else result.view(bits)


def _missing(name: str) -> ModelInvalid:
    return ModelInvalid(
        f"the checkpoint has no weight {name}",
        hint="fetch the model again; its files are incomplete",
    )
