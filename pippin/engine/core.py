"""The leader's engine: schedule a step, run it, sample, commit.

Used from one thread. Processes, sockets and text live elsewhere (``engine.process``, ``server``).
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from pippin.backends.base import SampledToken, StageRunner
from pippin.clock import Clock, SystemClock
from pippin.config import Config, environment
from pippin.engine.blocks import KVCacheManager
from pippin.engine.budget import MAX_TOKENS, StepBudget
from pippin.engine.calibrate import calibrate
from pippin.engine.scheduler import Scheduled, Scheduler
from pippin.engine.sizing import KVSize, size_kv
from pippin.errors import ConfigError, OutOfMemory, RequestError
from pippin.models.files import ModelFiles, resolve
from pippin.types.message import Ready
from pippin.types.request import FinishReason, Logprobs, Request, SequenceOutput
from pippin.types.step import SchedulerStats, StepPlan

logger = logging.getLogger(__name__)

#: Packages that a backend needs and an installation may lack.
_LIBRARIES = {"torch": ("torch",), "mlx": ("mlx", "mlx_lm", "mlx.core", "mlx.nn")}


class EngineCore:
    """One replica of one model."""

    def __init__(
        self, runner: StageRunner, scheduler: Scheduler, ready: Ready, clock: Clock
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._clock = clock
        self._ended = 0.0
        self._refused: list[SequenceOutput] = []
        self.ready = ready

    def add(self, request: Request) -> None:
        """Queue a request. One that can never run ends with an error at the next step."""
        try:
            self._scheduler.add(request)
        except RequestError as error:
            self._refused.append(
                SequenceOutput(
                    request_id=request.request_id,
                    finish_reason=FinishReason.ERROR,
                    error=error.message,
                )
            )

    def abort(self, request_id: str) -> SequenceOutput | None:
        """End a request; None if it has ended before."""
        return self._scheduler.abort(request_id)

    def has_unfinished(self) -> bool:
        return bool(self._refused) or self._scheduler.has_unfinished()

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def step(self) -> list[SequenceOutput]:
        """Run one step, if there is anything to run; returns what it added to the sequences."""
        now, started = self._clock.time(), self._clock.monotonic()
        busy = self._scheduler.has_running()
        outputs, self._refused = self._refused, []
        outputs += self._scheduler.expire(now)
        scheduled = self._scheduler.schedule(now)
        if scheduled is None:
            return outputs
        tokens, prompt_logprobs = self._run(scheduled)
        ended = self._clock.monotonic()
        seconds = ended - (self._ended if busy else started)
        self._ended = ended
        outputs += self._scheduler.commit(scheduled, tokens, prompt_logprobs, seconds)
        return outputs

    def _run(
        self, scheduled: Scheduled
    ) -> tuple[Mapping[int, SampledToken], Mapping[int, list[Logprobs]]]:
        sampler = self._runner.sampler
        for slot in scheduled.plan.freed:
            sampler.remove(slot)
        for sequence in scheduled.entered:
            sampler.add(sequence.slot, sequence.sampling_state())
        logits: Any = self._runner.execute(scheduled.plan)
        # Prompt rows first: sampling may overwrite the logits.
        prompt_logprobs = {
            rows.seq: sampler.prompt_logprobs(logits, rows.first_row, rows.targets, rows.top)
            for rows in scheduled.prompt_rows
        }
        if not scheduled.rows:
            return {}, prompt_logprobs
        sampled = sampler.sample(logits, scheduled.rows)
        tokens = {row.seq: token for row, token in zip(scheduled.rows, sampled, strict=True)}
        return tokens, prompt_logprobs

    def close(self) -> None:
        self._runner.close()


def load(config: Config, clock: Clock | None = None) -> EngineCore:
    """Find and load the model, size the KV cache, and make the engine.

    Raises ``ModelError`` (missing, broken or unsupported model), ``OutOfMemory``, ``ConfigError``.
    """
    clock = clock or SystemClock()
    started = clock.monotonic()
    environ = environment()
    files = resolve(
        config.model.model,
        revision=config.model.revision,
        offline=environ.hub_offline,
        home=environ.home,
    )
    backend, why = choose_backend(config)
    runner = _load_runner(backend, config, files)
    info = runner.info
    max_num_batched_tokens = config.scheduler.max_num_batched_tokens or MAX_TOKENS
    size, note = _size(config, runner, max_num_batched_tokens)
    runner.allocate_kv(size.num_blocks, config.cache.block_size)
    kv = KVCacheManager(
        info.kv_groups,
        size.num_blocks,
        config.cache.block_size,
        fingerprint=info.fingerprint,
        enable_prefix_caching=config.cache.enable_prefix_caching,
    )
    splits = runner.splits_layers and info.num_layers > 1
    budget = StepBudget(config.scheduler, config.cache.block_size, splits_layers=splits)
    calibrate(
        budget,
        lambda plan: _timed(runner, plan, clock),
        num_blocks=size.num_blocks,
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
    )
    scheduler = Scheduler(
        config.scheduler, kv, budget, size.max_model_len, split_layers=info.num_layers * splits
    )
    ready = Ready(
        pid=os.getpid(),
        model_name=_served_name(config),
        architecture=info.architecture,
        num_layers=info.num_layers,
        vocab_size=info.vocab_size,
        max_model_len=size.max_model_len,
        max_model_len_note=note,
        num_blocks=size.num_blocks,
        block_size=config.cache.block_size,
        kv_tokens=size.kv_tokens,
        kv_bytes=size.kv_bytes,
        weights_bytes=info.weights_bytes,
        dtype=info.dtype,
        quantization=info.quantization,
        backend=backend,
        backend_reason=f"{why}; {runner.reason}",
        device=runner.device,
        load_seconds=clock.monotonic() - started,
    )
    return EngineCore(runner, scheduler, ready, clock)


def choose_backend(config: Config) -> tuple[str, str]:
    """The backend's name and why it was chosen."""
    asked = config.model.backend
    if asked != "auto":
        return asked, f"asked for by --backend {asked}"
    if (sys.platform, platform.machine()) == ("darwin", "arm64"):
        return "mlx", "the fastest on Apple Silicon"
    return "torch", f"MLX is chosen on Apple Silicon only, this is {sys.platform}"


