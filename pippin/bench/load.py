"""Sends a load: when each request starts (pure), and the run itself."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pippin.bench.dataset import Prompt
from pippin.bench.metrics import Record
from pippin.errors import ConfigError

RampUp = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """How requests arrive."""

    request_rate: float = math.inf
    """Requests a second; infinite: all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of gaps: 1 is a Poisson process, less is burstier."""
    ramp_up: RampUp | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(f"--request-rate {self.request_rate}: expected a number above 0")
        if not self.burstiness > 0:
            raise ConfigError(f"--burstiness {self.burstiness}: expected a number above 0")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency {self.max_concurrency}: expected at least 1")
        ends = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up is None:
            if ends != (None, None):
                raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need a strategy",
                                  hint="add --ramp-up-strategy linear")  # fmt: skip
            return
        if math.isfinite(self.request_rate):
            raise ConfigError("--ramp-up-strategy and --request-rate exclude each other")
        if any(end is None or end < 0 for end in ends) or not ends[1]:
            raise ConfigError(
                "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps above 0"
            )
        if self.ramp_up == "exponential" and not ends[0]:
            raise ConfigError("an exponential ramp must start above 0 requests a second")


def arrival_times(traffic: Traffic, count: int, seed: int = 0) -> np.ndarray:
    """Seconds, from the start, at which each of ``count`` requests is sent: float64 [count].

    As in ``vllm bench serve``: gaps are gamma distributed and, without a ramp, scaled so that the
    last arrival is at ``count / request_rate``.
    """
    if traffic.ramp_up is None and math.isinf(traffic.request_rate):
        return np.zeros(count)
    rates = np.array([_rate(traffic, i, count) for i in range(count)])
    rng = np.random.default_rng(seed)
    with np.errstate(divide="ignore"):
        mean_gaps = np.where(rates > 0, 1.0 / rates, 0.0)
    if math.isinf(traffic.burstiness):
        gaps = mean_gaps
    else:
        gaps = rng.gamma(traffic.burstiness, 1.0, size=count) * mean_gaps / traffic.burstiness
    times = np.cumsum(gaps)
    if traffic.ramp_up is None and times[-1] > 0:
        times *= count / traffic.request_rate / times[-1]
    return times


def _rate(traffic: Traffic, index: int, count: int) -> float:
    if traffic.ramp_up is None:
        return traffic.request_rate
    assert traffic.ramp_up_start_rps is not None
    assert traffic.ramp_up_end_rps is not None
    start, end = traffic.ramp_up_start_rps, traffic.ramp_up_end_rps
    progress = index / max(count - 1, 1)
    if traffic.ramp_up == "linear":
        return start + (end - start) * progress
    return float(start * (end / start) ** progress)


@dataclass(frozen=True, slots=True)
class Run:
    records: list[Record]
    """In the order of the prompts."""
    duration: float
    """Seconds from the first request to the end of the last."""
    client_cpu_share: float
    """CPU time of this process over ``duration``: 1.0 is one core kept busy by the client."""


async def run(
    prompts: Sequence[Prompt],
    arrivals: np.ndarray,
    send: Callable[[Prompt], Awaitable[Record]],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[Record], None] = lambda record: None,
) -> Run:
    """Send every prompt at its time (later where ``max_concurrency`` are in flight already)."""
    slots = asyncio.Semaphore(max_concurrency or max(1, len(prompts)))

    async def one(prompt: Prompt) -> Record:
        async with slots:
            record = await send(prompt)
        on_done(record)
        return record

    gc.collect()
    gc.disable()  # a collection in the client would show up as a gap between tokens
    started, cpu_started = time.perf_counter(), time.process_time()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for prompt, arrival in zip(prompts, arrivals, strict=True):
                ahead = started + float(arrival) - time.perf_counter()
                if ahead > 0:
                    await asyncio.sleep(ahead)
                tasks.append(group.create_task(one(prompt)))
    finally:
        gc.enable()
    duration = time.perf_counter() - started
    cpu = time.process_time() - cpu_started
    return Run([task.result() for task in tasks], duration, cpu / duration if duration else 0.0)
