"""Fixtures of the server's tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from server_fakes import FakeEngine, LiveServer, make_tokenizer

from pippin import config
from pippin.clock import Clock

Start = Callable[..., LiveServer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start servers with some configuration; they end with the test."""
    servers: list[LiveServer] = []

    def start(
        tokenizer: dict[str, Any] | None = None, clock: Clock | None = None, **sections: Any
    ) -> LiveServer:
        sections.setdefault("model", {"model": "fake"})
        made = LiveServer(
            config.build(sections), FakeEngine(), make_tokenizer(**tokenizer or {}), clock
        )
        servers.append(made)
        return made

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def shared() -> Iterator[LiveServer]:
    made = LiveServer(config.build({"model": {"model": "fake"}}), FakeEngine(), make_tokenizer())
    yield made
    made.close()


@pytest.fixture
def server(shared: LiveServer) -> Iterator[LiveServer]:
    """One server for all tests that change nothing of it; its engine begins anew with each."""
    shared.engine.reset()
    yield shared
    assert shared.app.service.admission.in_flight == 0
    assert not shared.engine.running


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``pippin serve demo`` as a user starts it; its root URL."""
    log = tmp_path_factory.mktemp("live") / "stderr.txt"
    command = [sys.executable, "-m", "pippin", "serve", "demo", "--port", "0"]
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        assert process.stdout is not None
        url = next((line.split()[1] for line in process.stdout if line.split()[:1] == ["URL"]), "")
        assert url, f"the server did not start: {log.read_text()}"
        yield url.removesuffix("/v1")
        process.terminate()
        process.stdout.read()
        code = process.wait(60)
    assert code == 0, log.read_text()
