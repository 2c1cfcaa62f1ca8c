"""OpenAI's wire format to what is to be generated: checks, defaults, vLLM's extensions.

Pure functions. A field that would change the output and is not supported is an error, never
ignored (DESIGN 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from pippin.errors import InvalidRequest, NotSupported
from pippin.server.schema import (
    HARMLESS,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    Sampling,
    TokenizeRequest,
)
from pippin.server.wire import convert
from pippin.types.request import MAX_LOGPROBS, SamplingParams

#: Most stop strings and bad words of one request.
MAX_WORDS = 128
MAX_REQUEST_ID = 256

#: Roles of messages; a role is written into the prompt, so that it cannot be any text.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

TextOrIds = str | list[int]


@dataclass(frozen=True, slots=True)
class Shape:
    """What the answer is to contain, besides its text."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    """Put the prompt (chat: the last message of the same role) in front of the answer."""
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    """How many a prompt position, in vLLM's own shape; None where not asked for."""
    token_ids: bool = False
    """Token ids beside the text (``return_token_ids``)."""
    tokens_as_ids: bool = False
    """``token_id:5`` instead of token texts in logprobs."""
    prompt_only: bool = False
    """``max_tokens`` is 0: the one token that the engine makes is dropped."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a chat template is given; it checks the messages' contents itself."""

    messages: list[dict[str, Any]]
    num_characters: int
    """Of the whole request, about: how much work the template will be."""
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def echo(self) -> str:
        """The text that ``echo`` puts in front of an answer: that of a final assistant message."""
        last = self.messages[-1]
        content = last.get("content")
        return content if last["role"] == "assistant" and isinstance(content, str) else ""


@dataclass(frozen=True, slots=True)
class CompletionPrompts:
    prompts: list[TextOrIds]
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class Parsed:
    """A checked request, not yet tokenised."""

    kind: Literal["chat", "completion"]
    model: str | None
    prompt: ChatPrompt | CompletionPrompts
    params: SamplingParams
    shape: Shape
    limit_given: bool = False
    """Whether the client set the number of tokens; a default is cut to what the context leaves."""
    truncate: int | None = None
    """Keep the last so many prompt tokens; -1: as many as fit."""
    priority: int = 0
    request_id: str | None = None
    cache_salt: str = ""
    ignored: tuple[str, ...] = ()
    """Keys that nobody here knows."""

    @property
    def num_sequences(self) -> int:
        prompts = len(self.prompt.prompts) if isinstance(self.prompt, CompletionPrompts) else 1
        return prompts * self.params.n


def parse_chat(body: dict[str, Any], defaults: Mapping[str, Any]) -> Parsed:
    """``defaults`` are the model's own sampling settings (its generation_config.json)."""
    ignored = _check_keys(body, ChatRequest)
    wire = convert(body, ChatRequest)
    if wire.top_logprobs is not None:
        if wire.top_logprobs and not wire.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
        _check_count("top_logprobs", wire.top_logprobs)
    limit = wire.max_completion_tokens
    limit_name = "max_completion_tokens" if limit is not None else "max_tokens"
    limit = wire.max_tokens if limit is None else limit
    limit_given = limit is not None
    if limit is None:
        limit = defaults.get("max_tokens")
    elif limit < 1:
        raise InvalidRequest(f"{limit_name} must be at least 1, got {limit}.", param=limit_name)
    top = wire.top_logprobs or 0
    shape = _shape(wire, logprobs=bool(wire.logprobs), top_logprobs=top)
    return Parsed(
        kind="chat",
        model=wire.model,
        prompt=chat_prompt(wire),
        params=_params(wire, defaults, limit, top if wire.logprobs else None),
        shape=shape,
        limit_given=limit_given,
        **_common(wire, ignored),
    )


