"""The command line from outside: what is listed, how mistakes are answered."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pippin
from pippin.cli import chat, service
from pippin.cli.main import app, main
from pippin.cli.output import size, table
from pippin.errors import ConfigError, PortInUse


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pippin", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


def fails(capsys: pytest.CaptureFixture[str], *arguments: str, status: int | None = None) -> str:
    """Runs a command that must fail with exactly two lines; returns them."""
    code = main(list(arguments))
    captured = capsys.readouterr()
    assert code == (status or code) != 0
    lines = captured.err.splitlines()
    assert len(lines) == 2, captured.err
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    assert len(lines[1]) > len("hint: ")
    assert captured.out == ""
    return captured.err


def test_help_lists_the_commands():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("serve", "demo", "chat", "models", "bench"):
        assert f"\n  {command} " in result.stdout


@pytest.mark.parametrize(
    "command",
    [["serve"], ["demo"], ["chat"], ["bench", "serve"], ["bench", "latency"],
     ["models", "list"], ["models", "pull"], ["models", "rm"], ["models", "info"]],
)  # fmt: skip
def test_every_command_takes_help(command: list[str]):
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage: " in result.stdout


def test_serve_has_the_flags_of_vllm():
    text = CliRunner().invoke(app, ["serve", "--help"]).stdout
    for flag in (
        "--host", "--port", "--api-key", "--served-model-name", "--dtype", "--max-model-len",
        "--gpu-memory-utilization", "--max-num-seqs", "--max-num-batched-tokens", "-tp", "-pp",
        "-dp", "--tensor-parallel-size", "--distributed-executor-backend",
        "--enable-prefix-caching", "--no-enable-prefix-caching", "--seed", "--config",
        "--backend", "--quantization", "--cpus-per-rank", "--request-timeout",
    ):  # fmt: skip
        assert flag in text, flag


def test_version_and_help_import_nothing_heavy():
    code = (
        "import sys; from pippin.cli.main import main; main(['--help']); main(['--version']);"
        "heavy = {'torch', 'numpy', 'transformers', 'httpx', 'uvicorn', 'zmq', 'rich', 'yaml'};"
        "sys.exit(sorted(heavy & set(sys.modules)) or 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert f"pippin {pippin.__version__}" in result.stdout


def test_without_arguments_it_shows_help():
    result = run()
    assert result.returncode == 0
    assert "Usage: pippin" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serv"], "no such command"),
        (["--colour"], "no such option"),
        (["serve", "--max-modellen", "5"], "--max-model-len"),
        (["serve", "a", "b"], "unexpected extra"),
        (["serve", "--port"], "requires an argument"),
        (["serve", "demo", "--port", "high"], "--port high"),
        (["serve", "demo", "--port", "99999"], "65535"),
        (["serve", "demo", "--dtype", "int3"], "--dtype int3"),
        (["serve", "demo", "--max-model-len", "8kk"], "--max-model-len 8kk"),
        (["serve", "demo", "-dp", "2"], "later release"),
        (["serve", "demo", "--pipeline-split", "3,4"], "names 2 stages, there are 1"),
        (["serve", "demo", "--upstream", "http://x"], "later release"),
        (["serve", "demo", "--model", "b"], "both name a model"),
        (["serve", "--model", "a", "--model", "b"], "several models"),
        (["serve", "--config", "/no/such/file.yaml"], "cannot read"),
        (["models"], "missing command"),
        (["models", "info"], "missing argument"),
        (["bench", "serve", "--request-rate", "0"], "--request-rate"),
        (["bench", "serve", "--num-prompts", "0"], "--num-prompts"),
        (["bench", "serve", "--goodput", "speed:1"], "--goodput"),
        (["bench", "serve", "stray"], "--goodput stray"),
        (["bench", "serve", "--percentile-metrics", "foo"], "--percentile-metrics"),
        (["bench", "serve", "--metric-percentiles", "101"], "--metric-percentiles"),
        (["bench", "serve", "--extra-body", "{"], "--extra-body"),
        (["bench", "serve", "--base-url", "nowhere"], "not a URL"),
        (["bench", "serve", "--ramp-up-strategy", "linear"], "--ramp-up"),
        (["bench", "latency", "--batch-size", "0"], "--batch-size"),
        (["chat", "--dtype", "float32"], "--dtype"),
        (["chat", "--url", "nowhere"], "not a URL"),
        (["chat", "demo", "--url", "http://127.0.0.1:1"], "exclude"),
    ],
)
def test_usage_mistakes_exit_with_two(capsys, arguments: list[str], says: str):
    assert says in fails(capsys, *arguments, status=2)


def test_the_hint_names_the_command(capsys):
    said = fails(capsys, "bench", "serve", "--request-rate", "-1")
    assert "hint: pippin bench serve --help" in said


def test_a_mistake_is_no_traceback_from_outside():
    result = run("serve", "/no/such/model")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: no model at '/no/such/model'")
    assert len(result.stderr.splitlines()) == 2


# --- models that are not there or broken -------------------------------------------------------


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A directory that looks like a model but for its weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("command", [["serve"], ["models", "info"]])
class TestBrokenModels:
    def test_directory_without_config(self, capsys, tmp_path, command):
        assert "config.json" in fails(capsys, *command, str(tmp_path), *self.port(command))

    def test_directory_without_weights(self, capsys, llama, command):
        assert "safetensors" in fails(capsys, *command, str(llama), *self.port(command))

    def test_corrupt_safetensors(self, capsys, llama, command):
        (llama / "model.safetensors").write_bytes(struct.pack("<Q", 10) + b"not json..")
        assert "model.safetensors" in fails(capsys, *command, str(llama), *self.port(command))

    def test_truncated_safetensors(self, capsys, llama, command):
        head = json.dumps({"w": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}).encode()
        (llama / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(100))
        assert "model.safetensors" in fails(capsys, *command, str(llama), *self.port(command))

    def test_config_that_is_no_json(self, capsys, llama, command):
        (llama / "config.json").write_text("{")
        (llama / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
        assert "config.json" in fails(capsys, *command, str(llama), *self.port(command))

    def test_truncated_gguf(self, capsys, tmp_path, command):
        # version 3, one tensor, five metadata entries, and then nothing
        (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 5))
        said = fails(capsys, *command, str(tmp_path / "m.gguf"), *self.port(command))
        assert "m.gguf" in said

    def test_a_file_that_is_no_model(self, capsys, tmp_path, command):
        (tmp_path / "notes.txt").write_text("hello")
        assert "not a model" in fails(
            capsys, *command, str(tmp_path / "notes.txt"), *self.port(command)
        )

    def port(self, command: list[str]) -> list[str]:
        return ["--port", "0"] if command == ["serve"] else []


# --- addresses ----------------------------------------------------------------------------------


@pytest.fixture
def taken_port():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_a_port_in_use_is_named_before_anything_is_loaded(capsys, taken_port: int):
    said = fails(capsys, "serve", "/no/such/model", "--port", str(taken_port), status=1)
    assert f"port {taken_port} on 127.0.0.1 is in use" in said
    assert "--port" in said


def test_bind_finds_a_free_port_and_refuses_foreign_addresses(taken_port: int):
    with service.bind("127.0.0.1", 0) as bound:
        assert bound.getsockname()[1] > 0
    with pytest.raises(PortInUse):
        service.bind("127.0.0.1", taken_port)
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1"):  # a documentation address
        service.bind("203.0.113.1", 0)


def test_bench_and_chat_say_when_nothing_answers(capsys):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = str(closed.getsockname()[1])
        assert "no answer" in fails(capsys, "bench", "serve", "--port", port, status=1)
        said = fails(capsys, "chat", "--url", f"http://127.0.0.1:{port}", status=1)
        assert "pippin serve demo" in said


def test_chat_url_may_end_in_v1():
    with chat._connect("http://127.0.0.1:9/v1/", None) as client:
        assert str(client.base_url) == "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (98_362_432, "98 MB"), (1_500_000_000, "1.5 GB"),
     (999_600, "1 MB"), (2_000_000_000_000, "2.0 TB")],
)  # fmt: skip
def test_sizes(count: int, text: str):
    assert size(count) == text


def test_tables_align():
    assert table([("A", "B"), ("long", "x")]) == "A     B\nlong  x"
