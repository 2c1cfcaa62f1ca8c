"""``/openapi.json``: the routes, with the request bodies' schemas made from ``server.schema``."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from pippin import __version__
from pippin.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_BODIES = {
    "/v1/chat/completions": (ChatRequest, "Answer a chat; stream for server-sent events."),
    "/v1/completions": (CompletionRequest, "Continue a text; stream for server-sent events."),
    "/tokenize": (TokenizeRequest, "Token ids of a text or a chat."),
    "/detokenize": (DetokenizeRequest, "Text of token ids."),
}
_PLAIN = {
    "/v1/models": "The models served.",
    "/health": "200 while requests can be answered.",
    "/version": "The server's version.",
    "/api/cluster": "Machines, links, plan and replicas.",
    "/load": "Sequences in flight.",
    "/openapi.json": "This document.",
}

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


@cache
def document() -> dict[str, Any]:
    kinds = [kind for kind, _ in _BODIES.values()]
    _, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {
        path: {"get": {"summary": text, "responses": _responses()}} for path, text in _PLAIN.items()
    }
    for path, (kind, text) in _BODIES.items():
        reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
        paths[path] = {
            "post": {
                "summary": text,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": reference}},
                },
                "responses": _responses(),
            }
        }
    paths["/v1/models/{model}"] = {
        "get": {
            "summary": "One model.",
            "parameters": [
                {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
            ],
            "responses": _responses(),
        }
    }
    paths["/metrics"] = {
        "get": {
            "summary": "Prometheus metrics, under vLLM's names.",
            "responses": {"200": {"description": "Text format."}},
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pippin", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}},
    }


def _responses() -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "200": {"description": "Done."},
        "4XX": {"description": "The request's fault.", "content": error},
        "5XX": {"description": "The server's fault.", "content": error},
    }