def parse_completion(body: dict[str, Any], defaults: Mapping[str, Any]) -> Parsed:
    """``defaults`` are the model's own sampling settings (its generation_config.json)."""
    ignored = _check_keys(body, CompletionRequest)
    wire = convert(body, CompletionRequest)
    if wire.suffix:
        raise NotSupported(
            "suffix is not supported: this model completes at the end only.", param="suffix"
        )
    n = 1 if wire.n is None else wire.n
    if wire.best_of is not None and wire.best_of != n:
        raise NotSupported("best_of other than n is not supported.", param="best_of")
    if wire.logprobs is True:
        raise InvalidRequest("logprobs: expected an integer from 0 to 20.", param="logprobs")
    top = None if wire.logprobs is False else wire.logprobs
    if top is not None:
        _check_count("logprobs", top)
    limit = defaults.get("max_tokens", 16) if wire.max_tokens is None else wire.max_tokens
    prompt_only = limit == 0
    if prompt_only:
        if not wire.echo and wire.prompt_logprobs is None:
            raise InvalidRequest(
                "max_tokens must be at least 1; 0 needs echo or prompt_logprobs.",
                param="max_tokens",
            )
        limit = 1
    shape = _shape(wire, logprobs=top is not None, top_logprobs=top or 0, prompt_only=prompt_only)
    return Parsed(
        kind="completion",
        model=wire.model,
        prompt=CompletionPrompts(_prompts(wire.prompt), wire.add_special_tokens is not False),
        params=_params(wire, defaults, limit, top),
        shape=shape,
        limit_given=wire.max_tokens is not None,
        **_common(wire, ignored),
    )


def check_tools(tools: list[dict[str, Any]]) -> None:
    """Raise ``InvalidRequest`` for a tool that is not a named function."""
    for i, tool in enumerate(tools):
        at = f"tools[{i}]"
        if tool.get("type", "function") != "function":
            raise InvalidRequest(f"{at}.type: only 'function' is known.", param=f"{at}.type")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(
                f"{at}.function: an object with a name is required.", param=f"{at}.function"
            )


def _check_keys(body: Mapping[str, Any], kind: type[Sampling]) -> tuple[str, ...]:
    """The keys that are ignored. Raises ``NotSupported`` for those that must not be."""
    known = set(kind.__struct_fields__)
    ignored = []
    for key, value in body.items():
        if key in known or key in HARMLESS:
            continue
        if key not in REFUSED:
            ignored.append(key)
        elif not any(value == quiet and type(value) is type(quiet) for quiet in REFUSED[key]):
            raise NotSupported(f"{key} is not supported by this version.", param=key)
    return tuple(ignored)


