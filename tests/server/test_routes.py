"""Routes, methods, keys, origins, bodies: HTTP itself, over real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from conftest import Start
from server_fakes import LiveServer

from pippin import __version__
from pippin.errors import EngineError


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    "path", ["/health", "/ping", "/version", "/metrics", "/v1/models", "/load"]
)
def test_plain_routes(server: LiveServer, method: str, path: str) -> None:
    answer = server.client.request(method, path)
    assert answer.status_code == 200
    assert method == "GET" or answer.content == b""


def test_version(server: LiveServer) -> None:
    assert server.client.get("/version").json() == {"version": __version__}


def test_models(start: Start) -> None:
    server = start(model={"model": "org/thing", "served_model_name": ["small", "org/thing"]})
    listed = server.client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["small", "org/thing"]
    one = server.client.get("/v1/models/org/thing").json()
    assert (one["id"], one["object"], one["max_model_len"]) == ("org/thing", "model", 512)
    assert server.client.get("/v1/models/org%2Fthing").json()["id"] == "org/thing"
    missing = server.client.get("/v1/models/other")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/nope", "/v1/nope", "/v1", "/v2/models", "/%00", "/v1/modelsx"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_unknown_routes(server: LiveServer, method: str, path: str) -> None:
    answer = server.client.request(method, path)
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", "POST, OPTIONS"),
        ("HEAD", "/v1/completions", "POST, OPTIONS"),
        ("PUT", "/v1/completions", "POST, OPTIONS"),
        ("POST", "/v1/models", "GET, HEAD, OPTIONS"),
        ("DELETE", "/v1/models/fake", "GET, HEAD, OPTIONS"),
    ],
)
def test_wrong_methods(server: LiveServer, method: str, path: str, allow: str) -> None:
    answer = server.client.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allow
    assert method == "HEAD" or error_of(answer)["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/embeddings"])
def test_what_is_not_there_says_so(server: LiveServer, path: str) -> None:
    answer = server.post(path, {"model": "fake", "input": "x"})
    assert answer.status_code in (400, 404)
    assert "support" in error_of(answer)["message"] or "embeddings" in error_of(answer)["message"]


def test_trailing_slashes_are_forgiven(server: LiveServer) -> None:
    assert server.client.get("/v1/models/").status_code == 200


# -- origins


def test_preflight(server: LiveServer) -> None:
    answer = server.client.options(
        "/v1/chat/completions",
        headers={
            "Origin": "http://page.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        },
    )
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/models", "/nope"])
def test_other_origins_never_get_credentials(server: LiveServer, path: str) -> None:
    answer = server.client.get(path, headers={"Origin": "http://page.example"})
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in answer.headers
    assert "access-control-allow-origin" not in server.client.get(path).headers


# -- keys


@pytest.fixture
def locked(start: Start) -> LiveServer:
    return start(server={"api_key": ["sesame", "other"]})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic sesame"},
        {"Authorization": "sesame"},
        {"Authorization": b"Bearer sesam\xe9"},
        {"x-api-key": "wrong"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/nope", "/v1/models/fake"])
def test_without_the_key(locked: LiveServer, headers: dict[str, str], path: str) -> None:
    answer = locked.client.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert error_of(answer)["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer sesame"},
        {"Authorization": "bearer other"},
        {"x-api-key": "sesame"},
    ],
)
def test_with_the_key(locked: LiveServer, headers: dict[str, str]) -> None:
    assert locked.client.get("/v1/models", headers=headers).status_code == 200


def test_what_needs_no_key(locked: LiveServer) -> None:
    for path in ("/health", "/version", "/metrics"):
        assert locked.client.get(path).status_code == 200
    assert locked.post("/tokenize", {"prompt": "a"}).status_code == 401
    assert locked.client.options("/v1/models").status_code == 200


def test_a_server_without_a_key_takes_any(server: LiveServer) -> None:
    headers = {"Authorization": "Bearer anything", "OpenAI-Organization": "org"}
    assert server.client.get("/v1/models", headers=headers).status_code == 200


# -- bodies


@pytest.fixture
def small(start: Start) -> LiveServer:
    return start(server={"max_body_bytes": 1000})


def in_pieces(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), 64):
        yield data[start : start + 64]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [1001, 2_000_000])
def test_bodies_that_are_too_large(small: LiveServer, chunked: bool, size: int) -> None:
    data = b'{"prompt": "' + b"a" * size + b'"}'
    answer = small.client.post("/v1/completions", content=in_pieces(data) if chunked else data)
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "body_too_large"
    assert answer.headers["connection"] == "close"
    assert small.complete("a", max_tokens=1).status_code == 200
    assert small.engine.requests[0].prompt_token_ids == [3 + ord("a")]


def test_chunked_bodies_are_read(server: LiveServer) -> None:
    answer = server.client.post(
        "/v1/completions", content=in_pieces(b'{"max_tokens": 2, "prompt": "' + b"a" * 300 + b'"}')
    )
    assert answer.status_code == 200


def raw(server: LiveServer, data: bytes) -> bytes:
    """All that the server sends until it closes the connection."""
    with socket.create_connection(server._socket.getsockname(), timeout=10) as connection:
        connection.sendall(data)
        got = b""
        while part := connection.recv(65536):
            got += part
        return got


def test_a_declared_body_is_refused_before_it_is_sent(small: LiveServer) -> None:
    """A client that waits for leave to send is told no, and is not told to go on."""
    answer = raw(
        small,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n"
        b"Expect: 100-continue\r\nConnection: close\r\n\r\n" + b"a" * 999999,
    )
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"100 Continue" not in answer


def test_an_unread_body_does_not_become_the_next_request(server: LiveServer) -> None:
    smuggled = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = raw(
        server,
        b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(smuggled) + smuggled,
    )
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "text/plain", None])
def test_content_types_that_are_taken(server: LiveServer, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = server.client.post(
        "/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=headers
    )
    assert answer.status_code == 200


def test_a_form_is_no_json(server: LiveServer) -> None:
    answer = server.client.post("/v1/completions", files={"prompt": b"a"})
    assert answer.status_code == 400
    assert "content type" in error_of(answer)["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"prompt": "\xff"}', b"[" * 100_000])
def test_bodies_that_are_not_json_objects(server: LiveServer, path: str, body: bytes) -> None:
    answer = server.client.post(path, content=body)
    assert answer.status_code == 400
    assert error_of(answer)["type"] == "invalid_request_error"


# -- state


def test_a_failed_engine_is_not_healthy(server: LiveServer) -> None:
    server.engine.failure = EngineError("it fell over")
    for answer in (server.client.get("/health"), server.complete("a")):
        assert answer.status_code == 503
        assert "it fell over" in error_of(answer)["message"]
    assert server.client.get("/v1/models").status_code == 200


def test_draining(start: Start) -> None:
    server = start()
    server.call(server.app.drain)
    answer = server.complete("a")
    assert answer.status_code == 503
    assert "shutting down" in error_of(answer)["message"]


# -- tokens


def test_tokenize(server: LiveServer) -> None:
    answer = server.post("/tokenize", {"model": "fake", "prompt": "aé", "return_token_strs": True})
    assert answer.json() == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [100, 198, 172],
        "token_strs": ["a", "\ufffd", "\ufffd"],
    }
    text = server.post("/detokenize", {"tokens": [100, 198, 172]}).json()
    assert text == {"prompt": "aé"}


def test_tokenize_a_chat_is_what_the_chat_costs(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    count = server.post("/tokenize", {"messages": messages}).json()["count"]
    assert server.chat("hi", max_tokens=1).json()["usage"]["prompt_tokens"] == count
    open_ended = {"messages": messages, "add_generation_prompt": False}
    assert server.post("/tokenize", open_ended).json()["count"] < count


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": 5},
        {"prompt": "a", "messages": []},
        {"messages": []},
        {"messages": ["a"]},
        {"messages": [{"role": "user"}]},
    ],
)
def test_tokenize_bad_bodies(server: LiveServer, body: dict[str, Any]) -> None:
    assert server.post("/tokenize", body).status_code == 400


@pytest.mark.parametrize("tokens", ["abc", [-1], [259], [2**40], [10**30], [1.5], [True], None])
def test_detokenize_bad_ids(server: LiveServer, tokens: Any) -> None:
    answer = server.post("/detokenize", {"tokens": tokens})
    assert answer.status_code == 400
    assert error_of(answer)["param"].startswith("tokens")


def test_detokenize_nothing(server: LiveServer) -> None:
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_a_route_for_programs_that_read_the_schema(server: LiveServer) -> None:
    document = server.client.get("/openapi.json").json()
    assert "/v1/chat/completions" in document["paths"]
    assert "messages" in document["components"]["schemas"]["ChatRequest"]["required"]
