"""What chat and completions answer, whole and as streams, with an engine that recites."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from conftest import Start
from server_fakes import IM_END, IM_START, MAX_MODEL_LEN, VOCAB, LiveServer, ids

from pippin.types.request import Request

GREEDY = {"temperature": 0}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def script(server: LiveServer, tokens: Sequence[int]) -> None:
    server.engine.script = lambda request: tokens


def test_a_chat(server: LiveServer) -> None:
    answer = server.chat(model="fake", max_tokens=9, **GREEDY)
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "fake")
    assert body["system_fingerprint"].startswith("fp_")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "The quick", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    prompt = len(server.engine.requests[0].prompt_token_ids)
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 9,
        "total_tokens": prompt + 9,
        "prompt_tokens_details": {"cached_tokens": prompt // 2},
    }
    assert server.engine.requests[0].prompt_token_ids[0] == IM_START


def test_a_completion(server: LiveServer) -> None:
    body = server.complete("hi", max_tokens=3, **GREEDY).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "The"
    assert server.engine.requests[0].prompt_token_ids == ids("hi")


def test_a_chat_stream(server: LiveServer) -> None:
    events = server.events(CHAT, {"messages": HI, "max_tokens": 4, **GREEDY})
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "T"},
        {"content": "h"},
        {"content": "e"},
        {"content": " "},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 4 + ["length"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert not any("usage" in event for event in events)


def test_a_completion_stream(server: LiveServer) -> None:
    events = server.events(COMPLETIONS, {"prompt": "hi", "max_tokens": 3, **GREEDY})
    assert "".join(event["choices"][0]["text"] for event in events) == "The"
    assert {event["object"] for event in events} == {"text_completion"}


def test_end_of_sequence(server: LiveServer) -> None:
    script(server, [*ids("Yes."), IM_END])
    choice = server.chat().json()["choices"][0]
    assert choice["message"]["content"] == "Yes."
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert server.chat().json()["usage"]["completion_tokens"] == 5
    assert server.engine.requests[0].max_tokens == MAX_MODEL_LEN - 21
    shown = server.chat(skip_special_tokens=False, ignore_eos=True, max_tokens=5).json()
    assert shown["choices"][0]["message"]["content"] == "Yes.<|im_end|>"


def test_stop_token_ids(server: LiveServer) -> None:
    token = ids("u")[0]
    choice = server.complete("a", stop_token_ids=[token], **GREEDY).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("The q", "stop")
    assert choice["stop_reason"] == token


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("per_step", [1, 3, 50])
def test_stop_strings(server: LiveServer, stream: bool, per_step: int) -> None:
    server.engine.tokens_per_step = per_step
    body = {"prompt": "a", "max_tokens": 100, "stop": ["brown fix", "own f", "zzz"], **GREEDY}
    if stream:
        events = server.events(COMPLETIONS, body | {"stream_options": {"include_usage": True}})
        usage = events.pop()["usage"]
        text = "".join(event["choices"][0]["text"] for event in events)
        choice = events[-1]["choices"][0]
        finishes = [event["choices"][0]["finish_reason"] for event in events]
        assert finishes[:-1] == [None] * (len(events) - 1)
    else:
        answer = server.post(COMPLETIONS, body).json()
        usage, choice = answer["usage"], answer["choices"][0]
        text = choice["text"]
    assert text == "The quick br"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "own f")
    assert usage["completion_tokens"] == len("The quick brown f")
    if per_step < 50:
        assert server.engine.aborted.get(timeout=10) == server.engine.requests[0].request_id


def test_one_of_several_choices_stops_early(server: LiveServer) -> None:
    texts = {0: "abc.def", 1: "xyz!uvw"}
    server.engine.script = lambda request: ids(texts[request.choice] * 9)
    body = {"prompt": "a", "n": 2, "stop": "!", "max_tokens": 14}
    choices = server.post(COMPLETIONS, body).json()["choices"]
    assert [choice["text"] for choice in choices] == ["abc.defabc.def", "xyz"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "stop"]
    assert server.engine.aborted.get(timeout=10) == server.engine.requests[1].request_id
    assert server.app.service.admission.in_flight == 0


def test_include_stop_str(server: LiveServer) -> None:
    body = {"stop": ["qui"], "include_stop_str_in_output": True, **GREEDY}
    assert server.complete("a", **body).json()["choices"][0]["text"] == "The qui"


def test_held_text_comes_out_at_the_end(server: LiveServer) -> None:
    body = {"prompt": "a", "max_tokens": 9, "stop": ["quickly"], **GREEDY}
    events = server.events(COMPLETIONS, body)
    assert "".join(event["choices"][0]["text"] for event in events) == "The quick"
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("cut", range(1, 9))
def test_characters_over_tokens_come_whole(server: LiveServer, cut: int) -> None:
    whole = "é🚀👩‍🌾"
    script(server, ids(whole))
    events = server.events(COMPLETIONS, {"prompt": "a", "max_tokens": cut})
    texts = [event["choices"][0]["text"] for event in events]
    assert not any("\ufffd" in text for text in texts)
    assert whole.startswith("".join(texts))
    plain = server.complete("a", max_tokens=cut).json()["choices"][0]["text"]
    assert plain == "".join(texts)
    assert plain == whole.encode()[:cut].decode(errors="ignore")


def test_a_prompt_that_ends_inside_a_character(server: LiveServer) -> None:
    script(server, ids("🚀 up")[2:])
    prompt = [*ids("Hello world"), *ids("🚀")[:2]]
    answer = server.complete(prompt, max_tokens=5).json()
    assert answer["choices"][0]["text"] == "🚀 up"


# -- several prompts and choices


def test_prompts_times_choices(server: LiveServer) -> None:
    body = server.complete(["red", "green apples"], n=3, max_tokens=4, seed=5).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    requests = server.engine.requests
    assert [request.choice for request in requests] == [0, 1, 2, 0, 1, 2]
    assert {request.seed for request in requests} == {5}
    assert len({request.request_id for request in requests}) == 6
    assert body["usage"]["prompt_tokens"] == 3 + 12
    assert body["usage"]["completion_tokens"] == 24
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 1 + 6


def test_choices_of_a_stream(server: LiveServer) -> None:
    body = {"messages": HI, "n": 3, "max_tokens": 5, "stream_options": {"include_usage": True}}
    events = server.events(CHAT, body)
    last = events.pop()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 15
    for index in range(3):
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in own] == [None] * 5 + ["length"]
        assert not any("role" in choice["delta"] for choice in own[1:])


def test_continuous_usage(server: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(
        COMPLETIONS, {"prompt": "abc", "max_tokens": 3, "stream_options": options}
    )
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]
    assert {event["usage"]["prompt_tokens"] for event in events} == {3}


def test_unseeded_requests_differ_and_seeds_are_kept(server: LiveServer) -> None:
    for _ in range(3):
        server.complete("a", max_tokens=1)
    server.complete("a", max_tokens=1, seed=0)
    seeds = [request.seed for request in server.engine.requests]
    assert len(set(seeds)) == 4
    assert seeds[3] == 0


# -- log probabilities


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [None, 0, 3])
def test_chat_logprobs(server: LiveServer, stream: bool, top: int | None) -> None:
    script(server, [*ids("é🚀a"), IM_END])
    body: dict[str, Any] = {"messages": HI, "logprobs": True, "top_logprobs": top}
    if stream:
        choices = [event["choices"][0] for event in server.events(CHAT, body)]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        content = [item for c in choices for item in (c["logprobs"] or {"content": []})["content"]]
    else:
        choice = server.post(CHAT, body).json()["choices"][0]
        text, content = choice["message"]["content"], choice["logprobs"]["content"]
    assert text == "é🚀a"
    assert len(content) == 8
    assert "".join(item["token"] for item in content) == text
    assert b"".join(bytes(item["bytes"]) for item in content).decode() == text
    assert {len(item["top_logprobs"]) for item in content} == {top or 0}
    assert all(item["logprob"] == -0.5 for item in content)
    if top:
        first = content[0]["top_logprobs"]
        assert first[0]["token"] == "bytes:\\xc3"
        assert first[0]["bytes"] == [0xC3]
        assert first[-1]["logprob"] == -9999.0


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs(server: LiveServer, stream: bool) -> None:
    body = {"prompt": "a", "logprobs": 2, "max_tokens": 4, **GREEDY}
    if stream:
        parts = [event["choices"][0]["logprobs"] for event in server.events(COMPLETIONS, body)]
        got = {key: [item for part in parts for item in part[key]] for key in parts[0]}
    else:
        got = server.post(COMPLETIONS, body).json()["choices"][0]["logprobs"]
    assert got["tokens"] == ["T", "h", "e", " "]
    assert got["text_offset"] == [0, 1, 2, 3]
    assert got["token_logprobs"] == [-0.5] * 4
    assert got["top_logprobs"][0] == {"T": -0.5, "U": -9999.0}


def test_logprobs_wait_for_their_text(server: LiveServer) -> None:
    """A stop string cuts text and tokens at the same place; held tokens come with their text."""
    body = {"prompt": "a", "logprobs": 0, "max_tokens": 30, "stop": ["k brown"], **GREEDY}
    events = server.events(COMPLETIONS, body)
    parts = [event["choices"][0] for event in events]
    tokens = [token for part in parts for token in (part["logprobs"] or {"tokens": []})["tokens"]]
    assert "".join(tokens) == "".join(part["text"] for part in parts) == "The quic"
    assert len(tokens) == len("The quick brown")


def test_names_of_tokens_as_ids(server: LiveServer) -> None:
    body = {"logprobs": 1, "max_tokens": 1, "return_tokens_as_token_ids": True, **GREEDY}
    got = server.complete("a", **body).json()["choices"][0]["logprobs"]
    token = f"token_id:{ids('T')[0]}"
    assert got["tokens"] == [token]
    assert got["top_logprobs"] == [{token: -0.5}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo_with_logprobs(server: LiveServer, stream: bool, max_tokens: int) -> None:
    body = {"prompt": "yes", "echo": True, "logprobs": 1, "max_tokens": max_tokens, **GREEDY}
    if stream:
        events = server.events(COMPLETIONS, body | {"stream_options": {"include_usage": True}})
        usage = events.pop()["usage"]
        parts = [event["choices"][0] for event in events]
        text = "".join(part["text"] for part in parts)
        got: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
        for key, items in got.items():
            for part in parts:
                items += (part["logprobs"] or {key: []})[key]
        assert parts[-1]["finish_reason"] == "length"
    else:
        answer = server.post(COMPLETIONS, body).json()
        usage, choice = answer["usage"], answer["choices"][0]
        text, got = choice["text"], choice["logprobs"]
        assert choice["finish_reason"] == "length"
    assert text == "yes" + "The"[:max_tokens]
    assert "".join(got["tokens"]) == text
    assert got["token_logprobs"] == [None] + [-0.5] * (2 + max_tokens)
    assert got["text_offset"] == list(range(3 + max_tokens))
    assert usage["completion_tokens"] == max_tokens


def test_echo_of_ids_and_of_a_cut_prompt(server: LiveServer) -> None:
    assert (
        server.complete(ids("abc"), echo=True, max_tokens=0).json()["choices"][0]["text"] == "abc"
    )
    body = {"echo": True, "max_tokens": 0, "truncate_prompt_tokens": 2}
    assert server.complete("abc", **body).json()["choices"][0]["text"] == "bc"


def test_echo_in_chat_repeats_the_last_answer(server: LiveServer) -> None:
    messages = [*HI, {"role": "assistant", "content": "Once"}]
    body = {"messages": messages, "echo": True, "continue_final_message": True, "max_tokens": 3}
    answer = server.post(CHAT, body | GREEDY).json()
    assert answer["choices"][0]["message"]["content"] == "OnceThe"
    events = server.events(CHAT, body | GREEDY)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "Once"}


def test_prompt_logprobs(server: LiveServer) -> None:
    completion = server.complete("abc", prompt_logprobs=1, max_tokens=1).json()
    got = completion["choices"][0]["prompt_logprobs"]
    assert got[0] is None
    assert len(got) == 3
    b = ids("b")[0]
    assert got[1][str(b)] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    chat = server.chat("abc", prompt_logprobs=0, max_tokens=1).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in server.complete("abc", max_tokens=1).json()["choices"][0]


def test_token_ids(server: LiveServer) -> None:
    body = {"max_tokens": 3, "return_token_ids": True, **GREEDY}
    completion = server.complete("ab", **body).json()["choices"][0]
    assert completion["token_ids"] == ids("The")
    assert completion["prompt_token_ids"] == ids("ab")
    chat = server.chat("ab", **body).json()
    assert chat["choices"][0]["token_ids"] == ids("The")
    assert chat["prompt_token_ids"] == server.engine.requests[1].prompt_token_ids
    events = server.events(CHAT, {"messages": HI} | body)
    assert "prompt_token_ids" in events[0]
    streamed = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert streamed == ids("The")


def test_tokens_without_text_are_still_told(server: LiveServer) -> None:
    script(server, ids("🚀"))
    body = {"prompt": "a", "max_tokens": 4, "return_token_ids": True}
    events = server.events(COMPLETIONS, body)
    assert [t for event in events for t in event["choices"][0]["token_ids"]] == ids("🚀")


# -- lengths


@pytest.mark.parametrize(
    ("prompt", "limit", "status"),
    [
        (MAX_MODEL_LEN - 1, 1, 200),
        (MAX_MODEL_LEN - 1, None, 200),
        (MAX_MODEL_LEN - 1, 2, 400),
        (MAX_MODEL_LEN, 1, 400),
        (MAX_MODEL_LEN, None, 400),
        (9000, 4, 400),
        (1, 50_000, 400),
        (1, 10**30, 400),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_edge_of_the_context(
    server: LiveServer, prompt: int, limit: int | None, status: int, stream: bool
) -> None:
    answer = server.complete([50] * prompt, max_tokens=limit, stream=stream)
    assert answer.status_code == status
    if status == 400:
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert str(MAX_MODEL_LEN) in error["message"]
        assert str(prompt) in error["message"]
        assert "maximum context length" in error["message"]


def test_chat_lengths(server: LiveServer) -> None:
    answer = server.chat("a" * 600)
    assert answer.status_code == 400
    assert "619" in answer.json()["error"]["message"]
    assert server.chat("hi", max_completion_tokens=50_000, stream=True).status_code == 400


def test_default_lengths_are_cut_to_the_context(server: LiveServer) -> None:
    assert server.complete([50] * (MAX_MODEL_LEN - 3)).json()["usage"]["completion_tokens"] == 3


def test_truncation_keeps_the_end(server: LiveServer) -> None:
    server.complete("abcdef", truncate_prompt_tokens=2, max_tokens=1)
    assert server.engine.requests[-1].prompt_token_ids == ids("ef")
    server.complete("a" * 1000, truncate_prompt_tokens=-1, max_tokens=100)
    assert len(server.engine.requests[-1].prompt_token_ids) == MAX_MODEL_LEN - 100
    answer = server.complete("a", truncate_prompt_tokens=MAX_MODEL_LEN + 1)
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["", "ok"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [5, 5279552648]}, "prompt"),
        ({"prompt": [5, 10**30]}, "prompt"),
        ({"prompt": "a", "logit_bias": {"999999": 1}}, "logit_bias"),
        ({"prompt": "a", "allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        ({"prompt": "a", "stop_token_ids": [2**70]}, "stop_token_ids"),
        ({"prompt": "a", "priority": 1}, "priority"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_plain_400s(
    server: LiveServer, body: dict[str, Any], param: str, stream: bool
) -> None:
    answer = server.post(COMPLETIONS, body | {"stream": stream})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["param"] == param
    assert not server.engine.requests
    assert server.app.service.admission.in_flight == 0


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hi"],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "assistant", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "hologram"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
    ],
)
def test_bad_messages(server: LiveServer, messages: Any) -> None:
    answer = server.post(CHAT, {"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages")


@pytest.mark.parametrize(
    "body",
    [
        {"chat_template": "{% for i in range(9999) %}x{% endfor %}"},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"messages": []}},
    ],
)
def test_templates_of_strangers_are_refused(server: LiveServer, body: dict[str, Any]) -> None:
    answer = server.chat("hi", **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in body


def test_template_arguments_are_passed_on(start: Start) -> None:
    template = "{{ messages[0].content }}{{ mood }}{{ reasoning_effort }}{{ documents[0].t }}"
    server = start(tokenizer={"chat_templates": {"default": template}})
    body = {"chat_template_kwargs": {"mood": "!"}, "reasoning_effort": "low"}
    server.chat("hi", documents=[{"t": "doc"}], max_tokens=1, **body)
    assert server.engine.requests[0].prompt_token_ids == ids("hi!lowdoc")


# -- names and ids


def test_model_names(server: LiveServer) -> None:
    assert server.complete("a", max_tokens=1).json()["model"] == "fake"
    answer = server.complete("a", model="no-such-model")
    assert answer.status_code == 404
    assert "no-such-model" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "model"


def test_request_ids(server: LiveServer) -> None:
    def made(**kwargs: Any) -> str:
        return str(
            server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, **kwargs).json()["id"]
        )

    assert made(headers={"X-Request-Id": "mine"}) == "cmpl-mine"
    assert made(headers={"X-Request-Id": "x" * 300}).startswith("cmpl-")
    assert len({made(), made()}) == 2
    body = {"prompt": "a", "max_tokens": 1, "request_id": "same"}
    assert [server.post(COMPLETIONS, body).json()["id"] for _ in range(2)] == ["cmpl-same"] * 2
    assert len({request.request_id for request in server.engine.requests}) == 6


def test_unknown_keys_are_named(server: LiveServer) -> None:
    answer = server.chat("hi", max_tokens=1, frobnicate=True, user="me", **{"a\nb": 1})
    assert answer.status_code == 200
    assert answer.headers["x-pippin-ignored"] == "frobnicate"


def test_what_the_engine_is_told(start: Start) -> None:
    server = start(scheduler={"policy": "priority"}, server={"request_timeout": 60.0})
    server.complete(
        "a", max_tokens=2, priority=-4, cache_salt="salt", bad_words=["no"], min_tokens=1
    )
    request: Request = server.engine.requests[0]
    assert (request.priority, request.cache_salt, request.max_tokens) == (-4, "salt", 2)
    assert request.eos_token_ids == (IM_END,)
    assert tuple(ids("no")) in request.bad_words_token_ids
    assert request.deadline is not None
    assert math.isclose(request.deadline - request.arrival_time, 60.0)
