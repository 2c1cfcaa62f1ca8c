"""``/metrics``: vLLM's names, labels and meanings, so that dashboards made for vLLM work.

Counters are plain numbers that a collector reads when scraped; an observation on the hot path is
a bisection and two additions.

Source: https://docs.vllm.ai/en/latest/design/metrics/
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pippin.types.message import Ready
from pippin.types.request import FinishReason
from pippin.types.step import SchedulerStats

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

# Bounds of vLLM's histograms, in seconds and tokens.
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_PER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, … up to ``largest``."""
    bounds: list[float] = []
    scale = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * scale > largest:
                return tuple(bounds)
            bounds.append(mantissa * scale)
        scale *= 10


class Histogram:
    """Counts of values at most each bound (not cumulative until they are scraped)."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        made: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            made.append(("+Inf" if bound == float("inf") else repr(float(bound)), running))
        return made


class Metrics(Collector):
    """What the server has seen, and the engine's last report (``stats``, read when scraped)."""

    def __init__(
        self,
        ready: Ready,
        model_name: str,
        stats: Callable[[], SchedulerStats],
        rejections: Callable[[], int],
    ) -> None:
        self._stats = stats
        self._rejections = rejections
        self._labels = {"model_name": model_name, "engine": "0"}
        self._cache_config = {
            "block_size": str(ready.block_size),
            "num_gpu_blocks": str(ready.num_blocks[0] if ready.num_blocks else 0),
            "num_kv_tokens": str(ready.kv_tokens),
            "kv_cache_bytes": str(ready.kv_bytes),
            "cache_dtype": ready.dtype,
            "engine": "0",
        }
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = {reason.value: 0 for reason in FinishReason}
        lengths = one_two_five(ready.max_model_len)
        self.time_to_first_token = Histogram(_FIRST_TOKEN)
        self.inter_token = Histogram(_PER_TOKEN)
        self.per_output_token = Histogram(_PER_TOKEN)
        self.e2e = Histogram(_LATENCY)
        self.queue = Histogram(_LATENCY)
        self.prefill = Histogram(_LATENCY)
        self.decode = Histogram(_LATENCY)
        self.inference = Histogram(_LATENCY)
        self.request_prompt_tokens = Histogram(lengths)
        self.request_generation_tokens = Histogram(lengths)
        self.request_max_tokens = Histogram(lengths)
        self.request_n = Histogram((1, 2, 5, 10, 20))
        self.iteration_tokens = Histogram(_ITERATION)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def observe_step(self, stats: SchedulerStats) -> None:
        """Once a step of the engine."""
        if stats.num_tokens:
            self.iteration_tokens.observe(stats.num_tokens)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        gauges = (
            ("num_requests_running", "Number of requests in model execution.", stats.num_running),
            ("num_requests_waiting", "Number of requests waiting.", stats.num_waiting),
            ("kv_cache_usage_perc", "KV-cache usage; 1 means 100 percent.", stats.kv_cache_usage),
            ("gpu_cache_usage_perc", "Older name of kv_cache_usage_perc.", stats.kv_cache_usage),
        )
        for name, text, value in gauges:
            yield self._gauge(name, text, value)
        counters = (
            ("num_preemptions", "Preemptions.", stats.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found cached.", stats.prefix_cache_hits),
            ("prompt_tokens", "Prefill tokens processed.", self.prompt_tokens),
            ("prompt_tokens_cached", "Of them, found cached.", self.cached_prompt_tokens),
            ("generation_tokens", "Generation tokens processed.", self.generation_tokens),
            ("admission_rejections", "Requests answered 429.", self._rejections()),
        )
        for name, text, value in counters:
            yield self._counter(name, text, value)
        success = CounterMetricFamily(
            "vllm:request_success",
            "Requests that ended, by reason.",
            labels=(*self._labels, "finished_reason"),
        )
        for reason, count in self.finished.items():
            success.add_metric((*self._labels.values(), reason), count)
        yield success
        if stats.busy:
            yield self._busy(stats.busy)
        for name, text, histogram in self._histograms():
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=tuple(self._labels))
            family.add_metric(
                tuple(self._labels.values()), histogram.buckets(), sum_value=histogram.total
            )
            yield family
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's settings.", labels=tuple(self._cache_config)
        )
        info.add_metric(tuple(self._cache_config.values()), 1)
        yield info

    def _histograms(self) -> tuple[tuple[str, str, Histogram], ...]:
        per_token = "Seconds per output token of a request, after the first."
        return (
            ("time_to_first_token_seconds", "Time to first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Time between tokens.", self.inter_token),
            ("time_per_output_token_seconds", "Older name of the former.", self.inter_token),
            ("request_time_per_output_token_seconds", per_token, self.per_output_token),
            ("e2e_request_latency_seconds", "End to end latency.", self.e2e),
            ("request_queue_time_seconds", "Time spent waiting.", self.queue),
            ("request_prefill_time_seconds", "Time spent in prefill.", self.prefill),
            ("request_decode_time_seconds", "Time spent in decode.", self.decode),
            ("request_inference_time_seconds", "Time spent running.", self.inference),
            ("request_prompt_tokens", "Prompt tokens.", self.request_prompt_tokens),
            ("request_generation_tokens", "Generated tokens.", self.request_generation_tokens),
            ("request_params_max_tokens", "max_tokens asked for.", self.request_max_tokens),
            ("request_params_n", "n asked for.", self.request_n),
            ("iteration_tokens_total", "Tokens of a step.", self.iteration_tokens),
        )

    def _busy(self, ratios: Sequence[float]) -> Metric:
        family = GaugeMetricFamily(
            "pippin_stage_busy_ratio",
            "Time computing over time passed, a stage of the pipeline.",
            labels=(*self._labels, "rank"),
        )
        for rank, ratio in enumerate(ratios):
            family.add_metric((*self._labels.values(), str(rank)), ratio)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family


