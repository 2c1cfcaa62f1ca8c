"""Tokenizers from GGUF metadata, as ``tokenizers`` objects that equal the originals.

Source of the keys and their meaning: llama.cpp's ``conversion`` scripts and ``llama-vocab.cpp``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from pippin.errors import ModelInvalid, UnsupportedModel
from pippin.models.gguf_metadata import read_metadata
from pippin.models.pretokenizers import PRE_TOKENIZERS
from pippin.models.tokenizer_parts import TokenizerParts, end_of_turn_ids

logger = logging.getLogger(__name__)

_HINT = "pass the original tokenizer with --tokenizer"


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_gguf(path: Path) -> TokenizerParts:
    """The tokenizer of a GGUF file.

    Raises ``ModelInvalid`` where the file holds none or an inconsistent one, ``UnsupportedModel``
    for kinds that no text generation model here uses (``bert``, ``t5``, ``rwkv``).
    """
    return from_metadata(read_metadata(path), str(path))


def from_metadata(metadata: Mapping[str, Any], name: str) -> TokenizerParts:
    """As ``read_gguf``; ``name`` stands in errors."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or "tokenizer.ggml.tokens" not in metadata:
        raise ModelInvalid(f"{name} holds no tokenizer", hint=_HINT)
    vocabulary = _Vocabulary(metadata, name)
    if kind == "gpt2":
        backend, add_bos = _byte_level_bpe(vocabulary)
    elif kind == "gemma4":
        backend, add_bos = _merged_spm(vocabulary), True
    elif kind == "llama":
        backend, add_bos = _spm(vocabulary), True
    else:
        raise UnsupportedModel(f"{name}: no support for '{kind}' tokenizers", hint=_HINT)
    _add_tokens(backend, vocabulary)
    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    template = _template(vocabulary, bos if add_bos else None, eos if add_eos else None)
    if template is not None:
        backend.post_processor = template
    templates = _chat_templates(metadata)
    ends = [eos, vocabulary.special("eot"), vocabulary.special("eom")]
    ends += end_of_turn_ids(backend, templates)
    return TokenizerParts(
        backend=backend,
        special_tokens={
            f"{role}_token": vocabulary.tokens[token_id]
            for role, key in (
                ("bos", "bos"),
                ("eos", "eos"),
                ("unk", "unknown"),
                ("pad", "padding"),
                ("sep", "seperator"),
                ("mask", "mask"),
            )
            if (token_id := vocabulary.special(key)) is not None
        },
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        chat_templates=templates,
        default_sampling=_default_sampling(metadata),
        vocab_size=len(vocabulary.tokens),
    )


class _Vocabulary:
    """The checked ``tokenizer.ggml.*`` arrays."""

    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        self.metadata = metadata
        self.name = name
        self.tokens: list[str] = self._strings("tokens")
        if not self.tokens:
            raise ModelInvalid(f"{name}: the tokenizer's vocabulary is empty", hint=_HINT)
        types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(self.tokens)
        fits = isinstance(types, list) and len(types) == len(self.tokens)
        if not fits or not all(isinstance(kind, int) for kind in types):
            raise ModelInvalid(f"{name}: tokenizer.ggml.token_type does not fit the tokens")
        self.types: list[int] = types

    def _strings(self, key: str) -> list[str]:
        values = self.metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ModelInvalid(f"{self.name}: tokenizer.ggml.{key} is not a list of strings")
        return values

    def special(self, key: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            return None
        return value

    def merges(self) -> list[tuple[str, str]]:
        """``"a b"`` lines. A merge part may itself hold a space, so cut at the one that fits."""
        known = self.ids()
        pairs = []
        for line in self._strings("merges"):
            left, _, right = line.partition(" ")
            if left in known and right in known and left + right in known:
                pairs.append((left, right))
                continue
            cut = line.find(" ", len(left) + 1)
            while cut != -1:
                left, right = line[:cut], line[cut + 1 :]
                if left in known and right in known and left + right in known:
                    pairs.append((left, right))
                    break
                cut = line.find(" ", cut + 1)
        return pairs

    def ids(self) -> dict[str, int]:
        """Tokens that text may turn into. Of equal tokens the first counts, as in llama.cpp."""
        ids: dict[str, int] = {}
        for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind != TokenType.UNUSED:
                ids.setdefault(token, token_id)
        return ids

    def scores(self) -> list[float]:
        scores = self.metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or len(scores) != len(self.tokens):
            raise ModelInvalid(f"{self.name}: tokenizer.ggml.scores does not fit the tokens")
        return scores


def _byte_level_bpe(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    pre = vocabulary.metadata.get("tokenizer.ggml.pre") or ""
    if not pre:
        logger.warning(
            "%s does not name its pre-tokenizer: 'default' may give wrong tokens", vocabulary.name
        )
    if "tokenizer.ggml.merges" not in vocabulary.metadata:
        raise ModelInvalid(f"{vocabulary.name}: the tokenizer has no merges", hint=_HINT)
    family = PRE_TOKENIZERS.get(str(pre) or "default")
    if family is None:
        raise UnsupportedModel(f"{vocabulary.name}: unknown pre-tokenizer '{pre}'", hint=_HINT)
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids(),
            merges=vocabulary.merges(),
            ignore_merges=family.ignore_merges,
        )
    )
    normalizer = family.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = family.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend, family.add_bos


