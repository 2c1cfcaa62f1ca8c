"""The HTTP server: routes, keys, errors. Plain ASGI, wired by ``build_app``."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from pippin import __version__
from pippin.clock import Clock, SystemClock
from pippin.config import Config
from pippin.errors import (
    EngineUnavailable,
    MethodNotAllowed,
    NotFound,
    NotSupported,
    PippinError,
    Unauthorized,
)
from pippin.server import cluster, dashboard, metrics, openapi, problem, tokens
from pippin.server.completions import answer_chat, answer_completion
from pippin.server.generation import Engine
from pippin.server.http import ClientGone, Exchange, Headers, Receive, Scope, Send
from pippin.server.service import Service
from pippin.server.stream import error_event
from pippin.server.tokenizer import Tokenizer
from pippin.types.message import StepOutputs

logger = logging.getLogger(__name__)

Handler = Callable[[Service, Exchange], Awaitable[None]]

#: Paths that need a key where the server has one, with all below them.
GUARDED = ("/v1", "/api", "/tokenize", "/detokenize")


class App:
    """The ASGI application. ``drain`` makes it refuse new requests while running ones end."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._keys = tuple(key.encode() for key in service.config.server.api_key)
        pages = dashboard.load()
        self._routes = ROUTES | {path: {"GET": _page(page)} for path, page in pages.items()}

    def drain(self) -> None:
        self.service.drain()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            arrival = self.service.clock.time()
            await self._http(Exchange(scope, receive, send, arrival))
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                self.service.close()
                return

    async def _http(self, exchange: Exchange) -> None:
        if exchange.header(b"origin") is not None:
            # Any page may ask, none with the browser's own credentials; as in vLLM.
            exchange.extra_headers.append((b"access-control-allow-origin", b"*"))
        try:
            await self._route(exchange)
        except ClientGone:
            return
        except PippinError as error:
            await self._fail(exchange, error)
        except asyncio.CancelledError:
            # uvicorn cancels what is still running when the drain time is over.
            await self._fail(exchange, EngineUnavailable("The server is shutting down."))
        except Exception:
            # What is raised makes uvicorn log the trace and close: no second request may be sent.
            exchange.extra_headers.append((b"connection", b"close"))
            await self._fail(exchange, PippinError("Internal error; the server's log has more."))
            raise

    async def _fail(self, exchange: Exchange, error: PippinError) -> None:
        """Tell the client, in a way that fits what it has got so far."""
        if problem.status_of(error) == 500:
            logger.error("%s %s failed: %s", exchange.method, exchange.path, error)
        if exchange.ended:
            return
        if exchange.started:
            await exchange.end_stream(error_event(error))
            return
        await exchange.respond_json(
            problem.status_of(error), problem.body_of(error), problem.headers_of(error)
        )

    async def _route(self, exchange: Exchange) -> None:
        path = exchange.path.rstrip("/") or "/"
        methods = self._routes.get(path)
        if methods is None and path.startswith("/v1/models/"):
            methods = {"GET": _model}
        if exchange.method == "OPTIONS" and methods is not None:
            await _options(exchange, methods)
            return
        if self._keys and path.startswith(GUARDED):
            self._check_key(exchange)
        if methods is None:
            raise NotFound(f"There is no route {exchange.path[:200]}.")
        method = "GET" if exchange.method == "HEAD" and "GET" in methods else exchange.method
        handler = methods.get(method)
        if handler is None:
            allowed = _allowed(methods)
            raise MethodNotAllowed(
                f"{exchange.method} is not allowed for {path}: use {' or '.join(methods)}.",
                allowed=allowed,
            )
        await handler(self.service, exchange)

    def _check_key(self, exchange: Exchange) -> None:
        """A Bearer token, or Anthropic's ``x-api-key``; compared in constant time."""
        value = exchange.header(b"authorization") or b""
        scheme, _, given = value.partition(b" ")
        if scheme.lower() != b"bearer":
            given = exchange.header(b"x-api-key") or b""
        given = given.strip()
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(matches):
            raise Unauthorized("A valid API key is needed: send it as 'Authorization: Bearer KEY'.")


