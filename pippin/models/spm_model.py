"""SentencePiece's ``tokenizer.model`` files, read without its library.

Source: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pippin.errors import ModelInvalid

_BPE = 2
_HINT = "fetch the file again"


def read_bpe_model(path: Path) -> dict[str, Any] | None:
    """The model under GGUF's keys (``tokenizer.ggml.*``), for ``gguf_tokenizer.from_metadata``.

    None where the file is of another kind: unigram, with a normaliser of its own, or not
    SentencePiece's at all. Raises ``ModelInvalid`` for a file that breaks off.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelInvalid(f"cannot read {path}: {error.strerror}") from error
    if not data.startswith(b"\x0a"):
        return None
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for field, value in _fields(data):
            if field == 1:
                piece = dict(_fields(value))
                tokens.append(piece[1].decode("utf-8", "replace"))
                scores.append(struct.unpack("<f", piece.get(2, b"\0\0\0\0"))[0])
                types.append(piece.get(3, 1))
            elif field == 2:
                trainer = dict(_fields(value))
            elif field == 3:
                normalizer = dict(_fields(value))
    except (IndexError, KeyError, TypeError, struct.error) as error:
        raise ModelInvalid(f"{path} is truncated or damaged", hint=_HINT) from error
    changes_text = normalizer.get(2, b"") or normalizer.get(4, 1) or trainer.get(24, 0)
    if trainer.get(3, 1) != _BPE or changes_text:
        return None
    ids = {"unknown": trainer.get(40, 0), "bos": trainer.get(41, 1), "eos": trainer.get(42, 2)}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
        **{f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items()},
    }


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message: integers, or bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        kind = key & 7
        value: Any
        if kind == 0:
            value, position = _varint(data, position)
        else:
            if kind == 2:
                size, position = _varint(data, position)
            else:
                size = {1: 8, 5: 4}[kind]
            value = data[position : position + size]
            position += size
            if len(value) != size:
                raise IndexError
        yield key >> 3, value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise IndexError
