"""OpenAI's own client against the server."""

from __future__ import annotations

import openai
import pytest
from conftest import Start
from server_fakes import LiveServer


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=9,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body={"top_k": 5, "ignore_eos": True},
    )
    choice = answer.choices[0]
    assert choice.message.content == "The quick"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 9
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 10


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        max_tokens=9,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The quick"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9


def test_completion_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="fake", prompt=["a", "b"], max_tokens=3, temperature=0, stream=True, logprobs=1
    )
    texts = {0: "", 1: ""}
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "The", 1: "The"}


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "pippin"


def test_errors_have_their_types(client: openai.OpenAI, start: Start) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=messages)
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="fake", messages=messages, temperature=-1)
    locked = start(server={"api_key": ["sesame"]})
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{locked.base}/v1", api_key="x").models.list()


def test_an_error_inside_a_stream_is_raised(server: LiveServer, client: openai.OpenAI) -> None:
    server.engine.errors = {2: "the engine fell over"}
    stream = client.completions.create(model="fake", prompt="a", max_tokens=9, stream=True)
    with pytest.raises(openai.APIError, match="fell over"):
        list(stream)
