"""Chat templates: messages to one text, as transformers and vLLM render them.

Templates are jinja2 in a sandbox. They come with the model or from the operator; what a client
sends is data: jinja in a message is never evaluated, and a client's own template is refused unless
the operator trusts it (a template may loop for ever).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn, TypedDict

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pippin.errors import InvalidRequest
from pippin.server.chat_messages import as_lists, as_text, normalize, plain_data

#: Arguments of ``render`` and of transformers' ``apply_chat_template``: never template variables.
RESERVED = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
        "raise_exception",
        "strftime_now",
    }
)

_MARK = "\ue000CONTINUE_FINAL_MESSAGE\ue001 "
_PROBE = "PIPPIN-PROBE"

#: What a template may raise on data it does not expect.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatOptions(TypedDict, total=False):
    """What ``ChatTemplates.render`` takes beside the messages."""

    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    template_kwargs: Mapping[str, Any] | None


class ChatTemplates:
    """The templates of one model, by name."""

    def __init__(
        self,
        named: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        operator: str | None = None,
        trust_requests: bool = False,
    ) -> None:
        """``operator``: the template that replaces the model's own."""
        sources = {"default": operator} if operator is not None else dict(named)
        self._special_tokens = dict(special_tokens)
        self._named = {name: Template(source) for name, source in sources.items()}
        self._trust_requests = trust_requests

    def __bool__(self) -> bool:
        return bool(self._named)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        prepare: Callable[[list[dict[str, Any]]], None] = lambda chat: None,
    ) -> str:
        """Render ``messages`` (OpenAI's wire format).

        ``continue_final_message`` leaves the last message open; not together with
        ``add_generation_prompt``. ``chat_template``: the name of one of the model's templates, or
        a template where the operator trusts those of clients. ``template_kwargs``: more variables.
        ``prepare`` may change the checked messages before they are rendered.
        Raises ``InvalidRequest`` for messages that are malformed or that the template refuses.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message cannot both be true.",
                param="continue_final_message",
            )
        try:
            extra = plain_data(dict(template_kwargs or {}))
            data = {"tools": plain_data(tools) or None, "documents": plain_data(documents)}
        except RecursionError as error:
            raise InvalidRequest("the request is nested too deeply.") from error
        for name in extra:
            if name in RESERVED or name.startswith("_"):
                raise InvalidRequest(
                    f"chat_template_kwargs must not contain '{name}'.", param="chat_template_kwargs"
                )
        template = self._pick(chat_template, bool(tools))
        chat = normalize(messages)
        template.adapt(chat)
        prepare(chat)
        if continue_final_message:
            _mark_end(chat[-1])
        text = template.render(
            {
                **self._special_tokens,
                **extra,
                **data,
                "messages": chat,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at_mark(text) if continue_final_message else text

    def _pick(self, requested: str | None, has_tools: bool) -> Template:
        if requested is not None:
            if requested in self._named:
                return self._named[requested]
            if not self._trust_requests:
                raise InvalidRequest(
                    "this server does not take chat templates from requests.",
                    param="chat_template",
                    hint="the operator can allow them with --trust-request-chat-template",
                )
            return Template(requested)
        if has_tools and "tool_use" in self._named:
            return self._named["tool_use"]
        if "default" in self._named:
            return self._named["default"]
        if len(self._named) == 1:
            return next(iter(self._named.values()))
        raise InvalidRequest(
            "this model has no chat template: use /v1/completions,"
            " or start the server with --chat-template FILE.",
            param="messages",
            hint="pippin serve MODEL --chat-template FILE",
        )


class Template:
    """One template and what it expects. Compiled on first use: a broken one fails its requests."""

    def __init__(self, source: str) -> None:
        self.source = source

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidRequest(
                f"the chat template is not valid: {error}", param="chat_template"
            ) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises ``InvalidRequest`` with the template's own message."""
        try:
            return self._compiled.render(variables)
        except _TEMPLATE_ERRORS as error:
            message = str(error) or type(error).__name__
            raise InvalidRequest(
                f"the chat template refuses these messages: {message}", param="messages"
            ) from error

    def adapt(self, chat: list[dict[str, Any]]) -> None:
        """Turn each message into the form this template reads (in place)."""
        for message in chat:
            if message["role"] == "developer" and "developer" not in self.source:
                message["role"] = "system"
            content = message.get("content")
            if content is None:
                message["content"] = None if self._tests_none else ""
            elif isinstance(content, list):
                message["content"] = content if self.reads_lists else as_text(content)
            elif not self.reads_strings and self.reads_lists:
                message["content"] = as_lists(content)

    @cached_property
    def _tests_none(self) -> bool:
        return (
            re.search(r"\bcontent['\"]?\]?\s+is\s+(not\s+)?none\b", self.source, re.I) is not None
        )

    @cached_property
    def reads_strings(self) -> bool:
        """Whether a message whose content is a string comes out right."""
        return self._shows(_PROBE)

    @cached_property
    def reads_lists(self) -> bool:
        """Whether a message whose content is a list of parts comes out right."""
        return self._shows([{"type": "text", "text": _PROBE}])

    def _shows(self, content: Any) -> bool:
        variables = {
            "messages": [{"role": "user", "content": content}],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            "bos_token": "",
            "eos_token": "",
        }
        try:
            text = self._compiled.render(variables)
        except _TEMPLATE_ERRORS:
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text


def _mark_end(message: dict[str, Any]) -> None:
    """Put a mark behind the text of the message that is to be continued."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _MARK
        return
    for part in reversed(content or []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _MARK
            return
    raise InvalidRequest(
        "continue_final_message needs a final message with text.", param="continue_final_message"
    )


def _cut_at_mark(text: str) -> str:
    mark = _MARK.strip()
    end = text.rfind(mark)
    if end == -1:
        raise InvalidRequest(
            "continue_final_message: the chat template does not show the final message.",
            param="continue_final_message",
        )
    if text.startswith(_MARK, end):
        return text[:end]
    return text[:end].rstrip()  # the template trims messages


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's part for training; here it is only passed by."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateDict:
    """``dict(...)`` and ``dict.fromkeys`` without the class itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """A namespace without underscore names, which would reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # allows namespace(self=...)
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    """Source: transformers' ``utils/chat_template_utils.py``."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    env.globals["dict"] = _TemplateDict()
    env.globals["namespace"] = _TemplateNamespace
    return env
