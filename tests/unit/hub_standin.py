"""A small server that answers as the Hugging Face hub does, for one process's tests.

Routes read from huggingface_hub's client: model info, tree, resolve with ETag and ranges.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


def commit_of(repo: str) -> str:
    return hashlib.sha1(repo.encode()).hexdigest()


@dataclass
class Hub:
    """Repositories by name, each file by path; what was asked; faults to play."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    url: str = ""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and Range header."""
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """By file: after how many bytes to drop the connection, one entry an answer."""
    failing: bool = False
    """Answer 500 to everything."""

    def ranges_of(self, file: str) -> list[str | None]:
        return [r for method, path, r in self.requests if method == "GET" and path.endswith(file)]


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = _Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is part of the tests; anything else is a fault here."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if self.hub.failing:
            return self._error(500, None)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo, rest = "/".join(parts[2:4]), parts[4:]
        else:
            repo, rest = "/".join(parts[:2]), parts[2:]
        files = self.hub.repos.get(repo)
        if files is None:
            return self._error(401, "RepoNotFound")
        if self.headers.get("Authorization") == "Bearer stale":
            return self._error(401, None, "Invalid credentials in Authorization header")
        if len(rest) >= 2 and rest[1] not in ("main", "v1", commit_of(repo)):
            return self._error(404, "RevisionNotFound")
        match rest:
            case [] | ["revision", _]:
                siblings = [{"rfilename": name} for name in files]
                return self._json({"id": repo, "sha": commit_of(repo), "siblings": siblings})
            case ["tree", _]:
                entries = [(n, len(c), _etag(c)) for n, c in files.items()]
                keys = ("path", "size", "oid")
                return self._json(
                    [{"type": "file", **dict(zip(keys, e, strict=True))} for e in entries]
                )
            case ["resolve", _, *name]:
                if repo in self.hub.gated:
                    return self._error(403, "GatedRepo")
                content = files.get("/".join(name))
                if content is None:
                    return self._error(404, "EntryNotFound")
                return self._file(repo, "/".join(name), content, body)
        return self._error(404, None)

    def _file(self, repo: str, name: str, content: bytes, body: bool) -> None:
        start = 0
        wanted = self.headers.get("Range")
        if wanted is not None:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("ETag", f'"{_etag(content)}"')
        self.send_header("X-Repo-Commit", commit_of(repo))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if not body:
            return
        cuts = self.hub.cuts.get(name)
        if cuts:
            self.wfile.write(content[start : start + cuts.pop(0)])
            self.close_connection = True
            return
        self.wfile.write(content[start:])

    def _json(self, value: object) -> None:
        raw = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _error(self, status: int, code: str | None, message: str | None = None) -> None:
        self.send_response(status)
        if message is not None:
            self.send_header("X-Error-Message", message)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
