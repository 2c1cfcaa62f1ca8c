"""Which device and dtype a stage computes in, and how much memory it may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from pippin.backends.memory import host_memory
from pippin.config import Config
from pippin.errors import ConfigError, OutOfMemory

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}

#: Most bytes of freed buffers that MLX may hold for reuse.
_CACHE_BYTES = {True: 2 << 30, False: 256 << 20}


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    dtype: mx.Dtype
    on_gpu: bool
    description: str
    """For people: ``cpu (MLX 0.32.4)``, ``Apple M4 Max (Metal)``."""
    reason: str


def choose_device(
    config: Config, model_config: dict[str, Any], quantization: str | None
) -> DeviceChoice:
    """Resolve ``config.model.device`` and ``.dtype``, and make the device MLX's default.

    Raises ``ConfigError`` for a device that is not here.
    """
    asked = config.model.device
    has_gpu = gpu_name() is not None
    if asked not in ("auto", "cpu", "mps", "cuda"):
        raise ConfigError(
            f"the MLX backend has no device {asked!r}", hint="auto, cpu, mps (Metal) or cuda"
        )
    on_gpu = has_gpu and asked != "cpu"
    if asked in ("mps", "cuda") and asked != gpu_kind():
        raise ConfigError(f"this MLX has no {asked} device", hint="--device auto")
    mx.set_default_device(mx.gpu if on_gpu else mx.cpu)
    where = "best device here" if asked == "auto" else "asked for"
    if on_gpu:
        description = f"{gpu_name()} ({'Metal' if gpu_kind() == 'mps' else 'CUDA'})"
        dtype, why = _gpu_dtype(model_config, quantization)
    else:
        # On CPU, MLX compiles with g++, for each shape anew: seconds within a step.
        mx.disable_compile()
        description = f"cpu (MLX {version('mlx')})"
        dtype, why = mx.float32, "MLX multiplies half precision very slowly on CPU"
    if config.model.dtype != "auto":
        dtype, why = _DTYPES[config.model.dtype], "asked for"
    kind = gpu_kind() if on_gpu else "cpu"
    return DeviceChoice(dtype, on_gpu, description, f"{kind}: {where}; {dtype_name(dtype)}: {why}")


def gpu_kind() -> str | None:
    """``mps`` where MLX was built for Metal, ``cuda`` where for CUDA, else None."""
    if mx.metal.is_available():
        return "mps"
    return "cuda" if mx.cuda.is_available() else None


def gpu_name() -> str | None:
    return str(mx.device_info().get("device_name", "GPU")) if gpu_kind() else None


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _gpu_dtype(model_config: dict[str, Any], quantization: str | None) -> tuple[mx.Dtype, str]:
    if quantization is not None and quantization.startswith("gguf"):
        return mx.float16, "the scales of GGUF blocks are float16"
    named = model_config.get("dtype") or model_config.get("torch_dtype")
    own = _DTYPES.get(str(named).removeprefix("torch."))
    return own or mx.bfloat16, "the checkpoint's own dtype" if own else "the default on GPUs"


def working_set() -> int | None:
    """Bytes that Metal recommends to keep on the GPU at once; None without Metal."""
    if not mx.metal.is_available():
        return None
    return int(mx.device_info()["max_recommended_working_set_size"])


def memory_limit(choice: DeviceChoice) -> tuple[int, int]:
    """Bytes (free, total) for weights, KV and steps on the device."""
    total = working_set() if choice.on_gpu else None
    if total is None:
        return host_memory()
    free_on_host, _ = host_memory()
    return min(total - mx.get_active_memory(), free_on_host), total


@contextmanager
def memory_errors(what: str, hint: str) -> Iterator[None]:
    """Turn MLX's failures to allocate (it has no class of its own for them) into
    ``OutOfMemory``."""
    try:
        yield
    except RuntimeError as error:
        if "malloc" not in str(error):
            raise
        raise OutOfMemory(f"{what}: {error}", hint=hint) from error


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """MLX's process-wide limits as they were, to be put back."""

    wired: int | None
    cache: int

    @staticmethod
    def take(choice: DeviceChoice) -> MemoryLimits:
        """Wire the working set (Metal only), so that weights are never paged out, and bound the
        cache of freed buffers."""
        limit = working_set() if choice.on_gpu else None
        wired = mx.set_wired_limit(limit) if limit is not None else None
        return MemoryLimits(wired, mx.set_cache_limit(_CACHE_BYTES[choice.on_gpu]))

    def restore(self) -> None:
        if self.wired is not None:
            mx.set_wired_limit(self.wired)
        mx.set_cache_limit(self.cache)


def wired_advice(weights_bytes: int) -> str | None:
    """How to give the GPU more of the memory, where the weights leave it little. Metal only."""
    limit = working_set()
    if limit is None or weights_bytes < 0.7 * limit:
        return None
    megabytes = int(mx.device_info()["memory_size"]) * 85 // 100 >> 20
    return (
        f"weights take {100 * weights_bytes // limit} % of the GPU's working set:"
        f" sudo sysctl iogpu.wired_limit_mb={megabytes} would raise it until the next restart"
    )
