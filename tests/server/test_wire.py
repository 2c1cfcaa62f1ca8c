"""Bodies to values: what is JSON, what has the right types, and what the refusals say."""

from __future__ import annotations

from typing import Any

import pytest

from pippin.errors import InvalidRequest
from pippin.server.schema import ChatRequest, CompletionRequest
from pippin.server.wire import MAX_DEPTH, convert, decode_object


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"a": 1}', {"a": 1}),
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b'{"a": null, "b": [null]}', {"b": [None]}),
        (b'{"a": "x\\u0000\\u0007"}', {"a": "x\x00\x07"}),
        ('{"a": "你好 🚀"}'.encode(), {"a": "你好 🚀"}),
        (b'{"a": "\\ud83d\\ude80"}', {"a": "🚀"}),
        (b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}", None),
    ],
)
def test_bodies_that_are_taken(body: bytes, value: Any) -> None:
    got = decode_object(body)
    assert value is None or got == value


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"[]", "JSON object"),
        (b"null", "JSON object"),
        (b'"text"', "JSON object"),
        (b"{", "not valid JSON"),
        (b'{:"a"}', "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": Infinity}', "not valid JSON"),
        (b'{"a": -Infinity}', "not valid JSON"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": ' + b"9" * 6000 + b"}", "out of range"),
        (b'{"a": "\xff\xfe"}', "UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"a": "\\ud800"}', "not valid JSON"),
        (b'{"a": "\\ude00 x"}', "not valid JSON"),
        (b'{"a": "tab\there"}', "not valid JSON"),
        (b'{"a":' * 3000 + b"1" + b"}" * 3000, "nested deeper"),
        (b"[" * 1_000_000, "nested deeper"),
        (b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested deeper"),
    ],
)
def test_bodies_that_are_refused(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        decode_object(body)


def test_many_brackets_side_by_side_are_not_deep() -> None:
    assert len(decode_object(b'{"a":[' + b"[1]," * 10_000 + b"[1]]}")["a"]) == 10_001


@pytest.mark.parametrize(
    ("value", "param", "says"),
    [
        ({"messages": "hi"}, "messages", "expected array, got str"),
        ({"messages": ["hi"]}, "messages[0]", "expected object, got str"),
        ({}, "messages", "required"),
        ({"messages": [], "max_tokens": "5"}, "max_tokens", "expected int, got str"),
        ({"messages": [], "max_tokens": True}, "max_tokens", "expected int, got bool"),
        ({"messages": [], "max_tokens": 1.5}, "max_tokens", "expected int, got float"),
        ({"messages": [], "temperature": "hot"}, "temperature", "expected float, got str"),
        ({"messages": [], "temperature": 10**400}, "temperature", "out of range"),
        ({"messages": [], "stop": [1]}, "stop[0]", "expected str, got int"),
        ({"messages": [], "stop": 5}, "stop", "got int"),
        ({"messages": [], "stream": "yes"}, "stream", "expected bool"),
        ({"messages": [], "stream_options": "all"}, "stream_options", "expected object"),
        ({"messages": [], "logit_bias": [1]}, "logit_bias", "expected object"),
        ({"messages": [], "logit_bias": {"5": "x"}}, "logit_bias[...]", "expected float"),
        ({"messages": [], "seed": "lucky"}, "seed", "expected int"),
        ({"messages": [], "model": 7}, "model", "expected str"),
        ({"messages": [], "logprobs": 5}, "logprobs", "expected bool"),
    ],
)
def test_wrong_types_name_the_key(value: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        convert(value, ChatRequest)
    assert caught.value.param == param
    assert "`" not in caught.value.message


def test_integers_count_as_floats() -> None:
    wire = convert({"prompt": "a", "temperature": 1, "top_p": 1}, CompletionRequest)
    assert wire.temperature == 1.0
