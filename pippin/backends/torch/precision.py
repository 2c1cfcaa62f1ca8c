"""Which dtype a stage computes in and how its weights lie in memory, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from pippin.backends.torch.device import DeviceChoice, dtype_name, free_memory
from pippin.config import ModelConfig
from pippin.errors import ConfigError, OutOfMemory

WeightForm = Literal["dense", "small", "both"]
"""``small``: quantised linears stay as they are, where there is a kernel. ``both``: they also lie
dense, for steps of many rows."""

#: Bytes per weight that stays quantised: codes and float32 scales on CPU; on CUDA the codes twice.
_SMALL_BYTES = {"cpu": 1.0, "cuda": 1.13}

#: Share of the free memory that weights may take.
_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Precision:
    dtype: torch.dtype
    form: WeightForm
    reason: str


def choose_precision(
    asked: ModelConfig,
    choice: DeviceChoice,
    quantization: str | None,
    num_parameters: int,
    *,
    compiled: bool = False,
) -> Precision:
    """``quantization``: the checkpoint's; ``num_parameters``: of this stage; ``compiled``: whether
    there are compiled kernels.

    Raises ``ConfigError`` for what this backend cannot do, ``OutOfMemory`` if no form of the
    weights fits in the memory that is free.
    """
    if asked.quantization not in (None, "none"):
        raise ConfigError(
            f"the torch backend does not quantise at load (--quantization {asked.quantization})",
            hint="leave --quantization out and name a quantised checkpoint (GGUF, GPTQ, AWQ, MLX)",
        )
    device, dtype = choice.device, choice.dtype
    free, _ = free_memory(device)
    room = free * _SHARE
    small = num_parameters * _SMALL_BYTES.get(device.type, 4.0)
    dense = num_parameters * dtype.itemsize
    may_keep = quantization is not None and asked.quantization is None
    kept = f"{quantization} weights stay quantised"
    if may_keep and small <= room:
        if compiled and dtype == torch.float32:
            return Precision(dtype, "small", kept)
        if compiled and dtype == torch.bfloat16 and small + dense <= room:
            return Precision(dtype, "both", f"{kept} for few rows and are dense for many")
        if dtype == torch.bfloat16 and device.type == "cuda" and _has_int4(device):
            return Precision(dtype, "small", kept)
    if dense <= room:
        if quantization is None:
            return Precision(dtype, "dense", "")
        why = "asked for" if asked.quantization else f"faster in {dtype_name(dtype)} here"
        return Precision(dtype, "dense", f"{quantization} weights are dequantised at load: {why}")
    why = f"{dtype_name(dtype)} weights ({dense / 2**30:.1f} GiB) do not fit"
    if asked.dtype == "auto" and device.type == "cpu" and dtype == torch.float32:
        dtype = torch.bfloat16
    if may_keep and dtype != torch.float16 and device.type in _SMALL_BYTES and small <= room:
        return Precision(dtype, "small", f"{kept}: {why}")
    if dtype != choice.dtype and num_parameters * dtype.itemsize <= room:
        return Precision(dtype, "dense", f"computed in {dtype_name(dtype)}: {why}")
    raise OutOfMemory(
        f"the weights need {dense / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free on"
        f" {choice.description}",
        hint="use a smaller or quantised model, or more machines",
    )


def _has_int4(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)
