"""Text of one token after the other: whole characters, each as soon as it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pippin.server.token_bytes import incomplete_tail
from pippin.server.tokenizer import Tokenizer


class TokenDecoder(Protocol):
    pending: bytes
    """Of a character that is not complete."""

    def push(self, token_id: int) -> str:
        """Text that the token completes."""

    def shown_bytes(self, token_id: int) -> bytes:
        """Bytes that the token brings to the text."""


def make_decoder(
    tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]
) -> TokenDecoder:
    if tokenizer.bytes.exact:
        return ByteDecoder(tokenizer, skip_special_tokens, prompt_token_ids)
    return WindowDecoder(tokenizer, skip_special_tokens, prompt_token_ids)


class ByteDecoder:
    """For tokenizers whose tokens are bytes.

    Bytes that can never be a character become U+FFFD, but only once a whole character follows:
    an answer that is cut inside a character simply ends before it.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]
    ) -> None:
        self._bytes = tokenizer.bytes
        self._hidden = tokenizer.bytes.special_ids if skip_special_tokens else frozenset()
        self._borrowed = self._prompt_tail(prompt_token_ids)
        self.pending = self._borrowed
        self._at_start = tokenizer.bytes.strips_first_space and all(
            token_id in self._hidden for token_id in prompt_token_ids
        )

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        """Bytes of a character that the prompt begins and does not end (at most three)."""
        tail = b""
        for token_id in reversed(prompt_token_ids[-4:]):
            if token_id in self._bytes.special_ids:
                break
            tail = self._bytes[token_id] + tail
            if len(tail) >= 4:
                break
        return incomplete_tail(tail)

    def shown_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden else self._bytes[token_id]

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        new = self._bytes[token_id]
        if self._at_start and new:
            self._at_start = False
            new = new.removeprefix(b" ")
        if self.pending:
            return self._join(new)
        try:
            return new.decode()
        except UnicodeDecodeError:
            return self._join(new)

    def _join(self, new: bytes) -> str:
        data = self.pending + new
        if self._borrowed:
            if incomplete_tail(data) == data:
                self.pending = data
                return ""
            borrowed, self._borrowed = self._borrowed, b""
            if not _completes(data, len(borrowed)):
                # The model went on with something else: the prompt's bytes are not its text.
                data = data[len(borrowed) :]
        text = data.decode("utf-8", "surrogateescape")
        end = len(text)
        while end and "\udc80" <= text[end - 1] <= "\udcff":
            end -= 1
        tail = len(text) - end
        if tail > _MAX_PENDING:
            tail = 0
        self.pending = data[len(data) - tail :]
        return data[: len(data) - tail].decode("utf-8", "replace")


#: Bytes of no character that are kept waiting for one.
_MAX_PENDING = 64


def _completes(data: bytes, borrowed: int) -> bool:
    """Whether the first character of ``data`` is whole and longer than ``borrowed`` bytes."""
    for length in range(borrowed + 1, 5):
        try:
            data[:length].decode()
        except UnicodeDecodeError:
            continue
        return len(data) >= length
    return False


class WindowDecoder:
    """For any other tokenizer: decode the last tokens with and without the new one.

    Source: Hugging Face text-generation-inference's and vLLM's incremental detokenisation.
    """

    #: Prompt tokens decoded with the first new ones, for the space between them.
    CONTEXT = 6

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self.pending = b""
        self._ids = list(prompt_token_ids[-self.CONTEXT :])
        self._prefix = self._decode(self._ids)
        self._read = len(self._ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def shown_bytes(self, token_id: int) -> bytes:
        if self._skip and token_id in self._tokenizer.bytes.special_ids:
            return b""
        return self._tokenizer.bytes[token_id]

    def push(self, token_id: int) -> str:
        if self._skip and token_id in self._tokenizer.bytes.special_ids:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) <= len(self._prefix) or text.endswith("\ufffd"):
            return ""
        new = text[len(self._prefix) :]
        self._ids = self._ids[self._read :]
        self._prefix = self._decode(self._ids)
        self._read = len(self._ids)
        return new
