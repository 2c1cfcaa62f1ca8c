"""Arrivals, data sets, and the streaming client against a tiny server of its own."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from pippin.bench import dataset, http, latency, load
from pippin.bench import serve as bench
from pippin.errors import ConfigError, EngineError, EngineUnavailable
from pippin.types.request import FinishReason, Request, SequenceOutput


def test_an_infinite_rate_sends_all_at_once():
    assert load.arrival_times(load.Traffic(), 5).tolist() == [0.0] * 5


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 8.0, math.inf])
def test_arrivals_keep_the_mean_rate(burstiness: float):
    times = load.arrival_times(load.Traffic(request_rate=4.0, burstiness=burstiness), 400, seed=3)
    assert times[-1] == pytest.approx(100.0)
    assert (np.diff(times) >= 0).all()


def test_burstiness_is_the_shape_of_the_gaps():
    gaps = [
        np.diff(load.arrival_times(load.Traffic(request_rate=1.0, burstiness=b), 4000, seed=1))
        for b in (0.25, 1.0, 4.0)
    ]
    # the coefficient of variation of a gamma distribution is 1 / sqrt(shape)
    variation = [float(gap.std() / gap.mean()) for gap in gaps]
    assert variation == pytest.approx([2.0, 1.0, 0.5], rel=0.1)


def test_linear_and_exponential_ramps():
    linear = load.Traffic(
        ramp_up="linear", ramp_up_start_rps=1, ramp_up_end_rps=5, burstiness=math.inf
    )
    assert np.diff(load.arrival_times(linear, 5)) == pytest.approx([1 / 2, 1 / 3, 1 / 4, 1 / 5])
    exponential = load.Traffic(
        ramp_up="exponential", ramp_up_start_rps=1, ramp_up_end_rps=4, burstiness=math.inf
    )
    assert load.arrival_times(exponential, 3) == pytest.approx([1.0, 1.5, 1.75])


@pytest.mark.parametrize(
    "fields",
    [
        {"request_rate": 0.0},
        {"burstiness": -1.0},
        {"max_concurrency": 0},
        {"ramp_up": "linear"},
        {"ramp_up_start_rps": 1.0},
        {"ramp_up": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 2, "request_rate": 1},
        {"ramp_up": "exponential", "ramp_up_start_rps": 0, "ramp_up_end_rps": 2},
    ],
)
def test_bad_traffic_is_refused(fields: dict):
    with pytest.raises(ConfigError):
        load.Traffic(**fields)


class Syllables:
    """A tokenizer whose words of more than four letters are several tokens, with a BOS."""

    vocab_size = 1000

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [len(word) for word in text.split() for _ in range(1 + (len(word) - 1) // 4)]
        return [0, *ids] if add_special_tokens else ids

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        raise NotImplementedError


@pytest.mark.parametrize("wanted", [2, 17, 128, 1000])
def test_random_prompts_have_the_exact_length(wanted: int):
    prompts = dataset.random_prompts(
        8, input_len=wanted, output_len=7, tokenizer=Syllables(), seed=5
    )
    assert [prompt.prompt_len for prompt in prompts] == [wanted] * 8
    assert [len(Syllables().encode(prompt.text)) for prompt in prompts] == [wanted] * 8
    assert {prompt.output_len for prompt in prompts} == {7}
    assert len({prompt.text for prompt in prompts}) > 4


def test_random_lengths_vary_within_the_ratio_and_by_seed():
    def lengths(seed: int) -> list[int]:
        made = dataset.random_prompts(200, input_len=100, output_len=10, range_ratio=0.2, seed=seed)
        return [prompt.prompt_len for prompt in made]

    assert min(lengths(0)) == 80
    assert max(lengths(0)) == 120
    assert lengths(0) == lengths(0)
    assert lengths(0) != lengths(1)


def test_a_prefix_is_shared():
    made = dataset.random_prompts(3, input_len=5, output_len=1, prefix_len=20)
    prefixes = {tuple(prompt.text.split()[:20]) for prompt in made}
    assert len(prefixes) == 1
    assert [prompt.prompt_len for prompt in made] == [25] * 3


def test_sharegpt_like_lengths_are_those_of_chats():
    made = dataset.sharegpt_like_prompts(2000, seed=0)
    inputs = np.array([prompt.prompt_len for prompt in made])
    outputs = np.array([prompt.output_len for prompt in made])
    assert inputs.max() <= 1024
    assert (inputs + outputs).max() <= 2048
    assert 40 < np.median(inputs) < 80
    assert 100 < np.median(outputs) < 180
    assert inputs.mean() > 1.8 * np.median(inputs)  # a long tail


def test_sharegpt_file(tmp_path):
    long = "word " * 50
    entries = [
        {"conversations": [{"value": long}, {"value": "an answer of five words"}]},
        {"conversations": [{"value": "too short"}, {"value": long}]},
        {"conversations": [{"value": long}]},
    ]
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(entries))
    (found,) = dataset.sharegpt_file(path, 1)
    assert (found.prompt_len, found.output_len) == (50, 5)
    with pytest.raises(ConfigError, match="1 usable"):
        dataset.sharegpt_file(path, 2)
    path.write_text('{"not": "it"}')
    with pytest.raises(ConfigError, match="ShareGPT"):
        dataset.sharegpt_file(path, 1)
    with pytest.raises(ConfigError, match="cannot read"):
        dataset.sharegpt_file(tmp_path / "absent.json", 1)


# --- the client -------------------------------------------------------------------------------

Answer = Callable[[dict, asyncio.StreamWriter], AsyncIterator[None]]


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def answering(*pieces: bytes, bodies: list | None = None, hang: bool = False):
    """A server that sends ``pieces``, one write each, to everybody, and then closes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            int(line.split(":")[1])
            for line in head.split("\r\n")
            if line.lower().startswith("content-length")
        )
        body = await reader.readexactly(length)
        if bodies is not None and body:
            bodies.append((head, json.loads(body)))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if hang:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield http.Target.parse(f"http://127.0.0.1:{port}", "secret")


