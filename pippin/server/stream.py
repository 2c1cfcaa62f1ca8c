"""Server-sent events: what one step brought is one write.

Nothing is sent before the first token, so that an error until then is a plain answer with its
status; afterwards it is the stream's last event.
"""

from __future__ import annotations

import contextlib

from pippin.errors import PippinError
from pippin.server import problem, render
from pippin.server.http import Exchange
from pippin.server.openai import Shape
from pippin.server.service import Answering


async def answer(exchange: Exchange, answering: Answering, shape: Shape) -> None:
    """Stream the answer. Errors are raised to the caller, who ends the stream with them."""
    generation, renderers = answering.generation, answering.renderers
    continuous = shape.continuous_usage
    async with contextlib.aclosing(generation.steps()) as steps:
        async for pieces in steps:
            usage = render.usage(generation) if continuous else None
            data = b"".join([renderers[piece.index].chunk(piece, usage) for piece in pieces])
            if not data:
                continue
            if not exchange.started:
                await exchange.start_stream()
            await exchange.write(data)
    last = render.usage_event(answering.head, generation) if shape.include_usage else b""
    if not exchange.started:
        await exchange.start_stream()
    await exchange.end_stream(last + render.DONE)


def error_event(error: PippinError) -> bytes:
    """The event that ends a stream which failed."""
    return render.event(problem.body_of(error)) + render.DONE
