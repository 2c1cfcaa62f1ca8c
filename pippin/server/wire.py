"""Bytes of a request body to typed values, or an ``InvalidRequest`` that names the wrong key."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from pippin.errors import InvalidRequest

#: Deepest nesting of a body. Tool schemas are the deepest honest content, far below this.
MAX_DEPTH = 128

_WHERE = re.compile(r" - at `(?:key` in `)?\$?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]+)`")

T = TypeVar("T")


def decode_object(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in ``body``, without its null members: null means "not given".

    Strict JSON: NaN, infinities, lone surrogates and bytes that are not UTF-8 are refused. Of a
    doubled key the last one counts.
    """
    if body.startswith(b"\xef\xbb\xbf"):
        body = body[3:]
    if not body.strip():
        raise InvalidRequest("The request body is empty; a JSON object is expected.")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequest(
            f"The request body is nested deeper than {MAX_DEPTH} levels."
        ) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The request body is not valid JSON: {_lower(str(error))}.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    # Brackets are an upper bound of the depth, so that most bodies need no walk.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise InvalidRequest(f"The request body is nested deeper than {MAX_DEPTH} levels.")
    return {key: member for key, member in value.items() if member is not None}


def convert(value: Any, kind: type[T], at: str = "") -> T:
    """``value`` as ``kind``, without coercion; ``at`` is where it stands in the body."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        path, what = _explain(str(error))
        path = (at + path).lstrip(".")
        message = f"{path}: {what}." if path else f"The request body is wrong: {what}."
        raise InvalidRequest(message, param=path or None) from None


def _explain(message: str) -> tuple[str, str]:
    path = ""
    if where := _WHERE.search(message):
        path, message = where["path"], message[: where.start()]
    if missing := _MISSING.match(message):
        return f"{path}.{missing['field']}", "this field is required"
    return path, _lower(message.replace("`", "").replace(" | null", ""))


def _lower(sentence: str) -> str:
    if sentence.startswith("JSON"):
        return sentence
    return sentence[:1].lower() + sentence[1:]


def _depth(value: Any) -> int:
    deepest = 0
    level = [value]
    while level:
        deepest += 1
        inner: list[Any] = []
        for item in level:
            members = item.values() if isinstance(item, dict) else item
            inner += [member for member in members if isinstance(member, dict | list)]
        level = inner
    return deepest
