"""Text to token ids and back, for the API process: ``tokenizers`` and jinja2, nothing heavier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from pippin.config import environment
from pippin.errors import InvalidRequest, ModelInvalid
from pippin.models.files import ModelFiles, resolve
from pippin.models.gguf_tokenizer import read_gguf
from pippin.models.hub_name import parse
from pippin.models.tokenizer_files import read_directory
from pippin.models.tokenizer_parts import TokenizerParts, encode
from pippin.server.chat_template import ChatOptions, ChatTemplates
from pippin.server.control_tokens import ControlTokens
from pippin.server.token_bytes import TokenBytes, incomplete_tail


def load_tokenizer(
    files: ModelFiles,
    tokenizer: str | None = None,
    *,
    chat_template: str | None = None,
    trust_request_chat_template: bool = False,
    home: Path | None = None,
    offline: bool | None = None,
) -> Tokenizer:
    """The tokenizer of a model.

    ``tokenizer``: another place to take it from: a directory, a ``tokenizer.json``, a GGUF file or
    a hub id. ``chat_template``: the operator's own, a file or the template itself.
    Raises ``ModelInvalid`` (none found, or damaged), ``UnsupportedModel`` or what ``resolve`` does.
    """
    home = environment().home if home is None else home
    parts = _read(Path(files.path), files.kind == "gguf", home) if tokenizer is None else None
    if parts is None:
        path = _find(
            str(tokenizer), home, environment().hub_offline if offline is None else offline
        )
        parts = _read(path, path.suffix == ".gguf", home)
    return Tokenizer(
        parts,
        chat_template=None if chat_template is None else _template_text(chat_template),
        trust_request_chat_template=trust_request_chat_template,
    )


def _find(tokenizer: str, home: Path, offline: bool) -> Path:
    path = Path(tokenizer).expanduser()
    if path.exists():
        return path
    name = parse(tokenizer)
    if name is None or name.file is not None or name.quant is not None:
        return resolve(tokenizer, offline=offline, home=home).path
    from pippin.models.hub import fetch

    return fetch(tokenizer, offline=offline, weights=False)


def _read(path: Path, is_gguf: bool, home: Path) -> TokenizerParts:
    return read_gguf(path) if is_gguf else read_directory(path, home)


def _template_text(chat_template: str) -> str:
    if "{" in chat_template or "\n" in chat_template:
        return chat_template
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelInvalid(
            f"cannot read the chat template {chat_template}: {error}",
            hint="--chat-template takes a file, or the template itself",
        ) from error


class Tokenizer:
    """Thread-safe: nothing changes after construction but caches."""

    def __init__(
        self,
        parts: TokenizerParts,
        *,
        chat_template: str | None = None,
        trust_request_chat_template: bool = False,
    ) -> None:
        self._backend = parts.backend
        self.bytes = TokenBytes(parts.backend)
        self._control = ControlTokens(parts.backend)
        self.vocab_size = parts.vocab_size
        """Ids of the tokenizer are in [0, vocab_size); a model's head may have more rows."""
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self.default_sampling = dict(parts.default_sampling)
        """From ``generation_config.json``, under ``SamplingParams``' names."""
        self.special_tokens = dict(parts.special_tokens)
        self._templates = ChatTemplates(
            dict(parts.chat_templates),
            parts.special_tokens,
            operator=chat_template,
            trust_requests=trust_request_chat_template,
        )

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Markers of control tokens in the text become those tokens, as in vLLM.

        Time is linear in the text. Raises ``InvalidRequest`` for text that is not Unicode (lone
        surrogates).
        """
        _check_unicode(text)
        return encode(self._backend, text, add_special_tokens=add_special_tokens)

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """As ``encode``, of several texts, on all cores."""
        for text in texts:
            _check_unicode(text)
        encoded = self._backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [list(one.ids) for one in encoded]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; ids between the tokenizer's vocabulary and 2**31 have no text.

        Raises ``InvalidRequest`` for others.
        """
        for token_id in token_ids:
            if not 0 <= token_id < 2**31:
                raise InvalidRequest(
                    f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens.",
                    param="tokens",
                )
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def decode_whole(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """As ``decode``, without a character that the last tokens begin and do not end.

        The text of a prompt whose answer goes on inside a character: the answer brings it whole.
        """
        text = self.decode(token_ids, skip_special_tokens)
        if not self.bytes.exact or not text.endswith("\ufffd"):
            return text
        hidden = self.bytes.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.bytes[token_id] for token_id in token_ids if token_id not in hidden)
        tail = incomplete_tail(data)
        return data[: len(data) - len(tail)].decode("utf-8", "replace") if tail else text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; nothing for ids without a token."""
        return self.bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself; bytes that are no character show as U+FFFD."""
        return self.bytes[token_id].decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self.bytes.special_ids

    def special_stops(self, stops: Sequence[str]) -> dict[int, str]:
        """Stop strings that are one special token, by its id: they never show in the text."""
        found = {}
        for stop in stops:
            token_id = self._backend.token_to_id(stop)
            if token_id is not None and token_id in self.bytes.special_ids:
                found[int(token_id)] = stop
        return found

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Token ids of a chat; ``options`` and errors: ``ChatTemplates.render``.

        Markers of control tokens in what users and tools wrote are encoded as text.
        """
        text, key = self._render(messages, options)
        if key is None:
            return self.encode(text, add_special_tokens=False)
        _check_unicode(text)
        return self._control.encode(text, key)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> str:
        """The chat as the template writes it."""
        text, key = self._render(messages, options)
        return text if key is None else self._control.restore(text, key)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> tuple[str, str | None]:
        keys: list[str | None] = []
        text = self._templates.render(
            messages, **options, prepare=lambda chat: keys.append(self._control.hide(chat))
        )
        return text, keys[0]

    def bad_words_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences to ban: each word at the start of a text, behind a space, and inside.

        vLLM leaves out the form with a space where it has another number of tokens; its
        documentation promises the ban, so here both are banned always.
        Raises ``InvalidRequest`` for a blank word.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip()
            if not bare.strip():
                raise InvalidRequest("bad_words must not contain a blank word.", param="bad_words")
            newline = tuple(self.encode("\n", add_special_tokens=False))
            behind = tuple(self.encode(f"\n{bare}", add_special_tokens=False))
            for ids in (
                tuple(self.encode(bare, add_special_tokens=False)),
                tuple(self.encode(f" {bare}", add_special_tokens=False)),
                behind[len(newline) :] if behind[: len(newline)] == newline else (),
            ):
                if ids:
                    sequences[ids] = None
        return tuple(sequences)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("the text holds a lone surrogate, which is not Unicode.") from error
