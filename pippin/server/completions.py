"""``/v1/chat/completions`` and ``/v1/completions``: body in, answer out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pippin.server import stream
from pippin.server.generation import Piece
from pippin.server.http import Exchange, check_content_type
from pippin.server.openai import Parsed, parse_chat, parse_completion
from pippin.server.render import whole_body
from pippin.server.service import Answering, Service
from pippin.server.wire import decode_object

logger = logging.getLogger(__name__)

#: Names of ignored keys that have been logged; bounded, as clients invent them.
_told: set[str] = set()
_TOLD_MAX = 1000

Parse = Callable[[dict[str, Any], Mapping[str, Any]], Parsed]


async def answer_chat(service: Service, exchange: Exchange) -> None:
    await _answer(service, exchange, parse_chat)


async def answer_completion(service: Service, exchange: Exchange) -> None:
    await _answer(service, exchange, parse_completion)


async def _answer(service: Service, exchange: Exchange, parse: Parse) -> None:
    service.check_open()
    check_content_type(exchange)
    body = await exchange.body(service.config.server.max_body_bytes)
    parsed = parse(decode_object(body), service.tokenizer.default_sampling)
    del body
    service.model_name(parsed.model)
    _tell_ignored(exchange, parsed.ignored)
    ticket = service.admission.enter(parsed.num_sequences)
    try:
        async with exchange.until_client_leaves():
            answering = await service.prepare(
                parsed, ticket, exchange.arrival, _request_id(exchange)
            )
            async with answering.generation.within_deadline():
                if parsed.shape.stream:
                    await stream.answer(exchange, answering, parsed.shape)
                else:
                    await _answer_whole(service, exchange, answering, parsed)
    finally:
        ticket.leave()


async def _answer_whole(
    service: Service, exchange: Exchange, answering: Answering, parsed: Parsed
) -> None:
    generation = answering.generation
    pieces: list[list[Piece]] = [[] for _ in generation.choices]
    async with contextlib.aclosing(generation.steps()) as steps:
        async for step in steps:
            for piece in step:
                pieces[piece.index].append(piece)

    def render() -> bytes:
        return msgspec.json.encode(
            whole_body(answering.head, parsed.shape, generation, answering.renderers, pieces)
        )

    await exchange.respond(200, await service.run(render, _work(pieces)))


def _work(pieces: list[list[Piece]]) -> int:
    """Entries of logprobs to write, each about as much work as a hundred characters."""
    return 100 * sum(
        len(piece.logprobs) + len(piece.prompt_logprobs or ()) for own in pieces for piece in own
    )


def _request_id(exchange: Exchange) -> str | None:
    """The client's own id from its header, if it is a plain word."""
    value = exchange.header(b"x-request-id")
    if value is None or not 0 < len(value) <= 256 or not value.isascii():
        return None
    text = value.decode()
    return text if text.isprintable() else None


def _tell_ignored(exchange: Exchange, ignored: tuple[str, ...]) -> None:
    """Unknown keys have no effect, as in vLLM; the answer and the log say so."""
    names = [name for name in ignored if name.isascii() and name.isidentifier()][:20]
    if names:
        exchange.extra_headers.append((b"x-pippin-ignored", ", ".join(names).encode()[:500]))
    for name in names:
        if name not in _told and len(_told) < _TOLD_MAX:
            _told.add(name)
            logger.warning("requests have the unknown field %r; it is ignored", name[:100])
