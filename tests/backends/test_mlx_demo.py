"""The demo model on MLX: torch's tokens, and a live server that bad requests do not kill."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pippin.backends.mlx.runner import load as load_mlx
from pippin.backends.torch.runner import load as load_torch
from pippin.config import Config, ModelConfig, environment
from pippin.models.files import resolve
from pippin.server.tokenizer import load_tokenizer
from pippin.types.step import Chunk, StepPlan

pytestmark = pytest.mark.model

PROMPTS = (
    "The capital of France is",
    "def add(a, b):",
    "Once upon a time",
    "Water boils at",
    "A list of prime numbers: 2, 3, 5,",
    "Dear Sir or Madam,",
    "The opposite of hot is",
    "To make bread, you need",
    "In 1969, the first",
    "SELECT name FROM",
)
STEPS = 64


def greedy(runner: Any, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts in one batch: prefilled together, then decoded together."""
    runner.allocate_kv((8 * len(prompts),), 16)
    outputs: list[list[int]] = [[] for _ in prompts]
    starts = [0] * len(prompts)
    fed = prompts
    for step in range(STEPS):
        chunks = []
        for seq, ids in enumerate(fed):
            first, last = -(-starts[seq] // 16), -(-(starts[seq] + len(ids)) // 16)
            blocks = tuple(8 * seq + i for i in range(first, last))
            chunks.append(Chunk(seq, starts[seq], ids, (blocks,), 1))
            starts[seq] += len(ids)
        logits = runner.execute(StepPlan(step=step, chunks=tuple(chunks)))
        fed = [[token] for token in logits.argmax(1).tolist()]
        for output, ids in zip(outputs, fed, strict=True):
            output += ids
    runner.close()
    return outputs


def test_greedy_tokens_are_torchs() -> None:
    files = resolve("demo", home=environment().home)
    tokenizer = load_tokenizer(files)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    config = Config(model=ModelConfig(model="demo", device="cpu", dtype="float32"))
    own = greedy(load_mlx(config, files), prompts)
    assert own == greedy(load_torch(config, files), prompts)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """``pippin serve demo --backend mlx`` as a user starts it."""
    log = tmp_path_factory.mktemp("mlx") / "stderr.txt"
    command = [sys.executable, "-m", "pippin", "serve", "demo", "--backend", "mlx", "--port", "0"]
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        assert process.stdout is not None
        url = next((line.split()[1] for line in process.stdout if line.split()[:1] == ["URL"]), "")
        assert url, f"the server did not start: {log.read_text()}"
        with httpx.Client(base_url=url, timeout=180) as client:
            yield client
        process.terminate()
        process.stdout.read()
        code = process.wait(60)
    assert code == 0, log.read_text()


def complete(server: httpx.Client, **body: Any) -> httpx.Response:
    return server.post("/completions", json={"model": "demo", "max_tokens": 4, **body})


# Each of these kills mlx_lm.server's generation thread, after which it answers nothing.
def test_a_list_of_prompts(server: httpx.Client) -> None:
    body = {"prompt": ["ab", "The capital of France is"], "temperature": 0}
    choices = complete(server, **body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert "Paris" in choices[1]["text"]


def test_an_empty_prompt(server: httpx.Client) -> None:
    response = complete(server, prompt="", temperature=0)
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert "prompt" in response.json()["error"]["message"]
    assert complete(server, prompt="a").status_code == 200


def test_a_stop_that_is_no_string(server: httpx.Client) -> None:
    response = complete(server, prompt="ab", stop=[1])
    assert response.status_code == 400
    assert "stop" in response.json()["error"]["message"]
    assert complete(server, prompt="a").status_code == 200


def test_a_top_k_beyond_the_vocabulary(server: httpx.Client) -> None:
    body = {"prompt": "ab", "temperature": 1, "seed": 3}
    texts = [complete(server, **body, top_k=k).json()["choices"][0]["text"] for k in (10**6, 0)]
    assert texts[0] == texts[1]