def _merged_spm(vocabulary: _Vocabulary) -> Tokenizer:
    """Gemma 4: merges over raw UTF-8, spaces written as U+2581."""
    return _spm_backend(vocabulary, vocabulary.merges(), split_newlines=True)


def _spm(vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece BPE: merges go by the merged piece's score, equal ones by its id."""
    scores = vocabulary.scores()
    ids = vocabulary.ids()
    found: list[tuple[float, int, int, str, str]] = []
    for piece, token_id in ids.items():
        if vocabulary.types[token_id] in (TokenType.CONTROL, TokenType.BYTE, TokenType.UNKNOWN):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                found.append((-scores[token_id], token_id, cut, left, right))
    found.sort()
    return _spm_backend(vocabulary, [(left, right) for *_, left, right in found])


def _spm_backend(
    vocabulary: _Vocabulary, merges: Sequence[tuple[str, str]], *, split_newlines: bool = False
) -> Tokenizer:
    unknown = vocabulary.special("unknown")
    if unknown is None and TokenType.UNKNOWN in vocabulary.types:
        unknown = vocabulary.types.index(TokenType.UNKNOWN)
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids(),
            merges=merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in vocabulary.types,
        )
    )
    prefix = bool(vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", not split_newlines))
    to_underline = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), to_underline]) if prefix else to_underline
    )
    if split_newlines:
        backend.pre_tokenizer = pre_tokenizers.Split(
            Regex(r"[^\n]+|[\n]+"), behavior="isolated", invert=False
        )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _add_tokens(backend: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens are special; user-defined ones are cut out of the text but stay visible."""
    name = str(vocabulary.metadata.get("general.name", "")).lower()
    strips = "phi-3" in name or "phi3" in name
    keeps = ("<unk>", "<s>", "<|endoftext|>")
    added = []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if token and kind in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN):
            special = kind != TokenType.USER_DEFINED
            added.append(
                AddedToken(
                    token,
                    special=special,
                    normalized=False,
                    rstrip=strips and (special or token == "</s>") and token not in keeps,
                )
            )
    backend.add_tokens(added)


def _template(vocabulary: _Vocabulary, bos: int | None, eos: int | None) -> Any | None:
    """Post-processor that adds begin and end of sequence, None where neither is added."""
    around = [token_id for token_id in (bos, eos) if token_id is not None]
    if not around:
        return None
    single = [f"{vocabulary.tokens[bos]}:0"] if bos is not None else []
    single.append("$A:0")
    if eos is not None:
        single.append(f"{vocabulary.tokens[eos]}:0")
    pair = [part.replace("$A:0", "$B:1") for part in single]
    return processors.TemplateProcessing(
        single=single,
        pair=single + [part if part == "$B:1" else part.replace(":0", ":1") for part in pair],
        special_tokens=[(vocabulary.tokens[token_id], token_id) for token_id in around],
    )


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """``tokenizer.chat_template`` is ``default``; ``tokenizer.chat_template.NAME`` are named."""
    key = "tokenizer.chat_template"
    templates = {}
    for name, value in metadata.items():
        if name == key and isinstance(value, str):
            templates["default"] = value
        elif name.startswith(f"{key}.") and isinstance(value, str):
            templates[name[len(key) + 1 :]] = value
    return templates


def _default_sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Recommended sampling that newer files carry as ``general.sampling.*``."""
    known = {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    return {
        ours: metadata[f"general.sampling.{theirs}"]
        for theirs, ours in known.items()
        if isinstance(metadata.get(f"general.sampling.{theirs}"), int | float)
    }