class SequenceTimes:
    """Times of one sequence, from arrival to ending, handed to ``Metrics`` as they are known."""

    __slots__ = ("_arrival", "_first", "_last", "_metrics", "_queue", "num_tokens", "prompt_tokens")

    def __init__(self, metrics: Metrics, arrival: float, prompt_tokens: int) -> None:
        """``arrival`` is a reading of the same monotonic clock as the later times."""
        self._metrics = metrics
        self._arrival = arrival
        self._first: float | None = None
        self._last = arrival
        self._queue = 0.0
        self.num_tokens = 0
        self.prompt_tokens = prompt_tokens

    def tokens(self, now: float, count: int, queue_seconds: float, cached: int) -> None:
        """``count`` tokens have come; the last two arguments count with the first output only."""
        metrics = self._metrics
        if self._first is None:
            self._first = now
            self._queue = queue_seconds
            metrics.time_to_first_token.observe(now - self._arrival)
            metrics.prompt_tokens += self.prompt_tokens
            metrics.cached_prompt_tokens += cached
        elif count:
            metrics.inter_token.observe((now - self._last) / count, count)
        self._last = now
        self.num_tokens += count
        metrics.generation_tokens += count

    def end(self, now: float, reason: str) -> None:
        metrics = self._metrics
        metrics.finished[reason] += 1
        metrics.e2e.observe(now - self._arrival)
        metrics.request_prompt_tokens.observe(self.prompt_tokens)
        metrics.request_generation_tokens.observe(self.num_tokens)
        if self._first is None:
            return
        started = self._arrival + self._queue
        metrics.queue.observe(self._queue)
        metrics.prefill.observe(max(self._first - started, 0.0))
        metrics.decode.observe(self._last - self._first)
        metrics.inference.observe(max(self._last - started, 0.0))
        if self.num_tokens > 1:
            metrics.per_output_token.observe((self._last - self._first) / (self.num_tokens - 1))
