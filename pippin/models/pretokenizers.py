"""Pre-tokenizers of byte-level BPE tokenizers by llama.cpp's names (``tokenizer.ggml.pre``).

A GGUF file keeps of its tokenizer only the name of the pre-tokenizer. This table gives back what
the original ``tokenizer.json`` of each family holds. The patterns are the originals where they are
known, otherwise llama.cpp's; normalisers, which llama.cpp leaves out, are the originals' as well.

Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_PLAIN = _CASED % ("", "")
_CASED_CONTRACTED = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = rf"{_CASED_CONTRACTED}|\p{{N}}{{1,3}}|{_SLASH_TAIL}"
_TEKKEN = rf"{_CASED_PLAIN}|\p{{N}}|{_SLASH_TAIL}"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = r"[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK_CJK = r"[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-"
    r"ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ"
    r"-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~！-／：-～‘-‟　-。]+"
_NOT_HAN = "&&[^\\p{Han}]]"
_KIMI_K2 = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER[:-1]}{_NOT_HAN}*{_LOWER[:-1]}{_NOT_HAN}+{_CONTRACTIONS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER[:-1]}{_NOT_HAN}+{_LOWER[:-1]}{_NOT_HAN}*{_CONTRACTIONS}?",
        r"\p{N}{1,3}",
        _TAIL,
    )
)
_JAIS2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)"
    r"|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_MINICPM5 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+|{_TAIL}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_YOUTU_CJK = r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)


def _digits() -> Any:
    return pre_tokenizers.Digits(individual_digits=True)


def _byte_level(use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One family: ``patterns`` cut the text one after the other, then bytes are mapped.

    ``\\d`` as a pattern stands for the ``Digits`` pre-tokenizer (each digit by itself).
    """

    patterns: tuple[str, ...]
    gpt2: bool = False
    """Cut by GPT-2's own pattern at the end (``ByteLevel(use_regex=True)``)."""
    nfc: bool = False
    ignore_merges: bool = False
    """A word that is in the vocabulary is one token, whatever the merges say."""
    add_bos: bool = False
    """Default where the file does not say."""

    def pre_tokenizer(self) -> Any:
        steps = [_digits() if pattern == r"\d" else _split(pattern) for pattern in self.patterns]
        return pre_tokenizers.Sequence([*steps, _byte_level(self.gpt2)])

    def normalizer(self) -> Any:
        return normalizers.NFC() if self.nfc else None


class _Falcon(PreTokenizer):
    """Falcon cuts after the byte mapping as well."""

    def pre_tokenizer(self) -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation(behavior="contiguous"),
                _byte_level(use_regex=True),
                pre_tokenizers.Digits(individual_digits=False),
                _split("[0-9][0-9][0-9]"),
            ]
        )


_llama3 = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_plain_llama3 = PreTokenizer((_LLAMA3,))
_glm4 = PreTokenizer((_LLAMA3,), ignore_merges=True)
_gpt2 = PreTokenizer((), gpt2=True)
_gpt2_nfc = PreTokenizer((), gpt2=True, nfc=True)
_digits_gpt2 = PreTokenizer((r"\d",), gpt2=True)
_qwen2 = PreTokenizer((_QWEN2,), nfc=True)
_plain_qwen2 = PreTokenizer((_QWEN2,))
_deepseek3 = PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))
_gpt4o = PreTokenizer((_GPT4O,))
_bloom = PreTokenizer((_BLOOM,))
_bailing = PreTokenizer((_BAILING,))
_falcon = _Falcon(())

#: llama.cpp's name to the family.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _falcon,
    "falcon": _falcon,
    **dict.fromkeys(
        (
            "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0",
            "lfm2", "jina-v5-nano",
        ),
        _llama3,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _plain_llama3),
    **dict.fromkeys(("glm4", "glm5"), _glm4),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _MINICPM5), ignore_merges=True),
    "jais-2": PreTokenizer((_JAIS2,)),
    **dict.fromkeys(
        (
            "gpt-2", "phi-2", "gigachat", "mellum", "jais", "trillion", "granite-docling",
            "exaone4",
        ),
        _gpt2,
    ),
    **dict.fromkeys(("mpt", "olmo", "modern-bert", "a.x-4.0"), _gpt2_nfc),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "minerva-7b", "mellum2"), _digits_gpt2
    ),
    **dict.fromkeys(("command-r", "exaone"), PreTokenizer((r"\d",), gpt2=True, nfc=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _qwen2),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _plain_qwen2),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _deepseek3),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, r"\s+$", _DEEPSEEK_CJK, r"\d",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\d")),
    "youtu": PreTokenizer(
        (_YOUTU_CJK, rf"{_CASED_CONTRACTED}|\p{{N}}|{_SLASH_TAIL}"), ignore_merges=True
    ),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _gpt4o),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"), PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))
    ),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "kimi-k2": PreTokenizer((_KIMI_K2,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _bailing),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _bloom),
    "viking": PreTokenizer((_BLOOM, r"\d")),
}  # fmt: skip
