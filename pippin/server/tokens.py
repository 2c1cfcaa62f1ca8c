"""``/tokenize`` and ``/detokenize``, as in vLLM."""

from __future__ import annotations

from typing import Any

from pippin.errors import InvalidRequest
from pippin.server.http import Exchange, check_content_type
from pippin.server.openai import chat_prompt, check_tools
from pippin.server.schema import DetokenizeRequest, TokenizeRequest
from pippin.server.service import Service
from pippin.server.wire import convert, decode_object


async def tokenize(service: Service, exchange: Exchange) -> None:
    check_content_type(exchange)
    body = await exchange.body(service.config.server.max_body_bytes)
    wire = convert(decode_object(body), TokenizeRequest)
    service.model_name(wire.model)
    if (wire.prompt is None) == (wire.messages is None):
        raise InvalidRequest("Either prompt or messages is required.", param="prompt")
    if wire.prompt is not None:
        ids = await service.encode(wire.prompt, wire.add_special_tokens is not False)
    else:
        check_tools(wire.tools or [])
        ids = await service.chat_token_ids(chat_prompt(wire))
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.ready.max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if wire.return_token_strs:
        answer["token_strs"] = [service.tokenizer.token_text(token) for token in ids]
    await exchange.respond_json(200, answer)


async def detokenize(service: Service, exchange: Exchange) -> None:
    check_content_type(exchange)
    body = await exchange.body(service.config.server.max_body_bytes)
    wire = convert(decode_object(body), DetokenizeRequest)
    service.model_name(wire.model)
    service.check_token_ids(wire.tokens, "tokens")
    text = await service.decode(wire.tokens)
    await exchange.respond_json(200, {"prompt": text})
