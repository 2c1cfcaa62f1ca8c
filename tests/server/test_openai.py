"""The wire format's meaning: defaults, ranges, what is refused and what is ignored."""

from __future__ import annotations

from typing import Any

import pytest

from pippin.errors import InvalidRequest, NotSupported, RequestError
from pippin.server.openai import (
    ChatPrompt,
    CompletionPrompts,
    Parsed,
    parse_chat,
    parse_completion,
)

HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "roll", "parameters": {"type": "object"}}}


def chat(**body: Any) -> Parsed:
    return parse_chat({"messages": HELLO} | body, {})


def completion(**body: Any) -> Parsed:
    return parse_completion({"prompt": "hi"} | body, {})


def test_defaults_are_vllms() -> None:
    params = chat().params
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert params.max_tokens is None
    assert params.logprobs is None
    assert completion().params.max_tokens == 16


def test_the_models_own_settings_are_defaults_only() -> None:
    own = {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    parsed = parse_chat({"messages": HELLO, "top_k": 5}, own)
    assert (parsed.params.temperature, parsed.params.top_k) == (0.6, 5)
    assert parsed.params.max_tokens == 99
    assert not parsed.limit_given
    assert parse_completion({"prompt": "a"}, own).params.max_tokens == 99


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).params.max_tokens == 7
    assert chat(max_tokens=5).limit_given


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("one", 1),
        (["one", "two"], 2),
        ([1, 2, 3], 1),
        ([[1, 2], [3]], 2),
        ([""], 1),
    ],
)
def test_prompts(prompt: Any, count: int) -> None:
    parsed = completion(prompt=prompt, n=2)
    assert isinstance(parsed.prompt, CompletionPrompts)
    assert len(parsed.prompt.prompts) == count
    assert parsed.num_sequences == 2 * count


@pytest.mark.parametrize(
    "prompt", [[], ["a", [1]], [1, "a"], [[1], 2], [True], [1.5], [{}], [None], {"a": 1}, 5]
)
def test_prompts_that_are_no_prompts(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt") as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", -3),
        ("n", 1_000_000),
        ("temperature", -0.5),
        ("top_p", 1.5),
        ("top_p", 0.0),
        ("top_p", -1),
        ("top_k", -5),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", 2**64),
        ("stop", ""),
        ("stop", ["", "x"]),
        ("stop", ["x"] * 500),
        ("bad_words", [""]),
        ("bad_words", ["  "]),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logit_bias", {"one": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1.5": 1}),
        ("logit_bias", {"5": 101}),
        ("allowed_token_ids", []),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("request_id", ""),
        ("request_id", "x" * 1000),
        ("cache_salt", ""),
        ("priority", 2**40),
        ("stream_options", {"include_usage": True}),
        ("response_format", {"type": "yaml"}),
        ("response_format", {}),
    ],
)
def test_values_out_of_range_name_the_field(field: str, value: Any) -> None:
    for parse in (chat, completion):
        with pytest.raises(InvalidRequest) as caught:
            parse(**{field: value})
        assert caught.value.param == field
        assert field in caught.value.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 25}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 8, "max_tokens": 3}, "min_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "boss", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": 3, "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, "tools[0].function"),
        ({"tools": [{"type": "magic", "function": {"name": "a"}}]}, "tools[0].type"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_chats_that_are_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("structured_outputs", {"regex": "a+"}),
        ("structured_outputs", {"choice": []}),
        ("guided_json", {"type": "object"}),
        ("guided_regex", "a+"),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("functions", [TOOL["function"]]),
        ("use_beam_search", True),
        ("length_penalty", 1.2),
        ("modalities", ["text", "audio"]),
        ("mirostat", 2),
        ("prompt_embeds", "AAAA"),
    ],
)
def test_what_would_change_the_answer_is_refused(field: str, value: Any) -> None:
    for parse in (chat, completion):
        with pytest.raises(NotSupported) as caught:
            parse(**{field: value})
        assert caught.value.param == field


def test_tools_need_tool_choice_none_for_now() -> None:
    with pytest.raises(NotSupported, match="tool"):
        chat(tools=[TOOL])
    parsed = chat(tools=[TOOL], tool_choice="none")
    assert isinstance(parsed.prompt, ChatPrompt)
    assert parsed.prompt.tools == [TOOL]
    assert chat(tools=[], tool_choice="auto").prompt.tools is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "body",
    [
        {"user": "me"},
        {"metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"structured_outputs": {}, "guided_regex": ""},
        {"use_beam_search": False, "length_penalty": 1.0, "mirostat": 0},
        {"response_format": {"type": "text"}},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
)
def test_what_cannot_change_the_answer_is_accepted(body: dict[str, Any]) -> None:
    assert chat(**body).ignored == ()
    assert completion(**body).ignored == ()


def test_false_is_not_zero_where_a_value_asks_for_nothing() -> None:
    with pytest.raises(NotSupported):
        chat(mirostat=False)


def test_unknown_keys_are_ignored_and_named() -> None:
    assert chat(frobnicate=True, user="me").ignored == ("frobnicate",)


def test_completion_logprobs() -> None:
    assert completion(logprobs=0).params.logprobs == 0
    assert completion(logprobs=0).shape.logprobs
    assert completion(logprobs=False).params.logprobs is None
    for wrong in (True, 21, -1):
        with pytest.raises(RequestError, match="logprobs"):
            completion(logprobs=wrong)


def test_chat_logprobs() -> None:
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).params.logprobs == 4
    assert chat(logprobs=False, top_logprobs=0).params.logprobs is None


def test_echo_asks_for_the_prompts_logprobs() -> None:
    assert completion(echo=True, logprobs=3).params.prompt_logprobs == 3
    assert completion(echo=True).params.prompt_logprobs is None
    assert completion(echo=True, logprobs=1, prompt_logprobs=5).params.prompt_logprobs == 5


def test_no_tokens_at_all() -> None:
    parsed = completion(echo=True, max_tokens=0)
    assert parsed.shape.prompt_only
    assert parsed.params.max_tokens == 1
    assert completion(prompt_logprobs=1, max_tokens=0).shape.prompt_only


def test_suffix_and_best_of() -> None:
    with pytest.raises(NotSupported, match="suffix"):
        completion(suffix="end")
    with pytest.raises(NotSupported, match="best_of"):
        completion(n=1, best_of=2)
    assert completion(n=2, best_of=2, suffix="").params.n == 2


def test_continuing_needs_one_flag_only() -> None:
    prompt = chat(continue_final_message=True).prompt
    assert isinstance(prompt, ChatPrompt)
    assert not prompt.add_generation_prompt
    assert chat().prompt.add_generation_prompt  # type: ignore[union-attr]
