"""Which dtype a stage computes in and how its weights lie in memory, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pippin.backends.torch.device import DeviceChoice, dtype_name, free_memory
from pippin.config import ModelConfig
from pippin.errors import ConfigError, OutOfMemory

#: Bytes per weight of an ``Int4Linear``: the codes, and two scales of 2 bytes per group of 32; on
#: CUDA a second copy of the codes.
_INT4_BYTES = {"cpu": 0.63, "cuda": 1.13}

#: Share of the free memory that weights may take.
_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Precision:
    dtype: torch.dtype
    keep_quantized: bool
    reason: str


def choose_precision(
    asked: ModelConfig, choice: DeviceChoice, quantization: str | None, num_parameters: int
) -> Precision:
    """``quantization``: the checkpoint's; ``num_parameters``: of this stage.

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
    may_keep = quantization is not None and asked.quantization is None
    dense = num_parameters * dtype.itemsize
    int4 = num_parameters * _INT4_BYTES.get(device.type, 4.0)
    if may_keep and dtype == torch.bfloat16 and _has_fast_int4(device):
        return Precision(dtype, True, f"{quantization} weights stay at 4 bits where they have 4")
    if dense <= room:
        if quantization is None:
            return Precision(dtype, False, "")
        why = "asked for" if asked.quantization else f"faster in {dtype_name(dtype)} here"
        return Precision(dtype, False, f"{quantization} weights are dequantised at load: {why}")
    small = f"{dtype_name(dtype)} weights ({dense / 2**30:.1f} GiB) do not fit"
    if asked.dtype == "auto" and device.type == "cpu" and dtype == torch.float32:
        dtype = torch.bfloat16
    if may_keep and dtype != torch.float16 and device.type in _INT4_BYTES and int4 <= room:
        return Precision(dtype, True, f"{quantization} weights stay at 4 bits: {small}")
    if dtype != choice.dtype and num_parameters * dtype.itemsize <= room:
        return Precision(dtype, False, f"computed in {dtype_name(dtype)}: {small}")
    raise OutOfMemory(
        f"the weights need {dense / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free on"
        f" {choice.description}",
        hint="use a smaller or quantised model, or more machines",
    )


def _has_fast_int4(device: torch.device) -> bool:
    """Whether the four-bit kernel is no slower than the dense one."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512"
