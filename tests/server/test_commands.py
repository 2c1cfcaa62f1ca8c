"""The commands with the demo model, as a user runs them: processes, signals, HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

pytestmark = pytest.mark.model

SMALL = (
    "--max-model-len",
    "2K",
    "--cpus-per-rank",
    "1",
    "--kv-cache-memory-bytes",
    "256M",
    "--dtype",
    "float32",
)
WAIT_S = 280


def pippin(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pippin", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


class Server:
    """A ``pippin serve demo`` on a free port."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pippin", "serve", "demo", "--port", "0", *SMALL],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.summary = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.summary += line
            found = re.search(r"URL +(http://\S+)/v1", line)
            if found:
                self.url = found[1]
                return
        _, errors = self.process.communicate()
        raise AssertionError(f"the server did not start: {errors}")

    @property
    def engine(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def end(self) -> tuple[int, str]:
        """Exit status and standard error."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def stream(self, max_tokens: int) -> Iterator[str]:
        """Text of a long streamed completion."""
        body = {
            "model": "demo",
            "prompt": "Once upon a time",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        with (
            httpx.Client(timeout=WAIT_S, trust_env=False) as client,
            client.stream("POST", f"{self.url}/v1/completions", json=body) as response,
        ):
            for line in response.iter_lines():
                if line:
                    yield line


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.communicate()


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    made = Server()
    yield made
    made.process.terminate()
    made.process.communicate(timeout=60)


def test_demo_says_paris():
    result = pippin("demo", "--exit", *SMALL)
    assert result.returncode == 0, result.stderr
    assert "What is the capital of France?" in result.stdout
    assert "Paris" in result.stdout.split("France?")[1]
    assert re.search(r"KV cache +[\d,]+ tokens", result.stdout)


def test_the_summary_names_model_backend_memory_and_url(shared: Server):
    for fact in ("demo, LlamaForCausalLM", "torch on ", "2,048 tokens a request", "KV cache"):
        assert fact in shared.summary


def test_chat_through_a_pipe(shared: Server):
    result = pippin("chat", "--url", shared.url, "--temperature", "0",
                    stdin="What is the capital of France?\n")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout


@pytest.mark.parametrize("kind", ["openai", "openai-chat"])
def test_bench_serve_writes_its_result(shared: Server, tmp_path: Path, kind: str):
    result = pippin(
        "bench", "serve", "--base-url", shared.url, "--backend", kind, "--tokenizer", "demo",
        "--num-prompts", "4", "--random-input-len", "40", "--random-output-len", "8",
        "--ignore-eos", "--max-concurrency", "2", "--goodput", "ttft:100000", "tpot:100000",
        "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "Successful requests:" in result.stdout
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["completed"], found["failed"]) == (4, 0)
    assert found["total_output_tokens"] == 32
    if kind == "openai":
        assert found["total_input_tokens"] == 160
    else:  # the template adds some
        assert found["total_input_tokens"] > 160
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["p99_ttft_ms"] >= found["p50_ttft_ms"] > 0


def test_bench_latency():
    result = pippin("bench", "latency", "--model", "demo", "--input-len", "8", "--output-len", "4",
                    "--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "1", "--json",
                    *SMALL)  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found["latencies"]) == 2
    assert found["avg_latency"] > 0


def test_models_info_and_list():
    info = json.loads(pippin("models", "info", "demo", "--json").stdout)
    assert (info["format"], info["layers"], info["context_length"]) == ("gguf", 30, 8192)
    listed = json.loads(pippin("models", "list", "--json").stdout)
    assert listed[0]["name"] == "demo"
    assert listed[0]["size_bytes"] == info["size_bytes"]


def test_a_signal_lets_a_stream_finish_and_exits_with_zero(server: Server):
    lines = server.stream(64)
    first = next(lines)
    assert first.startswith("data: {")
    engine = server.engine
    server.process.send_signal(signal.SIGTERM)
    rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    assert server.end()[0] == 0
    assert not engine.is_running()


def test_a_killed_engine_ends_stream_and_server(server: Server):
    lines = server.stream(1500)
    next(lines)
    server.engine.kill()
    rest = "".join(lines)
    assert "killed" in rest
    status, errors = server.end()
    assert status == 1
    assert "error: the engine process was killed" in errors
    assert "Traceback" not in errors


def test_the_engine_does_not_outlive_a_killed_server(server: Server):
    engine = server.engine
    os.kill(server.process.pid, signal.SIGKILL)
    engine.wait(timeout=60)


def test_interrupting_the_load_leaves_nothing_behind():
    process = subprocess.Popen(
        [sys.executable, "-m", "pippin", "serve", "demo", "--port", "0", *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "loading" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output == ""
    assert "Traceback" not in errors
