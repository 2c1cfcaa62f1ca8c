"""From a checkpoint's tensors to the parameters of mlx-lm's modules, one module at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from pippin.backends.mlx.quantize import GROUP_SIZES, PackedWeight, group_size_of, pack, stack
from pippin.errors import ModelInvalid, UnsupportedModel
from pippin.models.checkpoint import Checkpoint, DenseTensor, QuantizedTensor
from pippin.models.safetensors_dir import MlxPacked, SafetensorsCheckpoint

#: Group size of weights that are quantised at load, as mlx-lm's ``convert`` has it.
_GROUP_SIZE = 64

#: Parameters that stay in float32.
_FLOAT32 = ("e_score_correction_bias",)


class Weights:
    """Reads a checkpoint, in the dtype of the stage."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: mx.Dtype,
        *,
        dequantize: bool = False,
        bits: int | None = None,
    ) -> None:
        """``dequantize``: keep nothing quantised. ``bits``: quantise linears to so many."""
        self.dtype = dtype
        self.kept_quantized = False
        self._checkpoint = checkpoint
        self._names = checkpoint.names()
        self._keep = not dequantize and bits is None
        self._bits = bits
        self._used: set[str] = set()
        self._reasons: dict[str, str] = {}

    @property
    def reasons(self) -> list[str]:
        """What was done to the weights, for people."""
        kind = self._checkpoint.quantization
        if kind is not None and not self.kept_quantized and not self._reasons:
            return [f"{kind} weights are dequantised at load: MLX has no kernel for them"]
        return list(self._reasons.values())

    def has(self, name: str) -> bool:
        return name in self._names

    def load(self, module: nn.Module, path: str) -> nn.Module:
        """Fill ``module`` from the weights at ``path``; returns it, or what takes its place."""
        loaded: nn.Module
        if isinstance(module, SwitchLinear):
            loaded = self._experts(module, path)
        elif isinstance(module, MultiLinear):
            loaded = self._heads(module, path)
        elif isinstance(module, nn.Linear | nn.Embedding):
            loaded = self._matrix(module, path)
        else:
            loaded = module
            for name, value in list(module.items()):
                if isinstance(value, nn.Module):
                    module[name] = self.load(value, f"{path}.{name}")
                elif isinstance(value, mx.array):
                    module[name] = self._parameter(f"{path}.{name}", value)
            return loaded
        # Frees what the checkpoint gave before the next module is read.
        mx.eval(arrays_of(loaded))
        return loaded

    def check_all_used(self, prefix: str) -> None:
        """Raise ``UnsupportedModel`` where a weight below ``prefix`` has no place in mlx-lm's
        model: its output would be wrong."""
        left = sorted(
            name
            for name in self._names - self._used
            if name.startswith(prefix) and "rotary_emb" not in name
        )
        if left:
            raise UnsupportedModel(
                f"mlx-lm's model has no place for {len(left)} weights, first {left[0]}",
                hint="--backend torch",
            )

    def _matrix(self, module: Any, path: str) -> nn.Module:
        """A linear layer or an embedding."""
        packed = self._packed(f"{path}.weight")
        if packed is not None:
            _check_shape(path, packed.shape, module.weight.shape)
            return self._finish(_quantized(module, packed), module, path)
        module.weight = self._parameter(f"{path}.weight", module.weight)
        return self._finish(self._at_load(module), module, path)

    def _finish(self, loaded: Any, module: Any, path: str) -> nn.Module:
        """Set the bias, which a checkpoint may have where the module expects none."""
        if self.has(f"{path}.bias"):
            loaded.bias = self._array(f"{path}.bias")
        elif "bias" in module:
            raise _missing(f"{path}.bias")
        return loaded  # type: ignore[no-any-return]

    def _at_load(self, module: Any) -> nn.Module:
        """Quantise a module if that was asked for and its width allows it."""
        if self._bits is None:
            return module  # type: ignore[no-any-return]
        width = module.weight.shape[-1]
        sizes = [s for s in GROUP_SIZES if s <= _GROUP_SIZE and width % s == 0]
        if not sizes:
            self._reasons["narrow"] = "matrices whose width is not in groups of 32 stay dense"
            return module  # type: ignore[no-any-return]
        self.kept_quantized = True
        self._reasons["at load"] = f"quantised to {self._bits} bits at load"
        quantized: nn.Module = module.to_quantized(group_size=sizes[0], bits=self._bits)
        return quantized

    def _experts(self, module: Any, path: str) -> nn.Module:
        """All experts of a layer in one; checkpoints keep them apart, or stack them."""
        wanted = module.weight.shape
        part = path.rpartition(".")[2]
        apart = path.replace(".switch_mlp.", ".experts.").removesuffix(f".{part}")
        names = [f"{apart}.{expert}.{part}.weight" for expert in range(module.num_experts)]
        if self.has(f"{path}.weight"):
            packed = self._packed(f"{path}.weight")
            weight = None if packed else self._array(f"{path}.weight")
        elif self.has(names[0]):
            packed = self._packed_experts(names)
            weight = None if packed else mx.stack([self._array(name) for name in names])
        else:
            return self._interleaved(module, apart, part)
        if packed is not None:
            _check_shape(path, packed.shape, wanted)
            return self._finish(_quantized_experts(module, packed), module, path)
        assert weight is not None
        _check_shape(path, weight.shape, wanted)
        module.weight = weight
        return self._finish(self._at_load(module), module, path)

    def _interleaved(self, module: Any, prefix: str, part: str) -> nn.Module:
        """GPT-OSS on the hub: all experts stacked, rows of gate and up taking turns."""
        step = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}.get(part, slice(None))
        name = f"{prefix}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"
        bias = self._array(f"{name}_bias")[:, step]
        packed = self._packed(name)
        loaded: Any
        if packed is not None:
            rows = replace(
                packed,
                words=mx.contiguous(packed.words[:, step]),
                scales=mx.contiguous(packed.scales[:, step]),
            )
            _check_shape(name, rows.shape, module.weight.shape)
            loaded = _quantized_experts(module, rows)
        else:
            # [experts, in, out]
            weight = mx.contiguous(self._array(name)[..., step].swapaxes(1, 2))
            _check_shape(name, weight.shape, module.weight.shape)
            module.weight = weight
            loaded = self._at_load(module)
        loaded.bias = mx.contiguous(bias)
        return loaded  # type: ignore[no-any-return]

    def _packed_experts(self, names: list[str]) -> PackedWeight | None:
        whole = self._stored(names[0])
        if whole is not None:
            self._used.update(names)
            return whole
        parts = []
        for name in names:
            part = self._packed(name)
            if part is None:
                return None
            parts.append(part)
        return stack(parts)

    def _heads(self, module: Any, path: str) -> nn.Module:
        """DeepSeek's per-head projections, which most checkpoints have as one ``kv_b_proj``."""
        own = f"{path}.weight"
        if self.has(own):
            packed = self._packed(own)
            if packed is not None:
                return _quantized_heads(module, packed)
            module.weight = self._parameter(own, module.weight)
            return module  # type: ignore[no-any-return]
        attention, _, part = path.rpartition(".")
        heads, out, width = module.weight.shape
        stacked = self._array(f"{attention}.kv_b_proj.weight")
        if part == "embed_q":
            # [heads, rank, nope], from the first rows of each head.
            rank, nope = out, width
            weight = stacked.reshape(heads, -1, rank)[:, :nope].swapaxes(1, 2)
        else:
            weight = stacked.reshape(heads, -1, width)[:, -out:]
        module.weight = mx.contiguous(weight)
        return module  # type: ignore[no-any-return]

    def _parameter(self, name: str, like: mx.array) -> mx.array:
        loaded = self._array(name)
        _check_shape(name, loaded.shape, like.shape)
        return loaded

    def _packed(self, name: str) -> PackedWeight | None:
        """A weight that can stay quantised, else None."""
        if not self._keep or not self.has(name):
            return None
        stored = self._stored(name)
        if stored is not None:
            return stored
        if self._checkpoint.quantization is None:
            return None
        tensor = self._checkpoint.tensor(name)
        if not isinstance(tensor, QuantizedTensor) or group_size_of(tensor) is None:
            return None
        self._used.add(name)
        self.kept_quantized = True
        return pack(tensor, self.dtype)

    def _stored(self, name: str) -> PackedWeight | None:
        """MLX's own quantised weights, as they lie in the file (experts as one stack)."""
        if not self._keep or not isinstance(self._checkpoint, SafetensorsCheckpoint):
            return None
        stored = self._checkpoint.mlx_packed(name)
        if stored is None:
            return None
        self._used.add(name)
        self.kept_quantized = True
        return self._as_packed(stored)

    def _as_packed(self, stored: MlxPacked) -> PackedWeight:
        affine = stored.mode == "affine"
        biases = to_mlx(stored.biases).astype(self.dtype) if stored.biases is not None else None
        scales = to_mlx(stored.scales)
        words = to_mlx(stored.words)
        return PackedWeight(
            words=words,
            # Other modes have scales of eight bits.
            scales=scales.astype(self.dtype) if affine else scales,
            biases=biases,
            bits=stored.bits,
            group_size=stored.group_size,
            mode=stored.mode,
        )

    def _array(self, name: str) -> mx.array:
        """Dense, in the dtype of the stage."""
        if name not in self._names:
            raise _missing(name)
        self._used.add(name)
        tensor = self._checkpoint.tensor(name)
        dtype = mx.float32 if name.endswith(_FLOAT32) else self.dtype
        if isinstance(tensor, QuantizedTensor):
            self._reasons["dequantized"] = (
                f"weights of {self._checkpoint.quantization} that MLX has no kernel for are"
                " dequantised at load"
                if self._keep
                else f"{self._checkpoint.quantization} weights are dequantised at load, as asked"
            )
            return mx.array(tensor.dequantize()).astype(dtype)
        return to_mlx(tensor).astype(dtype)


