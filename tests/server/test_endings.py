"""Every accepted request gets exactly one ending, whoever ends it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from conftest import Start
from server_fakes import LiveServer, ids

from pippin.clock import FakeClock
from pippin.server import generation, http

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


class Background:
    """A request in a thread; ``answer`` waits for it."""

    def __init__(self, server: LiveServer, body: dict[str, Any]) -> None:
        self._got: list[httpx.Response | httpx.HTTPError] = []

        def run() -> None:
            try:
                self._got.append(httpx.post(server.base + COMPLETIONS, json=body, timeout=30))
            except httpx.HTTPError as error:
                self._got.append(error)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def answer(self) -> httpx.Response:
        self._thread.join(30)
        (got,) = self._got
        assert isinstance(got, httpx.Response), got
        return got


@contextlib.contextmanager
def open_connection(server: LiveServer, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request on a bare socket, so that the test decides when to hang up."""
    data = msgspec.json.encode(body)
    with socket.create_connection(("127.0.0.1", int(server.base.rpartition(":")[2]))) as connection:
        connection.settimeout(10)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data)
            + data
        )
        yield connection


def wait_idle(server: LiveServer) -> None:
    """Let the server's loop run until nothing is in flight there."""

    async def idle() -> None:
        while server.app.service.admission.in_flight:
            await asyncio.sleep(0.001)

    asyncio.run_coroutine_threadsafe(idle(), server.loop).result(10)


# -- the client leaves


def test_a_client_that_leaves_a_stream(start: Start) -> None:
    server = start()
    server.engine.pace_s = 0.005
    with open_connection(server, ENDLESS | {"stream": True}) as connection:
        got = b""
        while got.count(b"data: ") < 3:
            got += connection.recv(4096)
    assert server.engine.aborted.get(timeout=10) == server.engine.requests[0].request_id
    wait_idle(server)
    assert server.app.service.metrics.finished["abort"] == 1
    assert server.app.service.metrics.finished["length"] == 0
    assert server.client.get("/metrics").text.count("num_requests_running{") == 1


def test_a_client_that_leaves_before_the_answer(start: Start) -> None:
    server = start()
    server.call(server.engine.hold)
    with open_connection(server, ENDLESS | {"n": 3}):
        for _ in range(3):
            server.engine.started.get(timeout=10)
    assert {server.engine.aborted.get(timeout=10) for _ in range(3)} == {
        request.request_id for request in server.engine.requests
    }
    wait_idle(server)
    assert server.app.service.metrics.finished["abort"] == 3


