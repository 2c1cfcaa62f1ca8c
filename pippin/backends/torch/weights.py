"""From a checkpoint's tensors to torch modules and linears, one tensor at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from pippin.backends.shard import Span
from pippin.backends.torch.linear import BothLinear, Linear, make_linear
from pippin.backends.torch.native.linear import native_dense, native_quantized
from pippin.backends.torch.native.ops import Kernels
from pippin.backends.torch.precision import WeightForm
from pippin.backends.torch.quantized import Int4Linear, fits_int4
from pippin.errors import ModelInvalid
from pippin.models.checkpoint import Checkpoint, DenseTensor, InParts, QuantizedTensor, Tensor

_BITS = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}

#: Rows below which weights that lie in both forms are taken in the small one (bfloat16 on CPUs
#: that multiply it in hardware: few rows are bound by the bytes of the weights).
FEW_ROWS = 5


@dataclass(frozen=True, slots=True)
class Part:
    """A weight, or some of its rows (first axis) or columns (last axis): only those are read,
    where the format allows."""

    name: str
    rows: Span | None = None
    columns: Span | None = None


@dataclass(frozen=True, slots=True)
class Pieces:
    """Parts of an axis, side by side; ``zero``: the values are another rank's to add."""

    axis: int
    spans: tuple[Span, ...]
    zero: bool = False

    @property
    def count(self) -> int:
        return sum(span.count for span in self.spans)


#: Which pieces of a parameter a stage has (its owner's path in the module, the owner, its name
#: there); None: all.
Choose = Callable[[str, nn.Module, str], Pieces | None]