def _shape(
    wire: Sampling, *, logprobs: bool, top_logprobs: int, prompt_only: bool = False
) -> Shape:
    options = wire.stream_options
    if options is not None and not wire.stream:
        raise InvalidRequest(
            "stream_options is only allowed when stream is true.", param="stream_options"
        )
    if wire.stream and wire.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs are not available with stream.", param="prompt_logprobs"
        )
    kind = "text" if wire.response_format is None else wire.response_format.get("type")
    if kind in ("json_object", "json_schema", "structural_tag", "grammar"):
        raise NotSupported(
            f"response_format of type '{kind}' is not supported by this version.",
            param="response_format",
        )
    if kind != "text":
        raise InvalidRequest(
            "response_format.type must be 'text', 'json_object' or 'json_schema'.",
            param="response_format",
        )
    return Shape(
        stream=bool(wire.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        echo=bool(wire.echo),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        prompt_logprobs=wire.prompt_logprobs,
        token_ids=bool(wire.return_token_ids),
        tokens_as_ids=bool(wire.return_tokens_as_token_ids),
        prompt_only=prompt_only,
    )


def _common(wire: Sampling, ignored: tuple[str, ...]) -> dict[str, Any]:
    if wire.truncate_prompt_tokens is not None and (
        wire.truncate_prompt_tokens < -1 or wire.truncate_prompt_tokens == 0
    ):
        raise InvalidRequest(
            "truncate_prompt_tokens must be at least 1, or -1 for as many as fit.",
            param="truncate_prompt_tokens",
        )
    if wire.request_id is not None and not 0 < len(wire.request_id) <= MAX_REQUEST_ID:
        raise InvalidRequest(
            f"request_id must have 1 to {MAX_REQUEST_ID} characters.", param="request_id"
        )
    if wire.priority is not None and not -(2**31) <= wire.priority < 2**31:
        raise InvalidRequest("priority must be a 32-bit integer.", param="priority")
    if wire.cache_salt == "":
        raise InvalidRequest("cache_salt must not be empty.", param="cache_salt")
    return {
        "truncate": wire.truncate_prompt_tokens,
        "priority": wire.priority or 0,
        "request_id": wire.request_id,
        "cache_salt": wire.cache_salt or "",
        "ignored": ignored,
    }


def _params(
    wire: Sampling, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    stop = (wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ())
    bad_words = tuple(wire.bad_words or ())
    for name, words in (("stop", stop), ("bad_words", bad_words)):
        if len(words) > MAX_WORDS:
            raise InvalidRequest(f"{name} may hold at most {MAX_WORDS} strings.", param=name)
    if any(not word.strip() for word in bad_words):
        raise InvalidRequest("bad_words must not contain a blank string.", param="bad_words")
    if wire.prompt_logprobs is not None:
        _check_count("prompt_logprobs", wire.prompt_logprobs)
    prompt_logprobs = wire.prompt_logprobs
    if wire.echo and logprobs is not None and isinstance(wire, CompletionRequest):
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    given = {name: getattr(wire, name) for name in _PLAIN if getattr(wire, name) is not None}
    model_own = {
        name: defaults[name] for name in _PLAIN if name in defaults and defaults[name] is not None
    }
    return SamplingParams(
        **(model_own | given),
        stop=stop,
        stop_token_ids=tuple(wire.stop_token_ids or ()),
        bad_words=bad_words,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(wire.logit_bias),
        allowed_token_ids=(
            None if wire.allowed_token_ids is None else tuple(wire.allowed_token_ids)
        ),
    )


#: Sampling fields that go from the wire, or from the model's own defaults, as they are.
_PLAIN = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    made = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise InvalidRequest(
                f"logit_bias: the key {key[:40]!r} is not a token id.", param="logit_bias"
            )
        made[int(key)] = value
    return made


def _check_count(name: str, count: int) -> None:
    if not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} must be in [0, {MAX_LOGPROBS}], got {count}.", param=name)


def chat_prompt(wire: ChatRequest | TokenizeRequest) -> ChatPrompt:
    """Raises ``InvalidRequest`` for messages without a known role and for flags that conflict."""
    messages = wire.messages
    if not messages:
        raise InvalidRequest("messages must hold at least one message.", param="messages")
    for i, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise InvalidRequest(
                f"messages[{i}].role: a role is required, one of {', '.join(ROLES)}.",
                param=f"messages[{i}].role",
            )
        if message.get("content") == []:
            raise InvalidRequest(
                f"messages[{i}].content: the list of parts is empty.",
                param=f"messages[{i}].content",
            )
    continued = bool(wire.continue_final_message)
    if continued and wire.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true.",
            param="continue_final_message",
        )
    kwargs = dict(wire.chat_template_kwargs or {})
    if isinstance(wire, ChatRequest) and wire.reasoning_effort is not None:
        kwargs["reasoning_effort"] = wire.reasoning_effort
    return ChatPrompt(
        messages=messages,
        num_characters=sum(len(str(message.get("content"))) for message in messages),
        tools=_tools(wire) if isinstance(wire, ChatRequest) else wire.tools,
        documents=wire.documents if isinstance(wire, ChatRequest) else None,
        add_generation_prompt=not continued and wire.add_generation_prompt is not False,
        continue_final_message=continued,
        chat_template=wire.chat_template,
        template_kwargs=kwargs,
    )


def _tools(wire: ChatRequest) -> list[dict[str, Any]] | None:
    choice = wire.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise InvalidRequest(
            "tool_choice must be 'none', 'auto', 'required' or a named tool.", param="tool_choice"
        )
    if not wire.tools:
        if choice is not None and choice not in ("none", "auto"):
            raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
        return None
    check_tools(wire.tools)
    if choice != "none":
        raise NotSupported(
            "tool calls are not supported by this version; tool_choice 'none' is.",
            param="tool_choice",
        )
    return wire.tools


def _prompts(prompt: str | list[Any]) -> list[TextOrIds]:
    """A string, strings, token ids or lists of token ids; no mixture."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt must not be an empty list.", param="prompt")
    for item_type in (list[str], list[int], list[list[int]]):
        try:
            items = msgspec.convert(prompt, item_type)
        except msgspec.ValidationError:
            continue
        return [items] if item_type == list[int] else items  # type: ignore[list-item, return-value]
    raise InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids or a list of lists of"
        " token ids, not a mixture.",
        param="prompt",
    )