def _load_runner(backend: str, config: Config, files: ModelFiles) -> StageRunner:
    # Loaded by name: only the chosen backend's array library is imported.
    try:
        module = import_module(f"pippin.backends.{backend}.runner")
    except ModuleNotFoundError as error:
        if error.name not in _LIBRARIES[backend]:
            raise
        raise ConfigError(
            f"the {backend} backend needs {error.name}, which is not installed",
            hint=f"pip install 'pippin[{backend}]'",
        ) from error
    runner: StageRunner = module.load(config, files)
    return runner


def _size(
    config: Config, runner: StageRunner, max_num_batched_tokens: int
) -> tuple[KVSize, str | None]:
    """Sizes of the KV cache, and a note where the context was shortened to fit."""
    info = runner.info
    asked = config.model.max_model_len
    if asked is not None and asked > info.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {asked} is longer than the model's own"
            f" {info.max_position_embeddings} tokens",
            hint=f"--max-model-len {info.max_position_embeddings}",
        )
    wanted = asked or info.max_position_embeddings
    max_num_seqs = config.scheduler.max_num_seqs
    available = config.cache.kv_cache_bytes or runner.available_kv_bytes(
        max_num_batched_tokens, max_num_seqs
    )
    size = size_kv(
        available,
        info.kv_groups,
        config.cache.block_size,
        wanted,
        max_num_seqs,
        max_num_batched_tokens,
    )
    if size.max_model_len == wanted:
        return size, None
    if asked is not None:
        raise OutOfMemory(
            f"the KV cache of one request of {asked} tokens does not fit in"
            f" {available / 2**30:.2f} GiB",
            hint=f"--max-model-len {size.max_model_len}, or more memory for the cache"
            " (--gpu-memory-utilization, --kv-cache-memory-bytes)",
        )
    note = (
        f"the model's own length of {wanted} tokens does not fit in the"
        f" {available / 2**30:.2f} GiB left for the KV cache: shortened to {size.max_model_len}"
    )
    logger.warning(note)
    return size, note


def _timed(runner: StageRunner, plan: StepPlan, clock: Clock) -> float:
    """Run a plan to its end; returns seconds."""
    started = clock.monotonic()
    runner.execute(plan)
    runner.synchronize()
    return clock.monotonic() - started


def _served_name(config: Config) -> str:
    names = config.model.served_model_name
    return names[0] if names else config.model.model
