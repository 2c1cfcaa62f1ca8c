"""The exact bytes of each token.

Almost every decoder in use is a byte mapping: byte-level BPE writes bytes as printable characters,
SentencePiece has a token for each byte. Knowing the bytes makes streaming exact and cheap, and is
what the API's ``bytes`` fields want. Decoders of another kind (WordPiece) have no table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as Backend


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes.

    Source: https://github.com/openai/gpt-2/blob/master/src/encoder.py (bytes_to_unicode)
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(value): value for value in visible}
    for value in range(256):
        if value not in visible:
            alphabet[chr(0x100 + len(alphabet) - len(visible))] = value
    return alphabet


class TokenBytes:
    """Bytes by token id, worked out on first use. Thread-safe: entries are only ever added."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = {}
        decoder = _decoder_of(backend)
        self._alphabet = byte_level_alphabet()
        self._steps = _flatten(decoder)
        kinds = [str(step.get("type")) for step in self._steps]
        self.byte_level = kinds == ["ByteLevel"]
        self.exact = self.byte_level or (bool(kinds) and set(kinds) <= _BYTE_STEPS)
        """Whether a decoded text is the tokens' bytes joined."""
        self.strips_first_space = self.exact and any(map(_strips_first_space, self._steps))
        """Whether the decoder drops one space at the very start of a text."""
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of a token; nothing for an id that is not in the vocabulary."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._work_out(token_id)
        return known

    def join(self, token_ids: Sequence[int]) -> bytes:
        return b"".join([self[token_id] for token_id in token_ids])

    def _work_out(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if not self.exact:
            text = self._backend.decode([token_id], skip_special_tokens=False)
            return str(text).encode()
        if self.byte_level:
            if token_id in self._added:
                return str(token).encode()
            try:
                return bytes([self._alphabet[char] for char in token])
            except KeyError:  # a token that was added outside the byte alphabet
                return str(token).encode()
        text = str(token)
        for step in self._steps:
            kind = step.get("type")
            if kind == "Replace":
                text = text.replace(step["pattern"]["String"], step["content"])
            elif kind == "Metaspace":
                text = text.replace(step.get("replacement", "▁"), " ")
            elif kind == "ByteFallback" and _is_byte(text):
                return bytes([int(text[3:5], 16)])
        return text.encode()


_BYTE_STEPS = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


def _decoder_of(backend: Backend) -> dict[str, Any] | None:
    """The decoder's description, without writing out the whole vocabulary."""
    decoder = backend.decoder
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    return state if isinstance(state, dict) else None


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _flatten(inner)]
    if decoder.get("type") == "Replace" and "String" not in decoder.get("pattern", {}):
        return [{"type": "Replace with a pattern"}]
    if decoder.get("type") == "Strip" and (decoder.get("stop") or decoder.get("content") != " "):
        return [{"type": "Strip at the end"}]
    return [decoder]


def _strips_first_space(step: dict[str, Any]) -> bool:
    if step.get("type") == "Strip":
        return int(step.get("start", 0)) > 0
    return step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never"


def _is_byte(token: str) -> bool:
    return (
        len(token) == 6
        and token.startswith("<0x")
        and token.endswith(">")
        and all(char in "0123456789ABCDEFabcdef" for char in token[3:5])
    )


def incomplete_tail(data: bytes) -> bytes:
    """The end of ``data`` that begins a UTF-8 character and may still become one."""
    for length in range(1, min(3, len(data)) + 1):
        lead = data[-length]
        if lead & 0xC0 == 0x80:
            continue
        tail = data[-length:]
        try:
            tail.decode()
        except UnicodeDecodeError as error:
            return tail if error.reason == "unexpected end of data" else b""
        return b""
    return b""
