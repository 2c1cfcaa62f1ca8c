"""The flat names of the configuration: flags, keys of ``--config FILE``, arguments of ``LLM``.

One table maps each name to its place in ``config.Config``; values from all three are checked here
alike. Names and meanings are vLLM's where vLLM has them.

Source: https://docs.vllm.ai/en/latest/configuration/engine_args/
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import msgspec

from pippin import config
from pippin.errors import ConfigError

_MULTIPLES = {
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip

Group = Literal["Model", "Memory", "Scheduling", "Server", "Parallelism"]


def count(text: str) -> int:
    """``8192``, ``8k`` (8,000), ``8K`` (8,192), ``25.6k``, ``4G``: vLLM's way to write a number.

    Raises ``ValueError`` for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text.strip())
    if match is None:
        raise ValueError("expected a whole number such as 8192, 8k (8,000) or 8K (8,192)")
    value = float(match[1]) * _MULTIPLES.get(match[2], 1)
    if value != math.floor(value):
        raise ValueError("expected a whole number such as 8192, 8k (8,000) or 8K (8,192)")
    return int(value)


def _dtype(text: str) -> str:
    return {"half": "float16", "float": "float32"}.get(text, text)


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError("expected layers a stage, such as 17,13") from None


def _ports(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and dash):
        raise ValueError("expected the first and the last port, such as 7000-7099")
    return int(first), int(last)


@dataclass(frozen=True, slots=True)
class Option:
    """One name and where it goes."""

    name: str
    """With underscores; the flag has dashes."""
    section: str
    """Section of ``Config``; empty for the tree's root."""
    field: str
    group: Group
    help: str
    short: str | None = None
    parse: Callable[[str], Any] | None = None
    """Reads a value given as text, before the field's own type is applied."""
    automatic: tuple[Any, ...] = ("auto",)
    """Values that mean None, where the field may be None."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def type(self) -> Any:
        owner = type(getattr(config.Config(), self.section)) if self.section else config.Config
        return next(f.type for f in msgspec.structs.fields(owner) if f.name == self.field)

    @property
    def default(self) -> Any:
        owner = getattr(config.Config(), self.section) if self.section else config.Config()
        return getattr(owner, self.field)

    @property
    def many(self) -> bool:
        return get_origin(self.type) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a closed set, else empty."""
        kinds = (self.type, *get_args(self.type))
        return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())

    def read(self, value: Any, origin: str) -> Any:
        """Check one value. ``origin`` names it in the error, a ``ConfigError``."""
        optional = type(None) in get_args(self.type)
        if optional and value in self.automatic:
            return None
        if isinstance(value, str) and self.parse is not None:
            try:
                value = self.parse(value)
            except ValueError as error:
                raise ConfigError(f"{origin} {value}: {error}") from error
        if self.many and isinstance(value, str):
            value = (value,)
        if self.choices and value not in self.choices and not (optional and value is None):
            raise ConfigError(f"{origin} {value}: expected one of {', '.join(self.choices)}")
        try:
            return msgspec.convert(value, self.type, strict=not isinstance(value, str))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{origin} {value}: expected {self._expected()}") from error

    def _expected(self) -> str:
        kinds = get_args(self.type) or (self.type,)
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        return next((words[kind] for kind in kinds if kind in words), "another value")


