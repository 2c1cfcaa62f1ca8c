"""Texts that tell tokenizers apart, and GGUF files as llama.cpp's converter makes them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFWriter

PIECES: tuple[str, ...] = (
    # words, contractions, case
    *("the", " quick", " Brown", "FOX's", " don't", " we'LL", "I'm", " o'clock", "camelCaseWord"),
    *(" naïve", "résumé", "re\u0301sume\u0301", " Straße", "ﬁne", " ŒUVRE", "ǅ", " Ünïcödé"),
    # scripts
    *("你好", "世界。", "機器學習", " 中文", "こんにちは", "カタカナ"),
    *("한국어", " 안녕", "Привет", " мир"),
    *("שלום", " مرحبا", "नमस्ते", " हिन्दी", "ภาษาไทย", "ქართული", "Ελληνικά", " বাংলা"),
    "اَلْعَرَبِيَّةُ",
    # emoji
    *("🚀", " 🌶️", "👩‍🌾", "🇩🇪", "👍🏽", " ❤️‍🔥", "😀😀", "\U0001fae8"),
    # numbers
    *("1", "42", " 1234567", "3.14159", "1,000,000", "٣٤٥", "Ⅻ", "½", "²³", " 0x1F", "१२३", "1st"),
    # code
    *("def f(x):\n    return x**2\n", "for (int i=0;i<n;++i) {", "\tif x:\r\n\t\tpass"),
    "</div>\n\n",
    *("a_b-c.d/e\\f", "#include <stdio.h>", '{"k": [1, null]}', "!=", "===", "//"),
    *("->", "$x{@}", "`~|"),
    # white space and controls
    *(" ", "  ", "    ", "\n", "\n\n\n", "\r\n", "\t", "\t\t", "\u3000", "\xa0"),
    *("\u2009", "\u200b", "\v"),
    *("\x00", "\x01", "\x1b[31m", "\x7f", "\x85", "\u2028", "\ufeff", "\ufffd", "\u202e", "\x0c"),
    # edges
    *("▁", "Ġ", "Ċ", "é", "a\u0301", "\u0301", "ÀÉÎ", "ｆｕｌｌ", "〜！？", "…"),
    *("—", "“q”", "\U0010ffff"),
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|endoftext|>", "<0x41>", "<unk>", "[INST]"),
)  # fmt: skip


def samples(count: int = 1000, seed: int = 0) -> list[str]:
    """Random joins of the pieces, with random code points among them; the pieces alone first."""
    rng = random.Random(seed)
    texts = [*PIECES, "", " leading", "trailing ", "a" * 300, " " * 65, "ab " * 100]
    while len(texts) < count:
        parts = [rng.choice(PIECES) for _ in range(rng.randint(2, 12))]
        if rng.random() < 0.2:
            parts.insert(0, "".join(map(chr, _code_points(rng))))
        texts.append(rng.choice(("", " ", "")).join(parts))
    return texts[:count]


def _code_points(rng: random.Random) -> list[int]:
    points = [rng.choice((0x80, 0x800, 0x3000, 0x10000, 0x1F000, 0x20000)) for _ in range(3)]
    return [base + rng.randrange(0x700) for base in points]


def write_gguf(path: Path, **values: Any) -> Path:
    """A GGUF file with only a tokenizer: ``tokenizer.ggml.*`` by keyword (``template`` apart)."""
    writer = GGUFWriter(path, "llama")
    template = values.pop("chat_template", None)
    for key, value in values.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_array(name, value)
    if template is not None:
        writer.add_string("tokenizer.chat_template", template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def gguf_of_byte_level(tokenizer_json: Path, path: Path, pre: str, **values: Any) -> Path:
    """What ``convert_hf_to_gguf.py`` makes of a byte-level BPE ``tokenizer.json``."""
    data = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    names = {token_id: token for token, token_id in data["model"]["vocab"].items()}
    added = {entry["id"]: entry for entry in data["added_tokens"]}
    names.update({token_id: entry["content"] for token_id, entry in added.items()})
    size = max(names) + 1
    tokens = [names.get(token_id, f"[PAD{token_id}]") for token_id in range(size)]
    types = [1 if token_id in names else 5 for token_id in range(size)]
    for token_id, entry in added.items():
        types[token_id] = 3 if entry["special"] else 4
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]
    ]
    return write_gguf(
        path, model="gpt2", pre=pre, tokens=tokens, token_type=types, merges=merges, **values
    )


def differences(ours: Any, theirs: Any, texts: Sequence[str]) -> list[tuple[str, Any, Any]]:
    """Texts that two encoding functions disagree on."""
    found = []
    for text in texts:
        one, other = ours(text), theirs(text)
        if list(one) != list(other):
            found.append((text, one, other))
    return found
