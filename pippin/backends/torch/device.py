"""Which device and dtype a stage computes in, and why."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pippin.backends.memory import host_memory
from pippin.config import Config
from pippin.errors import ConfigError

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

#: Freed memory that the C library may keep, in bytes.
_KEPT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    device: torch.device
    dtype: torch.dtype
    description: str
    """For people: ``cpu (2 threads, AVX2)``."""
    reason: str


def choose_device(config: Config, model_config: dict[str, Any]) -> DeviceChoice:
    """Resolve ``config.model.device`` and ``.dtype``; sets the number of CPU threads.

    Raises ``ConfigError`` for a device that is not here, or a dtype that it lacks.
    """
    device = _device(config.model.device)
    own = _checkpoint_dtype(model_config)
    if device.type == "cpu":
        threads = config.parallel.cpus_per_rank or len(os.sched_getaffinity(0))
        torch.set_num_threads(threads)
        keep_freed_memory()
        capability = torch.backends.cpu.get_cpu_capability()
        description = f"cpu ({threads} thread{'s' * (threads > 1)}, {capability})"
        dtype, reason = _cpu_dtype(capability)
    elif device.type == "cuda":
        description = f"{device} ({torch.cuda.get_device_name(device)})"
        dtype, reason = own or torch.bfloat16, "the checkpoint's own dtype"
        if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            dtype, reason = torch.float16, "this GPU has no bfloat16"
    else:
        description = str(device)
        dtype, reason = own or torch.float16, "the checkpoint's own dtype"
    where = "best device here" if config.model.device == "auto" else "asked for"
    if config.model.dtype != "auto":
        dtype, reason = _DTYPES[config.model.dtype], "asked for"
    return DeviceChoice(
        device, dtype, description, f"{device.type}: {where}; {dtype_name(dtype)}: {reason}"
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def free_memory(device: torch.device) -> tuple[int, int]:
    """Bytes (free, total) that this process may use on ``device``."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, total
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total
    return host_memory()


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}", hint="auto, cpu, cuda, cuda:1 or mps") from (
            error
        )
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(
                f"there is no {name} here ({count} CUDA devices)", hint="--device cpu"
            )
        return torch.device("cuda", device.index or 0)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("there is no mps device here", hint="--device cpu")
    if device.type not in ("cpu", "mps"):
        raise ConfigError(f"device {name!r} is not supported", hint="auto, cpu, cuda or mps")
    return device


def _checkpoint_dtype(model_config: dict[str, Any]) -> torch.dtype | None:
    named = model_config.get("dtype") or model_config.get("torch_dtype")
    return _DTYPES.get(str(named).removeprefix("torch."))


def _cpu_dtype(capability: str) -> tuple[torch.dtype, str]:
    """bfloat16 only where the CPU multiplies it faster than float32.

    Weights that the checkpoint has in bfloat16 stay so in memory either way (``Weights.stacked``).
    """
    features = _cpu_features()
    if features & {"amx_bf16", "bf16"}:
        return torch.bfloat16, "this CPU has matrix instructions for it"
    if "avx512_bf16" in features and "AuthenticAMD" in features:
        return torch.bfloat16, "this CPU multiplies it at twice the rate of float32"
    if "avx512_bf16" in features:
        # Its dot product starts on one port, float32's on two (Intel, and measured: 190 GFLOP/s
        # of oneDNN's product against 350 on two cores, benchmarks/RESULTS.md).
        return torch.float32, "this CPU multiplies bfloat16 no faster, having no AMX"
    return torch.float32, f"this CPU ({capability}) has no bfloat16 instructions"


def _cpu_features() -> frozenset[str]:
    """Flags and vendor of the first CPU; empty where Linux does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return frozenset()
    lines = text.partition("\n\n")[0].splitlines()
    words = [line.partition(":")[2].split() for line in lines]
    keys = ("flags", "Features", "vendor_id")
    named = [w for line, w in zip(lines, words, strict=True) if line.startswith(keys)]
    return frozenset(word for words in named for word in words)


def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks instead of handing them back to the kernel.

    A step allocates and frees the same few activations for every layer; handing them back costs a
    page fault for each 4 KiB, about a tenth of a step. Does nothing with another C library.
    Source: mallopt(3).
    """
    trim_threshold, mmap_threshold = -1, -3
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(trim_threshold, _KEPT_BYTES)
        # Older releases refuse more than half an arena here.
        library.mallopt(mmap_threshold, _KEPT_BYTES) or library.mallopt(mmap_threshold, 32 << 20)