class Weights:
    """Loads weights onto ``device`` in ``dtype``; counts their bytes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        *,
        form: WeightForm = "dense",
        kernels: Kernels | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._names = checkpoint.names()
        self.device = device
        self.dtype = dtype
        self.nbytes = 0
        self.kernels = kernels
        """For the layers, where this machine has them."""
        self.unordered = 0
        """Quantised weights of which a part had to be made dense: their groups, of an act-order
        checkpoint, lie across the parts."""
        self._form = form

    def has(self, name: str) -> bool:
        return name in self._names

    def dense(self, part: str | Part, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One weight as a dense tensor. Raises ``ModelInvalid`` if it is missing."""
        tensor = self._read(_part(part), dtype or self.dtype)
        self.nbytes += tensor.nbytes
        return tensor

    def linear(
        self,
        parts: Sequence[Part],
        biases: Sequence[Part] = (),
        *,
        rows: torch.Tensor | None = None,
    ) -> Linear:
        """One linear of several weights stacked along their outputs.

        ``rows`` [out] lists the output rows in another order.
        """
        bias = self.stacked(biases) if biases else None
        if bias is not None and rows is not None:
            bias = bias[rows.to(self.device)]
        tensors = self._tensors(parts)
        quantized = None if self._form == "dense" else _concat(tensors)
        if quantized is not None:
            if rows is not None:
                quantized = quantized.take_rows(rows.numpy())
            small = self._small(quantized, bias)
            if small is not None and self._form == "small":
                return self._counted(small)
            weight = torch.from_numpy(quantized.dequantize()).to(self.device, self.dtype)
            linear = self._make(weight, bias)
            if small is not None:
                linear = BothLinear(small, linear, FEW_ROWS)
            return self._counted(linear)
        weight = self._stack(tensors)
        if rows is not None:
            weight = weight[rows.to(self.device)]
        return self.make(weight, bias)

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A linear of a loaded weight [out, in], counted in ``nbytes``."""
        return self._counted(self._make(weight, bias))

    def _make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if self.kernels is not None and self.dtype == torch.float32:
            return native_dense(self.kernels, weight, bias)
        return make_linear(weight, bias)

    def _counted(self, linear: Linear) -> Linear:
        self.nbytes += linear.nbytes
        return linear

    def _small(self, weight: QuantizedTensor, bias: torch.Tensor | None) -> Linear | None:
        """A linear that keeps the weight quantised, where there is a kernel for that."""
        if self.kernels is not None and self.kernels.fits(self.dtype):
            return native_quantized(self.kernels, weight, bias)
        if fits_int4(weight, self.device, self.dtype):
            return Int4Linear(weight, bias, self.device, self.dtype)
        return None

    def stacked(self, parts: Sequence[Part]) -> torch.Tensor:
        """Several weights, stacked along their first axis; not counted in ``nbytes``.

        In the compute dtype, or bfloat16 where the checkpoint has that and the kernels take it
        without loss.
        """
        return self._stack(self._tensors(parts))

    def _stack(self, tensors: Sequence[Tensor]) -> torch.Tensor:
        stays = self.kernels is not None and self.dtype == torch.float32
        stays &= all(isinstance(t, DenseTensor) and t.dtype == "bfloat16" for t in tensors)
        dtype = torch.bfloat16 if stays else self.dtype
        parts = [self._put(tensor, dtype) for tensor in tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def fill(self, module: nn.Module, prefix: str, choose: Choose | None = None) -> None:
        """Replace the meta parameters and buffers of a transformers module by the checkpoint's."""
        for owner_name, owner in module.named_modules():
            path = f"{prefix}.{owner_name}" if owner_name else prefix
            for name, parameter in owner.named_parameters(recurse=False):
                pieces = None if choose is None else choose(owner_name, owner, name)
                loaded = self._parameter(f"{path}.{name}", parameter, pieces)
                setattr(owner, name, nn.Parameter(loaded, requires_grad=False))
            for name, buffer in owner.named_buffers(recurse=False):
                if name not in owner._non_persistent_buffers_set:
                    setattr(owner, name, self._parameter(f"{path}.{name}", buffer, None))

    def _parameter(self, name: str, like: torch.Tensor, pieces: Pieces | None) -> torch.Tensor:
        dtype = torch.float32 if like.dtype == torch.float32 else self.dtype
        # Modules are made in the compute dtype; what they pin to float32 stays so.
        if not self.has(name):
            if ".experts." not in name:
                raise _missing(name)
            loaded = self._experts(name, like.shape, dtype, pieces)
            self.nbytes += loaded.nbytes
            return loaded
        tensor = self._tensor(name)
        if tensor.shape != like.shape:
            raise ModelInvalid(
                f"weight {name} has shape {list(tensor.shape)}, the configuration asks for"
                f" {list(like.shape)}",
                hint="config.json and the weights belong to different models",
            )
        loaded = self._put(tensor if pieces is None else _pick(tensor, pieces), dtype)
        if pieces is not None and pieces.zero:
            loaded.zero_()
        self.nbytes += loaded.nbytes
        return loaded

    def _experts(
        self, name: str, shape: torch.Size, dtype: torch.dtype, pieces: Pieces | None
    ) -> torch.Tensor:
        """All experts' weights, which checkpoints keep apart, as transformers' one tensor."""
        prefix, kind = name.rsplit(".", 1)
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        if names is None:
            raise _missing(name)
        size = list(shape)
        rows = columns = None
        if pieces is not None:
            # Gate and up stand in two tensors: the first piece is gate's, and so is up's.
            span = pieces.spans[0]
            rows, columns = (span, None) if pieces.axis == 1 else (None, span)
            size[pieces.axis] = pieces.count
        out = torch.empty(size, dtype=dtype, device=self.device)
        for expert in range(shape[0]):
            first = 0
            for each in names:
                weight = self._read(Part(f"{prefix}.{expert}.{each}.weight", rows, columns), dtype)
                out[expert, first : first + weight.shape[0]] = weight
                first += weight.shape[0]
        return out

    def _tensor(self, name: str) -> Tensor:
        if name not in self._names:
            raise _missing(name)
        return self._checkpoint.tensor(name)

    def _tensors(self, parts: Sequence[Part]) -> list[Tensor]:
        """Each weight is unpacked once, however many of its parts are taken, unless the checkpoint
        unpacks parts."""
        alone = [self._alone(part) for part in parts]
        whole = {part.name: None for part, found in zip(parts, alone, strict=True) if found is None}
        found = {name: self._tensor(name) for name in whole}
        return [
            self._take(found[part.name], part) if tensor is None else tensor
            for part, tensor in zip(parts, alone, strict=True)
        ]

    def _alone(self, part: Part) -> Tensor | None:
        """A part that the checkpoint reads by itself."""
        if not isinstance(self._checkpoint, InParts) or part.name not in self._names:
            return None
        if part.rows is None and part.columns is None:
            return None
        rows, columns = (
            None if span is None else slice(span.start, span.stop)
            for span in (part.rows, part.columns)
        )
        return self._checkpoint.part(part.name, rows, columns)

    def _take(self, tensor: Tensor, part: Part) -> Tensor:
        if part.rows is not None:
            tensor = tensor.rows(part.rows.start, part.rows.stop)
        if part.columns is not None:
            permuted = isinstance(tensor, QuantizedTensor) and tensor.columns is not None
            self.unordered += permuted and self._form != "dense"
            tensor = tensor.cut(part.columns.start, part.columns.stop)
        return tensor

    def _read(self, part: Part, dtype: torch.dtype) -> torch.Tensor:
        return self._put(self._tensors([part])[0], dtype)

    def _put(self, tensor: Tensor, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(tensor, QuantizedTensor):
            return torch.from_numpy(tensor.dequantize()).to(self.device, dtype)
        # A copy: the checkpoint maps its file.
        return to_torch(tensor).to(self.device, dtype, copy=True)


def _part(part: str | Part) -> Part:
    return Part(part) if isinstance(part, str) else part


def _pick(tensor: Tensor, pieces: Pieces) -> DenseTensor:
    """Pieces of an axis, side by side."""
    if isinstance(tensor, QuantizedTensor):
        tensor = DenseTensor(tensor.dequantize(), "float32")
    before = (slice(None),) * pieces.axis
    parts = [tensor.data[(*before, slice(span.start, span.stop))] for span in pieces.spans]
    data = parts[0] if len(parts) == 1 else np.concatenate(parts, pieces.axis)
    return DenseTensor(data, tensor.dtype)


def _concat(tensors: Sequence[Tensor]) -> QuantizedTensor | None:
    """The weights stacked, if all are quantised alike."""
    first, *others = tensors
    if not isinstance(first, QuantizedTensor):
        return None
    same = [p for p in others if isinstance(p, QuantizedTensor) and first.can_concat(p)]
    if len(same) < len(others):
        return None
    return first.concat(same) if same else first


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
