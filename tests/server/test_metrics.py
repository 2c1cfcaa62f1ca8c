"""Metrics under vLLM's names."""

from __future__ import annotations

import math

from conftest import Start
from prometheus_client.parser import text_string_to_metric_families
from server_fakes import FakeEngine, LiveServer

from pippin.server.metrics import Histogram, Metrics, SequenceTimes, one_two_five

NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
    "cache_config_info",
}


def test_bounds() -> None:
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(99) == (1, 2, 5, 10, 20, 50)


def test_a_value_on_a_bound_belongs_to_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    histogram.observe(0.5, times=2)
    assert histogram.buckets() == [("1.0", 3), ("2.0", 5), ("+Inf", 6)]
    assert histogram.total == 8.5


def test_times_of_a_sequence() -> None:
    engine = FakeEngine()
    metrics = Metrics(engine.ready, "m", lambda: engine.stats, lambda: 0)
    times = SequenceTimes(metrics, arrival=100.0, prompt_tokens=7)
    times.tokens(101.0, 1, queue_seconds=0.25, cached=4)
    times.tokens(101.5, 2, queue_seconds=9.0, cached=9)
    times.tokens(101.5, 0, queue_seconds=0.0, cached=0)
    times.end(101.5, "stop")
    assert metrics.time_to_first_token.total == 1.0
    assert metrics.inter_token.total == 0.5
    assert sum(metrics.inter_token.counts) == 2
    assert metrics.queue.total == 0.25
    assert metrics.prefill.total == 0.75
    assert metrics.decode.total == 0.5
    assert metrics.inference.total == 1.25
    assert metrics.e2e.total == 1.5
    assert metrics.per_output_token.total == 0.25
    assert (metrics.prompt_tokens, metrics.cached_prompt_tokens) == (7, 4)
    assert metrics.generation_tokens == 3
    assert metrics.finished["stop"] == 1


def test_a_sequence_without_a_token_has_no_phases() -> None:
    engine = FakeEngine()
    metrics = Metrics(engine.ready, "m", lambda: engine.stats, lambda: 0)
    SequenceTimes(metrics, arrival=1.0, prompt_tokens=7).end(3.0, "abort")
    assert metrics.e2e.total == 2.0
    assert sum(metrics.prefill.counts) == 0
    assert metrics.finished["abort"] == 1


def read(server: LiveServer) -> dict[str, float]:
    answer = server.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    values = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            if "engine" in sample.labels and family.name != "vllm:cache_config_info":
                assert sample.labels["model_name"] == "fake"
            values[sample.name + ("" if not labels else str(sorted(labels.items())))] = sample.value
    return values


def test_names_and_values_over_http(start: Start) -> None:
    server = start()
    server.complete("abc", max_tokens=4, n=2)
    server.complete("abc", max_tokens=100, temperature=0, stop="quick")
    server.complete("abc", max_tokens=-1)
    text = server.client.get("/metrics").text
    families = {family.name for family in text_string_to_metric_families(text)}
    assert {f"vllm:{name}" for name in NAMES} <= families
    values = read(server)
    assert values["vllm:prompt_tokens_total"] == 9
    assert values["vllm:generation_tokens_total"] == 8 + 9
    assert values["vllm:request_success_total[('finished_reason', 'length')]"] == 2
    assert values["vllm:request_success_total[('finished_reason', 'stop')]"] == 1
    assert values["vllm:e2e_request_latency_seconds_count"] == 3
    assert values["vllm:request_generation_tokens_sum"] == 17
    assert values["vllm:num_requests_running"] == 0
    assert values["vllm:iteration_tokens_total_count"] > 0
    assert values["vllm:time_to_first_token_seconds_bucket[('le', '+Inf')]"] == 3
    assert all(math.isfinite(value) for value in values.values())