def test_a_client_that_leaves_while_it_sends(server: LiveServer) -> None:
    port = int(server.base.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
    assert server.complete("a", max_tokens=1).status_code == 200


def test_many_clients_come_and_go(start: Start) -> None:
    """Some are answered, some hang up: nothing is left behind."""
    server = start()
    server.engine.pace_s = 0.001
    stay = [Background(server, ENDLESS | {"max_tokens": 20, "n": 2}) for _ in range(8)]
    for _ in range(8):
        with open_connection(server, ENDLESS | {"stream": True}) as connection:
            connection.recv(100)
    assert {answer.answer().status_code for answer in stay} == {200}
    wait_idle(server)
    assert not server.engine.running
    finished = server.app.service.metrics.finished
    assert (finished["length"], finished["abort"]) == (16, 8)


# -- the engine gives up


def test_an_error_before_the_first_token_has_a_status(server: LiveServer) -> None:
    server.engine.errors = {0: "out of blocks"}
    for stream in (False, True):
        answer = server.complete("a", stream=stream)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "engine_error"
        assert "out of blocks" in answer.json()["error"]["message"]


def test_an_error_in_a_stream_is_its_last_event(server: LiveServer) -> None:
    server.engine.errors = {3: "out of blocks"}
    events = server.events(COMPLETIONS, ENDLESS)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "The"
    assert "out of blocks" in events[-1]["error"]["message"]
    assert events[-1]["error"]["type"] == "server_error"
    plain = server.post(COMPLETIONS, ENDLESS)
    assert plain.status_code == 500


def test_one_failed_choice_ends_all(server: LiveServer) -> None:
    server.engine.errors = {1: "lost"}
    assert server.complete("a", n=3, max_tokens=5).status_code == 500
    assert not server.engine.running


# -- time is up


def test_a_deadline_before_the_first_token(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "DEADLINE_GRACE_S", 0.0)
    server = start(server={"request_timeout": 0.05})
    server.call(server.engine.hold)
    for stream in (False, True):
        answer = server.complete("a", stream=stream)
        assert answer.status_code == 408
        assert answer.json()["error"]["type"] == "timeout_error"
    assert server.engine.aborted.get(timeout=10)
    assert server.app.service.metrics.finished["error"] == 2


def test_a_deadline_in_a_stream(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "DEADLINE_GRACE_S", 0.0)
    server = start(server={"request_timeout": 2.0})
    server.engine.hold_at = 2
    events = server.events(COMPLETIONS, ENDLESS)
    assert len(events) == 3
    assert events[-1]["error"]["code"] == "request_timeout"


def test_the_engines_own_deadline_is_a_timeout(start: Start) -> None:
    """The engine ends a request at its deadline with an error: the client reads 408."""
    clock = FakeClock(1000.0)
    server = start(server={"request_timeout": 5.0}, clock=clock)
    server.call(server.engine.hold)
    waiting = Background(server, {"prompt": "a"})
    server.engine.started.get(timeout=10)
    server.engine.errors = {0: "deadline passed"}
    clock.advance(6.0)
    server.call(server.engine.let_go)
    assert waiting.answer().status_code == 408


# -- the queue is full


def test_a_full_queue(start: Start) -> None:
    server = start(scheduler={"max_num_seqs": 1, "max_num_queued_reqs": 2})
    server.call(server.engine.hold)
    first = Background(server, {"prompt": "a", "n": 2})
    for _ in range(2):
        server.engine.started.get(timeout=10)
    refused = server.complete(["a", "b"])
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert server.complete("a", n=4).status_code == 400
    second = Background(server, {"prompt": "a"})
    server.engine.started.get(timeout=10)
    assert server.complete("a").status_code == 429
    server.call(server.engine.let_go)
    assert first.answer().status_code == 200
    assert second.answer().status_code == 200
    assert server.complete("a").status_code == 200
    text = server.client.get("/metrics").text
    assert 'vllm:admission_rejections_total{engine="0",model_name="fake"} 2.0' in text


def test_bad_requests_take_no_place(start: Start) -> None:
    server = start(scheduler={"max_num_seqs": 1, "max_num_queued_reqs": 1})
    for _ in range(5):
        assert server.complete([99999]).status_code == 400
        assert server.complete("a" * 2000).status_code == 400
    assert server.complete("a").status_code == 200


# -- the server ends


def test_running_requests_finish_at_shutdown(start: Start) -> None:
    server = start()
    server.call(server.engine.hold)
    running = Background(server, ENDLESS | {"max_tokens": 3})
    server.engine.started.get(timeout=10)

    def end() -> None:
        server.server.should_exit = True
        server.engine.let_go()

    server.call(end)
    assert running.answer().json()["choices"][0]["text"] == "The"


def test_what_does_not_finish_in_time_is_told_so(start: Start) -> None:
    server = start()
    server.engine.script = lambda request: ids("x")
    server.call(server.engine.hold)
    plain = Background(server, ENDLESS)
    server.engine.started.get(timeout=10)
    server.call(lambda: setattr(server.server, "should_exit", True))
    answer = plain.answer()
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["error"]["message"]


def test_a_stream_that_does_not_finish_in_time_is_told_so(start: Start) -> None:
    server = start()
    server.engine.hold_at = 2
    stream = Background(server, ENDLESS | {"stream": True})
    server.engine.held.get(timeout=10)
    server.call(lambda: setattr(server.server, "should_exit", True))
    answer = stream.answer()
    assert answer.status_code == 200
    *events, done, empty = answer.text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    assert "shutting down" in events[-1]
    assert len(events) == 3


# -- what should not happen


def test_a_fault_of_our_own_is_a_json_500(server: LiveServer) -> None:
    def broken(request: object) -> list[int]:
        raise RuntimeError("a bug")

    server.engine.script = broken
    answer = server.complete("a")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "a bug" not in answer.text
    assert answer.headers["connection"] == "close"
    server.engine.reset()
    assert server.complete("a").status_code == 200


def test_a_body_that_never_comes(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(http, "DISCARD_S", 0.05)
    port = int(server.base.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        )
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"request_timeout" in answer


def test_a_client_that_reads_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffers fill up; then it is given up, and its places are free."""
    monkeypatch.setattr(http, "WRITE_TIMEOUT_S", 0.2)
    server = start()
    body = ENDLESS | {"stream": True, "n": 100, "logprobs": 20}
    with open_connection(server, body):
        server.engine.aborted.get(timeout=30)
        wait_idle(server)
    assert server.app.service.metrics.finished["abort"] == 100