def ask(*pieces: bytes, timeout: float = 20.0, hang: bool = False, **kwargs):
    async def go():
        async with answering(*pieces, hang=hang) as target:
            return await http.stream(
                target, "/v1/completions", b"{}", prompt_len=3, timeout=timeout, **kwargs
            )

    return asyncio.run(go())


COMPLETION = [
    event(choices=[{"index": 0, "text": "Hel", "finish_reason": None}]),
    event(choices=[{"index": 0, "text": "lo", "finish_reason": "stop"}]),
    event(choices=[], usage={"prompt_tokens": 4, "completion_tokens": 5}),
    b"data: [DONE]\n\n",
]


def whole(events: list[bytes]) -> bytes:
    return HEAD + b"".join(chunk(piece) for piece in events) + b"0\r\n\r\n"


def test_a_stream_is_read_into_a_record():
    record = ask(whole(COMPLETION), keep_text=True)
    assert record.error is None
    assert record.text == "Hello"
    assert len(record.chunk_times) == 2
    assert (record.input_tokens, record.output_tokens) == (4, 5)
    assert record.start <= record.chunk_times[0] <= record.end


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_bytes_may_be_cut_anywhere(size: int):
    data = whole(COMPLETION)
    record = ask(*(data[i : i + size] for i in range(0, len(data), size)), keep_text=True)
    assert (record.error, record.text, record.output_tokens) == (None, "Hello", 5)


def test_chat_deltas_and_reasoning_count_but_the_role_does_not():
    events = [
        event(choices=[{"delta": {"role": "assistant", "content": ""}}]),
        event(choices=[{"delta": {"reasoning_content": "hm"}}]),
        event(choices=[{"delta": {"content": "yes"}}]),
        event(choices=[{"delta": {}, "finish_reason": "stop"}]),
        b"data: [DONE]\n\n",
    ]
    record = ask(whole(events), keep_text=True)
    assert (record.error, record.text, len(record.chunk_times)) == (None, "hmyes", 2)
    assert record.output_tokens == 2


def test_a_body_that_ends_with_the_connection_is_complete():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    assert ask(head, *COMPLETION).error is None


def test_a_broken_stream_is_a_failure():
    record = ask(HEAD + chunk(COMPLETION[0]))
    assert "connection lost" in record.error


def test_an_error_in_the_stream_is_a_failure():
    record = ask(whole([COMPLETION[0], event(error={"message": "the engine died"})]))
    assert "the engine died" in record.error


def test_refusals_and_other_answers_are_failures():
    body = b'{"error": {"message": "queue full"}}'
    refused = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    assert "HTTP 429" in ask(refused).error
    assert "queue full" in ask(refused).error
    assert "not HTTP" in ask(b"SSH-2.0-OpenSSH\r\n\r\n").error
    page = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
    assert "not a stream" in ask(page).error
    assert "unreadable" in ask(whole([b"data: {no json\n\n"])).error


def test_a_silent_server_times_out():
    record = ask(HEAD + chunk(COMPLETION[0]), timeout=0.05, hang=True)
    assert "no complete answer" in record.error


def test_a_closed_port_is_a_failure_not_an_exception():
    async def go():
        async with answering() as target:
            pass
        return await http.stream(target, "/", b"{}", prompt_len=1, timeout=5)

    assert "cannot connect" in asyncio.run(go()).error


