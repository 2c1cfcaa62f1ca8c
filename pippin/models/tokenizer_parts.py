"""What a tokenizer is made of, wherever it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer as Backend

#: Tokens that end a turn in the chat formats in use. A model whose own files name another end of
#: sequence (base models' ``<|endoftext|>``) still ends its turn with the one its template writes.
END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|return|>",
    "<|call|>",
    "<end_of_utterance>",
    "<|end_of_role|>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "[EOT]",
)

#: Ends of a message that are not ends of an answer: gpt-oss's ``<|end|>`` closes its analysis too.
_NOT_AN_END = {"<|end|>": "<|return|>"}


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """``backend`` encodes and decodes; the rest is what the files say beside it."""

    backend: Backend
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """``bos_token``, ``eos_token``, … as chat templates see them."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """By name; ``default`` is the one without a name."""
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int = 0


def encode(backend: Backend, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Token ids of one text. Other Python threads run meanwhile, unlike in ``Backend.encode``."""
    encoded = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoded[0].ids)


def end_of_turn_ids(backend: Backend, chat_templates: Mapping[str, str]) -> list[int]:
    """Ids of the end-of-turn tokens that the chat templates write."""
    text = "\n".join(chat_templates.values())
    ids = []
    for token in END_OF_TURN:
        if token not in text or _NOT_AN_END.get(token, "\0") in text:
            continue
        token_id = backend.token_to_id(token)
        if token_id is not None:
            ids.append(int(token_id))
    return ids
