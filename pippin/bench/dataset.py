"""Prompts of a load test, made here: nothing is fetched."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from pippin.errors import ConfigError

# Lengths of ShareGPT conversations as vLLM's sampling filter leaves them are close to log-normal:
# prompts of about 60 tokens in the median and 220 in the mean, answers of 140 and 210.
_PROMPT_LOG_MEAN, _PROMPT_LOG_STD = math.log(60.0), 1.5
_OUTPUT_LOG_MEAN, _OUTPUT_LOG_STD = math.log(140.0), 0.9
_LONGEST_PROMPT, _LONGEST_TOTAL, _SHORTEST = 1024, 2048, 4

_FREQUENT = """
the of and to in is that for it with as was on are by this be from or have an they which one you
were her all there would their we him been has when who will more no if out so said what up its
about into than them can only other new some could time these two may then do first any my now
such like our over man me even most made after also did many before must through back years where
much your way well down should because each just those people how too little state good very make
world still own see men work long get here between both life being under never day same another
know while last might us great old year off come since against go came right used take three
states himself few house use during without again place around however home small found thought
went say part once general high upon school every don't does got united left number course war
until always away something fact though water less public put thing almost hand enough far took
head yet government system better set told nothing night end why called find going look asked
later knew point next program city business give group toward young days let room president side
social given present several order national second possible rather per face among form important
often things looked early white case john large big need four within felt along children saw best
church ever least power development light seemed family want interest members mind country area
others done turned although open god service problem
"""

#: Frequent words: one token each in nearly all vocabularies, with the space before them.
WORDS = tuple(_FREQUENT.split())


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    prompt_len: int
    """Tokens by the given tokenizer; without one, words, which is an estimate."""
    output_len: int
    """Tokens to ask for."""


def random_prompts(
    count: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
) -> list[Prompt]:
    """Prompts without any sense, so that none shares a prefix with another (but ``prefix_len``).

    Lengths are uniform in ``[length * (1 - range_ratio), length * (1 + range_ratio)]``, as in
    ``vllm bench serve``. With a tokenizer, text encodes to exactly the wished number of tokens
    (or the nearest that could be found, which ``prompt_len`` then says).
    """
    if not 0.0 <= range_ratio < 1.0:
        raise ConfigError(f"--random-range-ratio {range_ratio}: expected a number in [0, 1)")
    rng = np.random.default_rng(seed)
    inputs = _uniform(rng, input_len, range_ratio, count)
    outputs = _uniform(rng, output_len, range_ratio, count)
    prefix = _words(rng, prefix_len) if prefix_len else ""
    return [
        _exact(rng, prefix, prefix_len + int(n), int(m), tokenizer)
        for n, m in zip(inputs, outputs, strict=True)
    ]


def sharegpt_like_prompts(
    count: int,
    *,
    output_len: int | None = None,
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
) -> list[Prompt]:
    """Prompts and answers with the lengths of chat traffic; ``output_len`` fixes the answers'."""
    rng = np.random.default_rng(seed)
    prompts: list[Prompt] = []
    while len(prompts) < count:
        wanted = round(rng.lognormal(_PROMPT_LOG_MEAN, _PROMPT_LOG_STD))
        answer = output_len or round(rng.lognormal(_OUTPUT_LOG_MEAN, _OUTPUT_LOG_STD))
        if _usable(wanted, answer):
            prompts.append(_exact(rng, "", wanted, answer, tokenizer))
    return prompts


def sharegpt_file(
    path: Path,
    count: int,
    *,
    output_len: int | None = None,
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
) -> list[Prompt]:
    """Prompts of a file in ShareGPT's format: ``[{"conversations": [{"value"}, {"value"}]}]``.

    The first two turns count. Raises ``ConfigError`` if the file is something else or has too few
    usable conversations.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        pairs = [
            (str(entry["conversations"][0]["value"]), str(entry["conversations"][1]["value"]))
            for entry in entries
            if len(entry["conversations"]) >= 2
        ]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{path} is not in ShareGPT's format",
            hint='it must hold [{"conversations": [{"value": "…"}, {"value": "…"}]}, …]',
        ) from error
    order = np.random.default_rng(seed).permutation(len(pairs))
    prompts: list[Prompt] = []
    for index in order:
        text, answer = pairs[index]
        wanted, answer_len = _length(text, tokenizer), output_len or _length(answer, tokenizer)
        if _usable(wanted, answer_len):
            prompts.append(Prompt(text, wanted, answer_len))
        if len(prompts) == count:
            return prompts
    raise ConfigError(
        f"{path} has {len(prompts)} usable conversations, {count} are wanted",
        hint=f"--num-prompts {len(prompts)}",
    )


def _usable(prompt_len: int, output_len: int) -> bool:
    """vLLM's filter for ShareGPT."""
    return (
        prompt_len >= _SHORTEST
        and output_len >= _SHORTEST
        and prompt_len <= _LONGEST_PROMPT
        and prompt_len + output_len <= _LONGEST_TOTAL
    )


def _uniform(rng: np.random.Generator, length: int, ratio: float, count: int) -> np.ndarray:
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    return rng.integers(max(1, low), max(1, high) + 1, size=count)


def _words(rng: np.random.Generator, count: int) -> str:
    return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), size=count))


def _length(text: str, tokenizer: Tokenizer | None) -> int:
    return len(text.split()) if tokenizer is None else len(tokenizer.encode(text))


def _exact(
    rng: np.random.Generator, prefix: str, wanted: int, output_len: int, tokenizer: Tokenizer | None
) -> Prompt:
    """A text of ``wanted`` tokens: words, cut or lengthened until the count is right."""
    start = f"{prefix} " if prefix else ""
    words = _words(rng, max(1, wanted - len(prefix.split()))).split()
    if tokenizer is None:
        return Prompt(start + " ".join(words), wanted, output_len)
    length = len(tokenizer.encode(start + " ".join(words)))
    for _ in range(16):
        if length == wanted:
            break
        if length > wanted:
            words = words[: max(0, len(words) - (length - wanted))] or _words(rng, 1).split()
        else:
            words += _words(rng, wanted - length).split()
        length = len(tokenizer.encode(start + " ".join(words)))
    return Prompt(start + " ".join(words), length, output_len)