def build_app(
    config: Config, client: Engine, tokenizer: Tokenizer, clock: Clock | None = None
) -> App:
    """The application over a started engine client."""
    service = Service(config, client, tokenizer, clock or SystemClock())

    def on_step(step: StepOutputs) -> None:
        service.metrics.observe_step(step.stats)

    client.on_step = on_step
    return App(service)


def _allowed(methods: dict[str, Handler]) -> tuple[str, ...]:
    return (*methods, *(("HEAD",) if "GET" in methods else ()), "OPTIONS")


async def _options(exchange: Exchange, methods: dict[str, Handler]) -> None:
    allowed = ", ".join(_allowed(methods)).encode()
    headers: Headers = [(b"allow", allowed)]
    if exchange.header(b"access-control-request-method") is not None:
        headers += [
            (b"access-control-allow-methods", allowed),
            (
                b"access-control-allow-headers",
                exchange.header(b"access-control-request-headers") or b"*",
            ),
            (b"access-control-max-age", b"600"),
        ]
    await exchange.respond(200, b"", b"text/plain", headers)


def _model_card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "pippin",
        "root": service.config.model.model,
        "parent": None,
        "max_model_len": service.ready.max_model_len,
    }


async def _models(service: Service, exchange: Exchange) -> None:
    cards = [_model_card(service, name) for name in service.names]
    await exchange.respond_json(200, {"object": "list", "data": cards})


async def _model(service: Service, exchange: Exchange) -> None:
    name = exchange.path.removeprefix("/v1/models/").rstrip("/")
    await exchange.respond_json(200, _model_card(service, service.model_name(name)))


async def _health(service: Service, exchange: Exchange) -> None:
    service.check_open()
    await exchange.respond(200, b"", b"text/plain")


async def _version(service: Service, exchange: Exchange) -> None:
    await exchange.respond_json(200, {"version": __version__})


async def _load(service: Service, exchange: Exchange) -> None:
    await exchange.respond_json(200, {"server_load": service.admission.in_flight})


async def _metrics(service: Service, exchange: Exchange) -> None:
    await exchange.respond(200, service.metrics.render(), metrics.CONTENT_TYPE)


def _page(page: dashboard.Page) -> Handler:
    async def answer(service: Service, exchange: Exchange) -> None:
        await exchange.respond(200, page.body, page.content_type, dashboard.HEADERS)

    return answer


async def _cluster(service: Service, exchange: Exchange) -> None:
    failure = service.engine.failure
    state = cluster.state(
        service.config,
        service.ready,
        service.engine.stats,
        service.names,
        draining=service.admission.draining,
        failure=None if failure is None else str(failure),
    )
    await exchange.respond_json(200, state)


async def _openapi(service: Service, exchange: Exchange) -> None:
    await exchange.respond_json(200, openapi.document())


async def _embeddings(service: Service, exchange: Exchange) -> None:
    raise NotSupported(f"The model '{service.names[0]}' generates text: it has no embeddings.")


async def _later(service: Service, exchange: Exchange) -> None:
    raise NotFound(f"{exchange.path} is not supported by this version; use /v1/chat/completions.")


ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/models": {"GET": _models},
    "/v1/chat/completions": {"POST": answer_chat},
    "/v1/completions": {"POST": answer_completion},
    "/v1/embeddings": {"POST": _embeddings},
    "/v1/responses": {"POST": _later},
    "/v1/messages": {"POST": _later},
    "/v1/messages/count_tokens": {"POST": _later},
    "/tokenize": {"POST": tokens.tokenize},
    "/detokenize": {"POST": tokens.detokenize},
    "/api/cluster": {"GET": _cluster},
    "/health": {"GET": _health},
    "/ping": {"GET": _health, "POST": _health},
    "/load": {"GET": _load},
    "/version": {"GET": _version},
    "/metrics": {"GET": _metrics},
    "/openapi.json": {"GET": _openapi},
}
