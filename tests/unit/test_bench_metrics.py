"""Bench metrics on synthetic records whose answers are known by hand."""

from __future__ import annotations

import math

import pytest

from pippin.bench import report
from pippin.bench.metrics import (
    Record,
    count_good,
    peak_concurrency,
    peak_tokens_per_second,
    percentile_name,
    summarise,
)


def record(start: float, chunks: list[float], *, tokens: int | None = None, **fields) -> Record:
    return Record(
        prompt_len=10,
        start=start,
        chunk_times=chunks,
        end=chunks[-1] if chunks else start,
        usage_completion_tokens=tokens,
        **fields,
    )


def two_records() -> list[Record]:
    return [
        record(0.0, [0.1, 0.2, 0.4], tokens=3),
        record(1.0, [1.5, 1.6], tokens=2),
    ]


def test_counts_and_throughputs():
    result = summarise([*two_records(), record(0.0, [], error="refused")], 2.0)
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 5)
    assert result["request_throughput"] == 1.0
    assert result["output_throughput"] == 2.5
    assert result["total_token_throughput"] == 12.5
    assert result["request_goodput"] is None


def test_latencies():
    result = summarise(two_records(), 2.0, percentiles=(50, 99))
    assert result["mean_ttft_ms"] == pytest.approx(300)
    assert result["median_ttft_ms"] == pytest.approx(300)
    assert result["std_ttft_ms"] == pytest.approx(200)
    assert result["p99_ttft_ms"] == pytest.approx(496)  # linear between 100 and 500
    # (0.4 - 0.1) / 2 and (1.6 - 1.5) / 1
    assert result["mean_tpot_ms"] == pytest.approx(125)
    # gaps of 100, 200 and 100 ms
    assert result["mean_itl_ms"] == pytest.approx(400 / 3)
    assert result["p50_itl_ms"] == pytest.approx(100)
    assert result["mean_e2el_ms"] == pytest.approx(500)


def test_only_the_chosen_metrics_are_reported():
    result = summarise(two_records(), 2.0, metrics=("ttft",), percentiles=(99.9,))
    reported = {key for key in result if key.endswith("_ms")}
    assert reported == {"mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99.9_ttft_ms"}


def test_one_token_answers_have_no_time_per_output_token():
    only = record(0.0, [0.2], tokens=1)
    assert only.tpot is None
    result = summarise([only, record(0.0, [0.1, 0.3], tokens=2)], 1.0)
    assert result["mean_tpot_ms"] == pytest.approx(200)


def test_tokens_without_usage_are_counted_by_chunk():
    result = summarise([record(0.0, [0.1, 0.2])], 1.0)
    assert result["total_output_tokens"] == 2
    assert result["output_tokens_counted_by"] == "chunks"
    mixed = summarise([record(0.0, [0.1, 0.2]), record(0.0, [0.1], tokens=4)], 1.0)
    assert mixed["total_output_tokens"] == 6
    assert mixed["output_tokens_counted_by"] == "mixed"


def test_usage_of_the_prompt_wins_over_the_data_set():
    found = summarise([record(0.0, [0.1], tokens=1, usage_prompt_tokens=33)], 1.0)
    assert found["total_input_tokens"] == 33


def test_goodput_needs_every_limit():
    records = two_records()
    assert count_good(records, {"ttft": 200.0}) == 1
    assert count_good(records, {"ttft": 200.0, "tpot": 100.0}) == 0
    assert count_good(records, {"e2el": 700.0, "ttft": 501.0}) == 2
    assert summarise(records, 2.0, goodput={"ttft": 200.0})["request_goodput"] == 0.5


def test_peak_concurrency_counts_instants():
    records = [record(0.0, [1.0]), record(0.5, [2.0]), record(1.0, [3.0]), record(2.5, [2.6])]
    # the first ends at the very moment at which the third starts
    assert peak_concurrency(records) == 2
    assert peak_concurrency([]) == 0


def test_peak_tokens_per_second_spreads_tokens_over_chunks():
    records = [record(10.0, [10.5, 11.5], tokens=8), record(10.2, [11.1, 11.2, 11.9], tokens=3)]
    assert peak_tokens_per_second(records) == pytest.approx(4 + 3)
    assert peak_tokens_per_second([]) == 0.0


def test_nothing_completed_is_a_result_too():
    result = summarise([record(0.0, [], error="gone")], 0.0)
    assert result["completed"] == 0
    assert result["mean_ttft_ms"] == 0.0
    assert result["output_throughput"] == 0.0


@pytest.mark.parametrize(("value", "name"), [(99.0, "p99"), (99.9, "p99.9"), (50, "p50")])
def test_percentile_names(value: float, name: str):
    assert percentile_name(value) == name


def test_text_report_has_the_fields_and_notes_missing_usage():
    result = summarise([record(0.0, [0.1, 0.2])], 1.0)
    text = report.as_text(result)
    assert "Successful requests:" in text
    assert "P99 TTFT (ms):" in text
    assert "a chunk of text counts as a token" in text


def test_text_report_notes_chunks_of_several_tokens():
    text = report.as_text(summarise([record(0.0, [0.1, 0.2], tokens=8)], 1.0))
    assert "8 tokens came in 2 chunks" in text


def test_json_is_strict_and_an_infinite_rate_is_a_word():
    assert (
        report.as_json({"request_rate": math.inf, "a": None})
        == '{"request_rate": "inf", "a": null}'
    )


def test_default_filename():
    name = report.default_filename("openai", math.inf, 4, "org/model")
    assert name.startswith("openai-infqps-concurrency4-model-")
    assert name.endswith(".json")
