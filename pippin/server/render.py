"""Answers in OpenAI's shapes: whole bodies, and stream chunks that encode only what is new.

Source: https://platform.openai.com/docs/api-reference (chat.completion, chat.completion.chunk,
text_completion) with vLLM's additions (stop_reason, token_ids, prompt_logprobs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from pippin.server.generation import Choice, Generation, Piece
from pippin.server.logprobs import LogprobWriter, TokenNames, of_prompt, prompt_logprobs
from pippin.server.openai import Shape

DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of an answer repeat."""

    kind: Literal["chat", "completion"]
    id: str
    created: int
    model: str
    fingerprint: str

    def fields(self, *, streamed: bool) -> dict[str, Any]:
        if self.kind == "chat":
            name = "chat.completion.chunk" if streamed else "chat.completion"
        else:
            name = "text_completion"
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def usage(generation: Generation) -> dict[str, Any]:
    prompt, completion = generation.num_prompt_tokens, generation.num_completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }


def event(value: Any) -> bytes:
    return b"data: " + _json(value) + b"\n\n"


class ChoiceRenderer:
    """Renders one choice, whole or piece by piece."""

    def __init__(
        self, head: Head, shape: Shape, choice: Choice, echo: str, names: TokenNames
    ) -> None:
        """``echo`` is the text to put in front, empty where none is asked for."""
        self._choice = choice
        self._request = choice.request
        self._is_chat = head.kind == "chat"
        self._shape = shape
        self._echo = echo
        self._names = names
        self._writer = LogprobWriter(names, shape.top_logprobs, shape.tokens_as_ids)
        self._opened = False
        self._fields = head.fields(streamed=True)
        fields = _json(self._fields)[:-1]
        text_key = b'"delta":{"content":' if self._is_chat else b'"text":'
        self._before = b'data: %b,"choices":[{"index":%d,%b' % (fields, choice.index, text_key)
        self._after = (
            b"}" if self._is_chat else b""
        ) + b',"logprobs":null,"finish_reason":null}]}\n\n'

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The choice in an answer that is not streamed."""
        shape, last = self._shape, pieces[-1]
        text = self._echo + "".join(piece.text for piece in pieces)
        made: dict[str, Any] = {"index": self._choice.index}
        if self._is_chat:
            made["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            made["text"] = text
        parts = [self._prompt_part(pieces[0])] if shape.echo else []
        parts += [self._answer_part(piece) for piece in pieces]
        made["logprobs"] = self._joined([part for part in parts if part is not None])
        made["finish_reason"] = last.finish_reason
        made["stop_reason"] = last.stop_reason
        if shape.token_ids:
            made["token_ids"] = [token for piece in pieces for token in piece.token_ids]
        if not self._is_chat:
            if shape.token_ids:
                made["prompt_token_ids"] = self._request.prompt_token_ids
            if shape.prompt_logprobs is not None:
                made["prompt_logprobs"] = self.prompt_logprobs(pieces[0])
        return made

    def prompt_logprobs(self, first: Piece) -> Any:
        """vLLM's ``prompt_logprobs``, from the choice's first piece."""
        if first.prompt_logprobs is None or self._shape.prompt_logprobs is None:
            return None
        return prompt_logprobs(first.prompt_logprobs, self._shape.prompt_logprobs, self._names)

    def chunk(self, piece: Piece, usage_now: dict[str, Any] | None) -> bytes:
        """Bytes of the piece's events; none if there is nothing to tell."""
        shape = self._shape
        opening = b""
        if not self._opened:
            self._opened = True
            opening = self._opening(piece, usage_now)
        if piece.finish_reason is None and usage_now is None:
            if not shape.logprobs and not shape.token_ids:  # nearly all of them
                if not piece.text:
                    return opening
                return opening + self._before + _json(piece.text) + self._after
            if not (piece.text or piece.logprobs or (shape.token_ids and piece.token_ids)):
                return opening
        return opening + self._event(self._delta(piece), usage_now)

    def _opening(self, piece: Piece, usage_now: dict[str, Any] | None) -> bytes:
        """The first event of a choice: the role (chat), and what is echoed."""
        shape = self._shape
        if not (self._is_chat or shape.echo or shape.token_ids):
            return b""
        made: dict[str, Any] = {"index": self._choice.index}
        if self._is_chat:
            made["delta"] = {"role": "assistant", "content": self._echo}
        else:
            made["text"] = self._echo
        made["logprobs"] = self._prompt_part(piece) if shape.echo else None
        made["finish_reason"] = None
        if shape.token_ids:
            made["token_ids"] = []
            if not self._is_chat:
                made["prompt_token_ids"] = self._request.prompt_token_ids
        beside = {}
        if shape.token_ids and self._is_chat:
            beside["prompt_token_ids"] = self._request.prompt_token_ids
        return self._event(made, usage_now, beside)

    def _delta(self, piece: Piece) -> dict[str, Any]:
        made: dict[str, Any] = {"index": self._choice.index}
        if self._is_chat:
            made["delta"] = {"content": piece.text} if piece.text or not piece.finish_reason else {}
        else:
            made["text"] = piece.text
        made["logprobs"] = self._answer_part(piece)
        made["finish_reason"] = piece.finish_reason
        if piece.finish_reason is not None:
            made["stop_reason"] = piece.stop_reason
        if self._shape.token_ids:
            made["token_ids"] = piece.token_ids
        return made

    def _event(
        self,
        choice: dict[str, Any],
        usage_now: dict[str, Any] | None,
        beside: dict[str, Any] | None = None,
    ) -> bytes:
        chunk = self._fields | {"choices": [choice]} | (beside or {})
        if usage_now is not None:
            chunk["usage"] = usage_now
        return event(chunk)

    def _answer_part(self, piece: Piece) -> dict[str, list[Any]] | None:
        shape = self._shape
        if not shape.logprobs or not piece.logprobs:
            return None
        if self._is_chat:
            return self._writer.chat(piece.logprobs)
        return self._writer.completion(piece.logprobs, base=len(self._echo))

    def _prompt_part(self, first: Piece) -> dict[str, list[Any]] | None:
        """Log probabilities of the echoed prompt (completions only)."""
        if self._is_chat or not self._shape.logprobs or first.prompt_logprobs is None:
            return None
        prompt = self._request.prompt_token_ids
        return self._writer.completion(
            of_prompt(prompt, first.prompt_logprobs, self._names.tokenizer)
        )

    def _joined(self, parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]] | None:
        if not self._shape.logprobs:
            return None
        keys = (
            ("content",)
            if self._is_chat
            else ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        )
        return {key: [item for part in parts for item in part[key]] for key in keys}


def usage_event(head: Head, generation: Generation) -> bytes:
    """The last event of a stream that was asked to include its usage."""
    return event(head.fields(streamed=True) | {"choices": [], "usage": usage(generation)})


def whole_body(
    head: Head,
    shape: Shape,
    generation: Generation,
    renderers: Sequence[ChoiceRenderer],
    pieces: Sequence[Sequence[Piece]],
) -> dict[str, Any]:
    """The body of an answer that is not streamed; ``pieces`` are those of each choice."""
    body = head.fields(streamed=False)
    body["choices"] = [renderer.whole(own) for renderer, own in zip(renderers, pieces, strict=True)]
    body["usage"] = usage(generation)
    if head.kind == "chat":
        if shape.prompt_logprobs is not None:
            body["prompt_logprobs"] = renderers[0].prompt_logprobs(pieces[0][0])
        if shape.token_ids:
            body["prompt_token_ids"] = generation.choices[0].request.prompt_token_ids
    return body
