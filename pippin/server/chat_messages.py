"""Messages of the OpenAI wire format, checked and brought into the form chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pippin.errors import InvalidRequest, NotSupported

#: Names under which reasoning of former turns is passed; templates read the first.
_REASONING = ("reasoning_content", "thinking", "reasoning")

#: Text parts by type, with the key that holds the text.
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
_MEDIA_PARTS = (
    "image_url",
    "input_image",
    "image",
    "image_embeds",
    "image_pil",
    "input_audio",
    "audio",
    "audio_url",
    "video",
    "video_url",
    "file",
    "input_file",
)


def normalize(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Fresh, plain copies: content is text, a list of text parts, or None beside tool calls.

    Keys that are None are left out; arguments of tool calls become objects, as vLLM does.
    Raises ``InvalidRequest`` naming the message and what is wrong with it, ``NotSupported`` for
    parts that are not text.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest("messages must be a non-empty list of messages.", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _bad(where, "must be an object")
    try:
        plain = {str(key): plain_data(value) for key, value in message.items() if value is not None}
    except RecursionError as error:
        raise _bad(where, "is nested too deeply") from error
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise _bad(f"{where}.role", "must be a string")
    if "function_call" in plain and not plain.get("tool_calls"):  # the older form of one call
        plain["tool_calls"] = [{"type": "function", "function": plain.pop("function_call")}]
    if not plain.get("tool_calls", True):
        del plain["tool_calls"]  # templates test for the key
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls")
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if isinstance(reasoning, str):
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    plain["content"] = _content(plain, where, reasoning is not None)
    return plain


def _content(message: Mapping[str, Any], where: str, has_reasoning: bool) -> Any:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        if not content:
            raise _bad(f"{where}.content", "must not be an empty list")
        return [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    if content is not None:
        raise _bad(f"{where}.content", "must be a string or a list of parts")
    instead = message.get("tool_calls") or has_reasoning
    if message["role"] == "assistant" and isinstance(message.get("refusal"), str):
        return message["refusal"]
    if message["role"] != "assistant" or not instead:
        raise _bad(
            f"{where}.content", "is missing (only assistant turns with tool_calls have none)"
        )
    return None


def _part(part: Any, where: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _MEDIA_PARTS:
        raise NotSupported(
            f"{where} is of type '{kind}', but this model takes text only.", param=where
        )
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise _bad(f"{where}.type", "must be 'text'")
    text = part.get(key)
    if not isinstance(text, str):
        raise _bad(f"{where}.{key}", "must be a string")
    return {"type": "text", "text": text}


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _bad(where, "must be a list")
    checked = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad(f"{where}[{index}].function.name", "must be a string")
        arguments = _arguments(function.get("arguments"))
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked


def _arguments(arguments: Any) -> Any:
    """An object where possible. A model may have written broken JSON: that stays a string."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return {} if value is None else value


def as_text(parts: Sequence[Mapping[str, str]]) -> str:
    """One text of several parts, as vLLM joins them."""
    return "\n".join(part["text"] for part in parts)


def as_lists(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def plain_data(value: Any) -> Any:
    """JSON types only, so that a template meets no object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    return f"<{type(value).__name__}>"


def _bad(where: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {why}.", param=where)
