"""Control-token markers in a client's text stay text.

A chat template writes the turns' borders as text (``<|im_end|>``), and encoding turns every such
marker into its control token, also one that came inside a message: whoever writes a message, or a
web page that a tool fetched, could then end its turn and begin a system turn. So markers in the
contents of users and tools are hidden while the template is rendered, and what they stand in is
encoded as ordinary text. Prompts of completions and other roles keep their markers, as in vLLM.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from pippin.models.tokenizer_parts import encode

_UNTRUSTED = ("user", "tool", "function")


class ControlTokens:
    """The special tokens of one vocabulary, as text."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._plain = Backend(backend.model)  # shares the vocabulary, knows no added tokens
        if backend.normalizer is not None:
            self._plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._plain.pre_tokenizer = backend.pre_tokenizer
        tokens = backend.get_added_tokens_decoder().values()
        self._texts = sorted(
            {token.content for token in tokens if token.special}, key=len, reverse=True
        )
        self._index = {text: index for index, text in enumerate(self._texts)}
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")

    def hide(self, chat: Sequence[dict[str, Any]]) -> str | None:
        """Replace the markers in untrusted contents (in place).

        Returns the key for ``encode`` and ``restore``, None where there was none to replace.
        """
        found = [
            (holder, field)
            for holder, field in _untrusted_texts(chat)
            if self._pattern.search(holder[field]) is not None
        ]
        if not found:
            return None
        key = f"PIPPIN{secrets.token_hex(12)}N"
        for holder, field in found:
            holder[field] = self._pattern.sub(
                lambda marker: f"{key}{self._index[marker.group()]}E", holder[field]
            )
        return key

    def restore(self, text: str, key: str) -> str:
        """The markers as they were."""
        return re.sub(rf"{key}(\d+)E", lambda found: self._texts[int(found.group(1))], text)

    def encode(self, text: str, key: str) -> list[int]:
        """Token ids of a rendered chat: hidden markers as text, the template's own as tokens."""
        ids: list[int] = []
        clean: list[str] = []
        for part in re.split(f"({self._pattern.pattern})", text):
            if key not in part:
                clean.append(part)
                continue
            ids += encode(self._backend, "".join(clean))
            clean.clear()
            ids += encode(self._plain, self.restore(part, key))
        return ids + encode(self._backend, "".join(clean))


def _untrusted_texts(chat: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str]]:
    """Places of the texts that a user or a tool wrote."""
    for message in chat:
        if message["role"] not in _UNTRUSTED:
            continue
        content = message.get("content")
        if isinstance(content, str):
            yield message, "content"
        elif isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and isinstance(part.get("text"), str):
                    yield part, "text"
