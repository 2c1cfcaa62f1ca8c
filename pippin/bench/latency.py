"""``pippin bench latency``: seconds for one batch, in this process, without server or tokenizer.

Fields as in ``vllm bench latency``: ``avg_latency``, ``latencies``, ``percentiles``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pippin.errors import ConfigError, EngineError
from pippin.types.request import FinishReason, Request, SamplingParams, SequenceOutput

_PERCENTILES = (10, 25, 50, 75, 90, 99)


class Engine(Protocol):
    def add(self, request: Request) -> None: ...
    def step(self) -> list[SequenceOutput]: ...
    def has_unfinished(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Batch:
    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    num_iters: int = 10
    num_iters_warmup: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "batch_size", "num_iters"):
            if getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} {getattr(self, name)}: expected at least 1")


def measure(
    engine: Engine,
    batch: Batch,
    *,
    vocab_size: int,
    on_iteration: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Run ``batch`` again and again; every iteration has prompts of its own (no prefix cache)."""
    rng = np.random.default_rng(batch.seed)
    names = itertools.count()
    latencies = []
    for iteration in range(batch.num_iters_warmup + batch.num_iters):
        prompts = rng.integers(0, vocab_size, size=(batch.batch_size, batch.input_len)).tolist()
        started = time.perf_counter()
        for prompt in prompts:
            engine.add(_request(f"latency-{next(names)}", prompt, batch.output_len))
        _drain(engine)
        if iteration >= batch.num_iters_warmup:
            latencies.append(time.perf_counter() - started)
        on_iteration(iteration + 1)
    found = np.percentile(latencies, _PERCENTILES)
    average = float(np.mean(latencies))
    return {
        "avg_latency": average,
        "latencies": latencies,
        "percentiles": {str(p): float(v) for p, v in zip(_PERCENTILES, found, strict=True)},
        "input_len": batch.input_len,
        "output_len": batch.output_len,
        "batch_size": batch.batch_size,
        "output_throughput": batch.batch_size * batch.output_len / average,
    }


def as_text(result: dict[str, Any]) -> str:
    lines = [f"Avg latency: {result['avg_latency']:.4f} s"]
    lines += [f"{p}% percentile latency: {v:.4f} s" for p, v in result["percentiles"].items()]
    return "\n".join([*lines, f"Output throughput: {result['output_throughput']:.1f} tok/s"])


def _request(name: str, prompt: list[int], output_len: int) -> Request:
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=output_len)
    return Request(
        request_id=name, prompt_token_ids=prompt, params=params, seed=0, max_tokens=output_len
    )


def _drain(engine: Engine) -> None:
    while engine.has_unfinished():
        for output in engine.step():
            if output.finish_reason is FinishReason.ERROR:
                raise EngineError(output.error or "a sequence ended with an error")
