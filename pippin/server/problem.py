"""Errors as the API tells them: a status, OpenAI's error object, headers."""

from __future__ import annotations

from typing import Any

from pippin.errors import MethodNotAllowed, PippinError, QueueFull, RequestError, Unauthorized
from pippin.server.http import Headers


def status_of(error: PippinError) -> int:
    return error.status if isinstance(error, RequestError) else 500


def body_of(error: PippinError) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code"}}``."""
    kind, param = "server_error", None
    if isinstance(error, RequestError):
        kind, param = error.type, error.param
    message = error.message if error.hint is None else f"{error.message} Hint: {error.hint}"
    return {"error": {"message": message, "type": kind, "param": param, "code": error.code}}


def headers_of(error: PippinError) -> Headers:
    if isinstance(error, QueueFull):
        return [(b"retry-after", str(error.retry_after).encode())]
    if isinstance(error, MethodNotAllowed):
        return [(b"allow", ", ".join(error.allowed).encode())]
    if isinstance(error, Unauthorized):
        return [(b"www-authenticate", b"Bearer")]
    return []
