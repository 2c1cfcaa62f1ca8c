"""Log probabilities in the shapes of OpenAI's two APIs and of vLLM's ``prompt_logprobs``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pippin.server.detokenizer import Detokenizer
from pippin.server.tokenizer import Tokenizer
from pippin.types.request import Logprobs, SamplingParams

#: JSON has no minus infinity; vLLM sends this for masked tokens.
LOWEST = -9999.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token of a text, what it adds to it, and how likely it was."""

    token_id: int
    text: str
    """Texts of all tokens join to the whole: a token inside a character adds nothing, the one that
    completes it adds the character."""
    data: bytes
    offset: int
    """Characters in front of it."""
    entry: Logprobs | None
    """None for the first token of a prompt."""


class TokenNames:
    """Names of single tokens, remembered."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.data = tokenizer.token_bytes
        self.name = lru_cache(maxsize=65536)(self._name)

    def _name(self, token_id: int) -> str:
        """The token's text; where it is only a part of a character, OpenAI's ``bytes:\\xf0``."""
        data = self.data(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class LogprobWriter:
    """Writes tokens in the shapes of the two APIs."""

    def __init__(self, names: TokenNames, top: int, as_ids: bool) -> None:
        """``top``: alternatives a token. ``as_ids`` writes ``token_id:5`` instead of texts."""
        self._names = names
        self._top = top
        self._as_ids = as_ids

    def chat(self, tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """``choices[].logprobs`` of the chat API."""
        return {"content": [self._chat_item(token) for token in tokens]}

    def completion(self, tokens: Sequence[TokenLogprobs], base: int = 0) -> dict[str, list[Any]]:
        """``choices[].logprobs`` of the completions API; ``base`` characters stand in front."""
        return {
            "text_offset": [base + token.offset for token in tokens],
            "token_logprobs": [
                None if token.entry is None else finite(token.entry.logprobs[0]) for token in tokens
            ],
            "tokens": [self._text(token) for token in tokens],
            "top_logprobs": [
                None if token.entry is None else self._by_name(token.entry) for token in tokens
            ],
        }

    def _chat_item(self, token: TokenLogprobs) -> dict[str, Any]:
        entry = token.entry
        assert entry is not None
        return {
            "token": self._text(token),
            "logprob": finite(entry.logprobs[0]),
            "bytes": list(token.data),
            "top_logprobs": [
                {
                    "token": self._name(other),
                    "logprob": finite(value),
                    "bytes": list(self._names.data(other)),
                }
                for other, value in _alternatives(entry, self._top)
            ],
        }

    def _by_name(self, entry: Logprobs) -> dict[str, float]:
        """The most likely tokens, and the chosen one, as in vLLM."""
        chosen = entry.token_ids[0]
        named = {self._name(chosen): finite(entry.logprobs[0])}
        for token_id, value in _alternatives(entry, self._top):
            name = self._name(token_id)
            if name in named and token_id != chosen:  # two tokens with one text
                name = f"token_id:{token_id}"
            named[name] = finite(value)
        return named

    def _text(self, token: TokenLogprobs) -> str:
        return f"token_id:{token.token_id}" if self._as_ids else token.text

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._names.name(token_id)


def of_prompt(
    token_ids: Sequence[int], entries: Sequence[Logprobs | None], tokenizer: Tokenizer
) -> list[TokenLogprobs]:
    """The tokens of a prompt; control tokens show in its text."""
    step = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=False), ()).push(
        token_ids, finished=True, stopped=False
    )
    return [
        TokenLogprobs(*fields)
        for fields in zip(
            token_ids, step.pieces, step.piece_bytes, step.offsets, entries, strict=True
        )
    ]


def prompt_logprobs(
    entries: Sequence[Logprobs | None], top: int, names: TokenNames
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's ``prompt_logprobs``: by token id, the prompt's own token and the most likely ones."""
    made: list[dict[str, dict[str, Any]] | None] = []
    for entry in entries:
        if entry is None:
            made.append(None)
            continue
        ranked = [(*pair, rank) for rank, pair in enumerate(_alternatives(entry, top), 1)]
        own = (entry.token_ids[0], entry.logprobs[0], entry.rank)
        made.append(
            {
                str(token_id): {
                    "logprob": finite(value),
                    "rank": rank,
                    "decoded_token": names.name(token_id),
                }
                for token_id, value, rank in (own, *ranked)
            }
        )
    return made


def _alternatives(entry: Logprobs, top: int) -> list[tuple[int, float]]:
    return list(zip(entry.token_ids[1 : 1 + top], entry.logprobs[1 : 1 + top], strict=True))


def finite(value: float) -> float:
    return value if value >= LOWEST else LOWEST