OPTIONS: tuple[Option, ...] = (
    Option("served_model_name", "model", "served_model_name", "Model",
           "Name the API answers to (repeatable); default: MODEL as given."),
    Option("tokenizer", "model", "tokenizer", "Model",
           "Directory, file or hub id of another tokenizer."),
    Option("chat_template", "model", "chat_template", "Model",
           "File with another chat template, or the template itself."),
    Option("revision", "model", "revision", "Model", "Branch, tag or commit of a hub model."),
    Option("backend", "model", "backend", "Model", "Library that computes."),
    Option("device", "model", "device", "Model", "auto, cpu, cuda, cuda:1 or mps."),
    Option("dtype", "model", "dtype", "Model", "Type of the activations.", parse=_dtype),
    Option("quantization", "model", "quantization", "Model",
           "none dequantises at load, 4bit and 8bit quantise; default: as stored.", short="-q"),
    Option("max_model_len", "model", "max_model_len", "Model",
           "Context length in tokens (8192, 8k, 8K) or auto: the model's own, fitted to memory.",
           parse=count, automatic=("auto", "-1", -1)),
    Option("seed", "model", "seed", "Model", "Seed of dummy weights; requests carry their own."),
    Option("block_size", "cache", "block_size", "Memory", "Tokens in a block of the KV cache."),
    Option("gpu_memory_utilization", "cache", "gpu_memory_utilization", "Memory",
           "Share of the device's memory (CPU: of what is free) for weights and KV cache."),
    Option("kv_cache_memory_bytes", "cache", "kv_cache_bytes", "Memory",
           "Fixed size of the KV cache (4G); default: what is left.", parse=count),
    Option("enable_prefix_caching", "cache", "enable_prefix_caching", "Memory",
           "Reuse the KV blocks of a prompt seen before."),
    Option("max_num_seqs", "scheduler", "max_num_seqs", "Scheduling",
           "Most sequences in one step."),
    Option("max_num_batched_tokens", "scheduler", "max_num_batched_tokens", "Scheduling",
           "Most tokens in one step; default: what fits the step time.", parse=count),
    Option("step_time_ms", "scheduler", "step_time_ms", "Scheduling",
           "Longest wished step while others stream; default: derived from the measured speed."),
    Option("scheduling_policy", "scheduler", "policy", "Scheduling", "Order of waiting requests."),
    Option("max_num_queued_reqs", "scheduler", "max_num_queued_reqs", "Scheduling",
           "Waiting requests beyond which the server answers 429."),
    Option("host", "server", "host", "Server", "Address to listen on; 0.0.0.0 for all."),
    Option("port", "server", "port", "Server", "Port to listen on; 0 picks a free one."),
    Option("api_key", "server", "api_key", "Server", "Key that clients must send (repeatable)."),
    Option("request_timeout", "server", "request_timeout", "Server",
           "Seconds after which a request ends with an error."),
    Option("max_body_bytes", "server", "max_body_bytes", "Server",
           "Largest request body (8M); larger ones get 413.", parse=count),
    Option("trust_request_chat_template", "server", "trust_request_chat_template", "Server",
           "Take chat templates from requests; one may keep the server busy for ever."),
    Option("drain_timeout", "server", "drain_timeout", "Server",
           "Seconds that running requests get to finish at SIGTERM."),
    Option("log_level", "", "log_level", "Server", "How much to log."),
    Option("tensor_parallel_size", "parallel", "tensor_parallel_size", "Parallelism",
           "Devices that share each layer.", short="-tp"),
    Option("pipeline_parallel_size", "parallel", "pipeline_parallel_size", "Parallelism",
           "Stages the layers are cut into.", short="-pp"),
    Option("pipeline_split", "parallel", "pipeline_split", "Parallelism",
           "Layers of each stage (17,13); default: balanced by what they cost.", parse=_counts),
    Option("data_parallel_size", "parallel", "data_parallel_size", "Parallelism",
           "Copies of the model.", short="-dp"),
    Option("distributed_executor_backend", "parallel", "distributed_executor_backend",
           "Parallelism",
           "How the engine's processes are started: uni (one), mp (one a rank, on this machine),"
           " ray (one a rank, on the nodes of a Ray cluster)."),
    Option("port_range", "parallel", "port_range", "Parallelism",
           "Ports for links between machines (7000-7099), for a firewall; default: any.",
           parse=_ports),
    Option("cpus_per_rank", "parallel", "cpus_per_rank", "Parallelism",
           "Cores and threads of a rank on CPU; default: an equal share of all."),
)  # fmt: skip

BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}

#: Names of the design that nothing answers yet; a value that would change what happens is refused.
LATER: Mapping[str, str] = {
    "plan": "running a saved plan",
    "transport": "the choice of a transport",
    "replicas_per_device": "several replicas",
    "recovery_timeout": "recovery on other machines",
    "upstream": "another server as a replica",
}


def make_config(values: Mapping[str, Any], *, origin: Callable[[str], str] = str) -> config.Config:
    """Make a ``Config`` from flat values; a value of None leaves the default.

    ``origin`` turns a name into what the user wrote, for errors. Raises ``ConfigError`` for an
    unknown name, a value out of range, or a name or value that a later release brings.
    """
    tree: dict[str, Any] = {}
    for name, value in values.items():
        if name in LATER:
            refuse_later(name, value, origin)
            continue
        if name == "model":
            if value is not None:
                tree.setdefault("model", {})["model"] = _model(value, origin(name))
            continue
        option = BY_NAME.get(name)
        if option is None:
            raise unknown(name, origin(name))
        if value is not None:
            place = tree.setdefault(option.section, {}) if option.section else tree
            place[option.field] = option.read(value, origin(name))
    made = config.build(tree)
    _refuse_parallel(made, origin)
    return made


def unknown(name: str, written: str) -> ConfigError:
    """The error for a name that is not in the table."""
    close = difflib.get_close_matches(name, [*BY_NAME, *LATER, "model"], n=1)
    hint = f"did you mean {close[0]}?" if close else "pippin serve --help lists the names"
    return ConfigError(f"unknown option {written}", hint=hint)


def refuse_later(name: str, value: Any, origin: Callable[[str], str]) -> None:
    """Raise ``ConfigError`` unless the value asks for nothing (absent, or one replica)."""
    if value is None or (name == "replicas_per_device" and str(value) == "1"):
        return
    raise ConfigError(
        f"{origin(name)}: {LATER[name]} comes with a later release",
        hint=f"leave {origin(name)} out",
    )


def _model(value: Any, written: str) -> str:
    if isinstance(value, (list, tuple)):
        if len(value) > 1:
            raise ConfigError(
                f"{written}: several models on one endpoint come with a later release",
                hint="give one model, or start one server a model with its own --port",
            )
        value = value[0] if value else ""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{written}: expected a directory, a GGUF file, a hub id or demo")
    return value


def _refuse_parallel(made: config.Config, origin: Callable[[str], str]) -> None:
    parallel = made.parallel
    if parallel.data_parallel_size > 1:
        raise ConfigError(
            f"{origin('data_parallel_size')} {parallel.data_parallel_size}: several replicas come"
            " with a later release",
            hint=f"leave {origin('data_parallel_size')} out",
        )
    executor = parallel.distributed_executor_backend
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if executor == "uni" and ranks > 1:
        raise ConfigError(
            f"{origin('distributed_executor_backend')} uni is one process, but"
            f" {parallel.pipeline_parallel_size} stages of {parallel.tensor_parallel_size} ranks"
            f" are {ranks}",
            hint="use mp, or leave it out",
        )