def arrays_of(module: Any) -> list[mx.array]:
    """All parameters of a module and those in it."""
    flat: Any = tree_flatten(module.parameters())
    return [value for _, value in flat]


def to_mlx(tensor: DenseTensor) -> mx.array:
    """The same values; fp8 becomes float32."""
    if tensor.dtype.startswith("float8"):
        return mx.array(tensor.to_float32())
    array = mx.array(np.ascontiguousarray(tensor.data))
    return array.view(mx.bfloat16) if tensor.dtype == "bfloat16" else array


def _quantized(module: Any, packed: PackedWeight) -> nn.Module:
    rows, width = packed.shape
    loaded: Any
    if isinstance(module, nn.Embedding):
        loaded = nn.QuantizedEmbedding(rows, width, packed.group_size, packed.bits, packed.mode)
    else:
        loaded = nn.QuantizedLinear(width, rows, False, packed.group_size, packed.bits, packed.mode)
    return _set(loaded, packed)


def _quantized_experts(module: Any, packed: PackedWeight) -> nn.Module:
    experts, rows, width = packed.shape
    loaded = QuantizedSwitchLinear(
        width, rows, experts, False, packed.group_size, packed.bits, packed.mode
    )
    return _set(loaded, packed)


def _quantized_heads(module: Any, packed: PackedWeight) -> nn.Module:
    heads, rows, width = packed.shape
    loaded = QuantizedMultiLinear(width, rows, heads, packed.group_size, packed.bits, packed.mode)
    return _set(loaded, packed)


def _set(module: Any, packed: PackedWeight) -> nn.Module:
    module.weight, module.scales, module.biases = packed.words, packed.scales, packed.biases
    return module  # type: ignore[no-any-return]


def _check_shape(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if tuple(shape) != tuple(wanted):
        raise ModelInvalid(
            f"weight {name} has shape {list(shape)}, the configuration asks for {list(wanted)}",
            hint="config.json and the weights belong to different models",
        )


def _missing(name: str) -> ModelInvalid:
    return ModelInvalid(
        f"the checkpoint has no weight {name}",
        hint="fetch the model again; its files are incomplete",
    )