def test_a_whole_run_against_a_server(tmp_path):
    bodies: list = []
    prompts = [dataset.Prompt(f"prompt {i}", 2, 5) for i in range(6)]

    async def go():
        async with answering(whole(COMPLETION), bodies=bodies) as target:
            settings = bench.Settings(
                target,
                "m",
                traffic=load.Traffic(max_concurrency=2),
                ignore_eos=True,
                sampling={"temperature": 0.0},
                detailed=True,
                goodput={"ttft": 1e6},
            )
            return await bench.run(settings, prompts)

    result = asyncio.run(go())
    assert (result["completed"], result["failed"]) == (6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (24, 30)
    assert 1 <= result["max_concurrent_requests"] <= 2
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["generated_texts"] == ["Hello"] * 6
    assert result["client_cpu_share"] > 0
    head, body = bodies[-1]
    assert "Authorization: Bearer secret" in head
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["temperature"]) == (5, 0.0)
    # one unmeasured request of its own before the six
    assert len(bodies) == 7
    assert bodies[0][1]["prompt"] not in {prompt.text for prompt in prompts}
    json.dumps(result, allow_nan=False)


def test_the_test_request_must_succeed():
    async def go():
        async with answering(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as target:
            await bench.run(bench.Settings(target, "m"), [dataset.Prompt("a", 1, 1)])

    with pytest.raises(EngineUnavailable, match="404"):
        asyncio.run(go())


def test_find_model():
    body = b'{"data": [{"id": "demo"}]}'
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    async def find(answer: bytes, wanted: str | None = None) -> str:
        async with answering(answer) as target:
            return await bench.find_model(target, wanted)

    assert asyncio.run(find(answer)) == "demo"
    assert asyncio.run(find(b"", "given")) == "given"
    with pytest.raises(ConfigError, match="names no model"):
        asyncio.run(find(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"))
    with pytest.raises(EngineUnavailable):
        asyncio.run(find(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://h:port"])
def test_bad_urls(url: str):
    with pytest.raises(ConfigError):
        http.Target.parse(url)


def test_url_parts():
    target = http.Target.parse("https://example.org/llm/")
    assert (target.host, target.port, target.tls, target.prefix) == (
        "example.org", 443, True, "/llm",
    )  # fmt: skip
    assert http.Target.parse("http://[::1]:8000").url == "http://[::1]:8000"


def test_arrivals_are_kept_in_time_order():
    sent: list[str] = []

    async def send(prompt: dataset.Prompt):
        sent.append(prompt.text)
        return http.Record(1)

    prompts = [dataset.Prompt(str(i), 1, 1) for i in range(3)]
    done = asyncio.run(load.run(prompts, np.array([0.0, 0.01, 0.02]), send))
    assert sent == ["0", "1", "2"]
    assert done.duration >= 0.02
    assert len(done.records) == 3


# --- latency ----------------------------------------------------------------------------------


class CountingEngine:
    """Gives every sequence one token a step."""

    def __init__(self, error: str | None = None) -> None:
        self.left: dict[str, int] = {}
        self.requests: list[Request] = []
        self.error = error

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self.left[request.request_id] = request.max_tokens

    def has_unfinished(self) -> bool:
        return bool(self.left)

    def step(self) -> list[SequenceOutput]:
        outputs = []
        for name in list(self.left):
            self.left[name] -= 1
            reason = FinishReason.LENGTH if self.left[name] == 0 else None
            if self.error:
                reason = FinishReason.ERROR
            if reason:
                del self.left[name]
            outputs.append(
                SequenceOutput(
                    request_id=name, token_ids=[1], finish_reason=reason, error=self.error
                )
            )
        return outputs


def test_latency_of_batches():
    engine = CountingEngine()
    batch = latency.Batch(input_len=4, output_len=3, batch_size=2, num_iters=3, num_iters_warmup=1)
    seen: list[int] = []
    result = latency.measure(engine, batch, vocab_size=50, on_iteration=seen.append)
    assert len(result["latencies"]) == 3
    assert seen == [1, 2, 3, 4]
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert len(engine.requests) == 8
    assert all(len(request.prompt_token_ids) == 4 for request in engine.requests)
    assert all(0 <= t < 50 for request in engine.requests for t in request.prompt_token_ids)
    assert len({tuple(request.prompt_token_ids) for request in engine.requests}) == 8


def test_latency_does_not_count_failed_sequences():
    with pytest.raises(EngineError, match="no memory"):
        latency.measure(CountingEngine("no memory"), latency.Batch(), vocab_size=50)


def test_latency_sizes_are_checked():
    with pytest.raises(ConfigError, match="--batch-size"):
        latency.Batch(batch_size=0)
