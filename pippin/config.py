"""The one frozen configuration tree, and the only reader of ``os.environ``.

Flags, ``--config FILE`` (YAML) and the Python API all end in a ``Config``; unknown keys are errors.
Names and defaults are vLLM's where vLLM has them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from pippin.errors import ConfigError

BackendName = Literal["auto", "mlx", "torch"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Policy = Literal["fcfs", "priority"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str = "demo"
    """``demo``, a local directory, a GGUF file, or a hub id (``org/name[@revision]``)."""
    served_model_name: tuple[str, ...] = ()
    """Names the API answers to; default: ``model`` as it was given."""
    tokenizer: str | None = None
    chat_template: str | None = None
    """The operator's own template, a file or the text itself; it replaces the model's."""
    revision: str | None = None
    backend: BackendName = "auto"
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda``, ``cuda:1`` or ``mps``."""
    dtype: DType = "auto"
    quantization: str | None = None
    """None keeps the checkpoint's own; ``none`` dequantises at load; ``4bit``/``8bit`` quantise."""
    max_model_len: int | None = None
    """None: the model's own length, fitted to the memory that is free."""
    seed: int = 0
    """Base of the seeds given to unseeded requests is random; this one seeds weights' dummies."""


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    block_size: int = 16
    """Tokens in a KV block."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory (on CPU: of what is free at start) for weights and KV."""
    kv_cache_bytes: int | None = None
    """Fixed size of the KV cache; None: from free memory after a profiling pass."""
    enable_prefix_caching: bool = True


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_num_seqs: int = 64
    """Most sequences in one step."""
    max_num_batched_tokens: int | None = None
    """Most tokens in one step; None: bounded by the step-time objective alone (at most 2,048)."""
    step_time_ms: float | None = None
    """Longest wished step while others decode; None: derived from the measured decode step."""
    policy: Policy = "fcfs"
    max_num_queued_reqs: int = 1024
    """Waiting requests beyond which the server answers 429."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    request_timeout: float | None = None
    """Seconds from arrival after which a request ends with an error; None: no limit."""
    max_body_bytes: int = 8 * 1024 * 1024
    trust_request_chat_template: bool = False
    """Take templates from requests. A template may run for ever."""
    drain_timeout: float = 30.0
    """Seconds that running requests get to finish at SIGTERM."""


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pipeline_split: tuple[int, ...] | None = None
    """Layers of each stage; None: balanced by what they cost."""
    data_parallel_size: int = 1
    distributed_executor_backend: Literal["uni", "mp", "ray"] | None = None
    port_range: tuple[int, int] | None = None
    """First and last of the ports that stages on other machines listen at; None: any."""
    cpus_per_rank: int | None = None
    """Cores and compute threads of a rank on CPU; None: an equal share of the cores this process
    may use."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    server: ServerConfig = ServerConfig()
    parallel: ParallelConfig = ParallelConfig()
    log_level: Literal["debug", "info", "warning", "error"] = "info"


def build(values: dict[str, Any]) -> Config:
    """Make a ``Config`` from nested plain values; raises ``ConfigError`` naming the wrong key."""
    try:
        config = msgspec.convert(values, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"configuration: {error}", hint="pippin serve --help lists the flags"
        ) from error
    _check(config)
    return config


def _check(config: Config) -> None:
    if not 0.0 < config.cache.gpu_memory_utilization <= 1.0:
        raise ConfigError("gpu_memory_utilization must be in (0, 1]")
    for name, value in (
        ("block_size", config.cache.block_size),
        ("max_num_seqs", config.scheduler.max_num_seqs),
        ("max_num_batched_tokens", config.scheduler.max_num_batched_tokens),
        ("max_model_len", config.model.max_model_len),
        ("tensor_parallel_size", config.parallel.tensor_parallel_size),
        ("pipeline_parallel_size", config.parallel.pipeline_parallel_size),
        ("data_parallel_size", config.parallel.data_parallel_size),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    _check_split(config.parallel)
    ports = config.parallel.port_range
    if ports is not None and not 1 <= ports[0] <= ports[1] <= 65535:
        raise ConfigError(
            f"--port-range {ports[0]}-{ports[1]}: ports are 1 to 65535, the first not above the"
            " last",
            hint="--port-range 7000-7099",
        )
    if not 0 <= config.server.port <= 65535:
        raise ConfigError(f"port must be in [0, 65535], got {config.server.port}")


def _check_split(parallel: ParallelConfig) -> None:
    split, stages = parallel.pipeline_split, parallel.pipeline_parallel_size
    if split is None:
        return
    written = ",".join(map(str, split))
    if len(split) != stages:
        raise ConfigError(
            f"--pipeline-split {written} names {len(split)} stages, there are {stages}",
            hint=f"--pipeline-parallel-size {len(split)} --pipeline-split {written}",
        )
    if min(split) < 1:
        raise ConfigError(
            f"--pipeline-split {written}: each stage needs at least one layer",
            hint="leave it out: the layers are balanced then",
        )


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the process's surroundings say, read once."""

    home: Path
    """Pippin's own files: fetched demo model, converted tokenizers, state."""
    hub_offline: bool
    """HF_HUB_OFFLINE, the hub client's own switch."""
    native_kernels: bool
    """PIPPIN_NATIVE_KERNELS, off with 0: whether the torch backend compiles kernels for the CPU."""


#: What a user sets for all processes of a job, wherever they run.
_CARRIED = (
    "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "PIPPIN_HOME", "PIPPIN_NATIVE_KERNELS", "OMP_NUM_THREADS", "GOMP_SPINCOUNT",
)  # fmt: skip


def carried() -> dict[str, str]:
    """Variables that ranks on other machines get as they are here. May hold secrets."""
    return {name: os.environ[name] for name in _CARRIED if name in os.environ}


def prepare_openmp() -> None:
    """Let idle compute threads sleep soon. Must run before torch is imported; keeps the user's own.

    A thread that spins at a barrier takes its core from the server process (and from everybody
    else), which then takes it from the thread that the barrier waits for: measured on two busy
    cores, steps were 3 to 20 times longer. On quiet ones it makes no difference.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def environment() -> Environment:
    home = os.environ.get("PIPPIN_HOME")
    return Environment(
        home=Path(home) if home else Path.home() / ".cache" / "pippin",
        hub_offline=os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"),
        native_kernels=os.environ.get("PIPPIN_NATIVE_KERNELS", "1") != "0",
    )
