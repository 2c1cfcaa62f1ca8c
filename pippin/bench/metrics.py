"""What a load test says, from the records of its requests. Pure.

Names and meanings are those of ``vllm bench serve``; where ours differ the docstring says so.

Source: https://docs.vllm.ai/en/latest/contributing/benchmarks/ (vllm/benchmarks/serve.py)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

METRICS = ("ttft", "tpot", "itl", "e2el")

TITLES: Mapping[str, str] = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (without the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


@dataclass(slots=True)
class Record:
    """One request as the client saw it. Times are seconds of one monotonic clock."""

    prompt_len: int
    """Tokens of the prompt as the data set counts them."""
    start: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    """Arrivals of chunks that carried output text."""
    end: float = 0.0
    """Arrival of the last chunk with a choice (text or finish reason)."""
    usage_prompt_tokens: int | None = None
    usage_completion_tokens: int | None = None
    text: str = ""
    error: str | None = None
    """Why the request failed; None where it ended well."""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def input_tokens(self) -> int:
        """As the server counted them, else as the data set did."""
        return self.prompt_len if self.usage_prompt_tokens is None else self.usage_prompt_tokens

    @property
    def output_tokens(self) -> int:
        """As the server counted them, else one for each chunk with text."""
        counted = self.usage_completion_tokens
        return len(self.chunk_times) if counted is None else counted

    @property
    def ttft(self) -> float:
        return (self.chunk_times[0] if self.chunk_times else self.end) - self.start

    @property
    def latency(self) -> float:
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """None where there is no second token."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Gaps between chunks with text; a server may put several tokens into one chunk."""
        times = self.chunk_times
        return [b - a for a, b in itertools.pairwise(times)]


def summarise(
    records: Sequence[Record],
    duration: float,
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (50.0, 99.0),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The fields of the result file.

    ``duration``: seconds from the first request's start to the last one's end. ``goodput``: limits
    in ms by metric (``ttft``, ``tpot``, ``e2el``); a request is good when it keeps all of them.
    Throughputs count completed requests only.
    """
    done = [record for record in records if record.ok]
    input_tokens = sum(record.input_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    chunks = sum(len(record.chunk_times) for record in done)
    rate = 1.0 / duration if duration > 0 else 0.0
    result: dict[str, Any] = {
        "completed": len(done),
        "failed": len(records) - len(done),
        "duration": duration,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) * rate,
        "request_goodput": None if not goodput else count_good(done, goodput) * rate,
        "output_throughput": output_tokens * rate,
        "total_token_throughput": (input_tokens + output_tokens) * rate,
        "max_output_tokens_per_s": peak_tokens_per_second(done),
        "max_concurrent_requests": peak_concurrency(records),
        "output_tokens_counted_by": _counted_by(done),
        "total_output_chunks": chunks,
    }
    values: dict[str, list[float]] = {
        "ttft": [record.ttft for record in done],
        "tpot": [tpot for record in done if (tpot := record.tpot) is not None],
        "itl": [gap for record in done for gap in record.itls],
        "e2el": [record.latency for record in done],
    }
    for name in metrics:
        result.update(_statistics(name, values[name], percentiles))
    return result


def percentile_name(percentile: float) -> str:
    """``p99``, ``p99.9``."""
    return f"p{percentile:g}"


def count_good(records: Sequence[Record], limits_ms: Mapping[str, float]) -> int:
    """Requests that keep every limit; one without a second token has a tpot of 0."""
    good = 0
    for record in records:
        seen = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
        good += all(seen[name] * 1e3 <= limit for name, limit in limits_ms.items())
    return good


def peak_concurrency(records: Sequence[Record]) -> int:
    """Most requests in flight at one instant (vLLM counts those that touch the same second)."""
    events = [(record.start, 1) for record in records] + [(record.end, -1) for record in records]
    peak = running = 0
    for _, change in sorted(events):
        running += change
        peak = max(peak, running)
    return peak


def peak_tokens_per_second(records: Sequence[Record]) -> float:
    """Output tokens in the busiest second, seconds counted from the first request's start.

    A request's tokens are spread evenly over its chunks.
    """
    if not records:
        return 0.0
    origin = min(record.start for record in records)
    last = max((record.chunk_times[-1] for record in records if record.chunk_times), default=origin)
    buckets = np.zeros(math.floor(last - origin) + 1)
    for record in records:
        if record.chunk_times:
            seconds = (np.asarray(record.chunk_times) - origin).astype(int)
            np.add.at(buckets, seconds, record.output_tokens / len(record.chunk_times))
    return float(buckets.max())


def _statistics(
    name: str, seconds: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float]:
    ms = np.asarray(seconds if len(seconds) else [0.0]) * 1e3
    found = {
        f"mean_{name}_ms": float(ms.mean()),
        f"median_{name}_ms": float(np.median(ms)),
        f"std_{name}_ms": float(ms.std()),
    }
    for percentile in percentiles:
        found[f"{percentile_name(percentile)}_{name}_ms"] = float(np.percentile(ms, percentile))
    return found


def _counted_by(records: Sequence[Record]) -> str:
    sources = {
        "chunks" if record.usage_completion_tokens is None else "usage" for record in records
    }
    return "mixed" if len(sources) > 1 else next(iter(sources), "usage")
