"""What all backends' samplers share: the state of a sequence, and rows packed into arrays.

Everything here is numpy and Python on the host. A backend's sampler keeps one ``SequenceState``
per live sequence, calls ``pack`` when the set of rows changes, and ``bans`` and ``penalties``
each step for the rows that have any. Meanings and order of operations: ``docs/sampling.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pippin.backends.base import SamplingState
from pippin.backends.noise import UInt32, stream_keys

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

#: The least log probability that is reported: no -inf or NaN may reach JSON (vLLM's server, too).
LOWEST_LOGPROB = -9999.0

#: Largest top_k for which a row's best tokens are sorted out.
MOST_CANDIDATES = 512


class TokenCounts:
    """Distinct tokens of a sequence, each with the number of times it was generated."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """``prompt`` tokens are listed too, with a count of 0."""
        self._place: dict[int, int] = {}
        self._tokens = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.float32)
        for token in prompt:
            self._find(token)
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        place = self._find(token)
        self._counts[place] += 1.0

    def _find(self, token: int) -> int:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._tokens):
                self._tokens = np.resize(self._tokens, 2 * place)
                self._counts = np.resize(self._counts, 2 * place)
            self._tokens[place] = token
            self._counts[place] = 0.0
        return place

    @property
    def tokens(self) -> Int64:
        return self._tokens[: len(self._place)]

    @property
    def counts(self) -> Float32:
        return self._counts[: len(self._place)]


class SequenceState:
    """One live sequence, with only the history that its parameters ask for."""

    def __init__(self, state: SamplingState, vocab_size: int) -> None:
        params = state.params
        self.params = params
        self.vocab_size = vocab_size
        self.streams = stream_keys(state.seed, state.choice)
        self.prompt_length = len(state.prompt_token_ids)
        #: Settings that leave only the most likely token; its ties go to the lowest id.
        self.greedy = params.greedy or params.top_k == 1 or params.min_p >= 1.0
        self.allowed: Int64 | None = None
        self._allowed: list[int] = []
        if params.allowed_token_ids is not None:
            self._allowed = sorted(set(params.allowed_token_ids))
            self.allowed = np.array(self._allowed, dtype=np.int64)
        self._stops = sorted(state.stop_token_ids) if params.min_tokens else []
        self._bad_tokens = sorted({w[0] for w in state.bad_words_token_ids if len(w) == 1})
        self._bad_words = [list(word) for word in state.bad_words_token_ids if len(word) > 1]
        self._longest_bad_word = max(map(len, self._bad_words), default=0)
        self.has_bans = bool(self._stops or self._bad_tokens or self._bad_words)
        repeats = params.repetition_penalty != 1.0
        self.counts = (
            TokenCounts(state.prompt_token_ids if repeats else (), state.output_token_ids)
            if repeats or params.presence_penalty or params.frequency_penalty
            else None
        )
        self._tail = (
            list(state.output_token_ids[-self._longest_bad_word :]) if self._bad_words else []
        )
        self.has_history = bool(self.counts is not None or self._bad_words)

    def append(self, token: int) -> None:
        """Count a generated token."""
        if self.counts is not None:
            self.counts.add(token)
        if self._bad_words:
            self._tail = [*self._tail, token][-self._longest_bad_word :]

    def banned(self, position: int) -> list[int]:
        """Tokens that must not be sampled at ``position``.

        Where the bans would leave no token at all, ``min_tokens`` gives way first, then the bad
        words; ``allowed_token_ids`` always holds.
        """
        words = {*self._bad_tokens, *self._completions()} if self._bad_words else self._bad_tokens
        early = position - self.prompt_length < self.params.min_tokens
        banned = {*words, *self._stops} if early else set(words)
        if self._leaves_none(banned):
            banned = set(words)
        return [] if self._leaves_none(banned) else sorted(banned)

    def _completions(self) -> list[int]:
        """Last tokens of the bad words whose other tokens were just generated."""
        return [w[-1] for w in self._bad_words if self._tail[1 - len(w) :] == w[:-1]]

    def _leaves_none(self, banned: set[int]) -> bool:
        if self.allowed is None:
            return len(banned) >= self.vocab_size
        return banned.issuperset(self._allowed)


@dataclass(frozen=True, slots=True)
class Entries:
    """Single elements of the [rows, vocab_size] logits: flat indices, and a value for each."""

    index: Int64
    value: Float32

    def __bool__(self) -> bool:
        return len(self.index) > 0


@dataclass(frozen=True, slots=True)
class Penalties:
    """Elements of the logits to be penalised, [entries] each."""

    index: Int64
    count: Float32
    repetition: Float32
    frequency: Float32
    presence: Float32


@dataclass(frozen=True, slots=True)
class Limits:
    """Rows that are drawn at random, and what limits each choice. Arrays are [rows]."""

    rows: Int64
    """Places among the step's rows."""
    temperature: Float32
    top_k: Int64
    """``vocab_size`` where there is no limit."""
    top_p: Float32
    """Infinite where there is no limit."""
    log_min_p: Float32
    """-inf where there is no limit."""
    checked: Int64
    """Indices of those limited by top_k or top_p."""
    partial: npt.NDArray[np.bool_]
    """Whether top_p is a part of what top_k or min_p leave."""

    vocab_size: int

    @staticmethod
    def of(states: Sequence[SequenceState], rows: Sequence[int], vocab_size: int) -> Limits:
        params = [states[r].params for r in rows]
        return Limits._make(
            rows=np.array(rows, dtype=np.int64),
            temperature=_float32([p.temperature for p in params]),
            top_k=np.array(
                [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params], np.int64
            ),
            top_p=_float32([p.top_p if p.top_p < 1.0 else math.inf for p in params]),
            log_min_p=_float32([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]),
            vocab_size=vocab_size,
        )

    def take(self, at: slice | Int64) -> Limits:
        """Some of the rows."""
        return Limits._make(
            self.rows[at],
            self.temperature[at],
            self.top_k[at],
            self.top_p[at],
            self.log_min_p[at],
            self.vocab_size,
        )

    @staticmethod
    def _make(
        rows: Int64,
        temperature: Float32,
        top_k: Int64,
        top_p: Float32,
        log_min_p: Float32,
        vocab_size: int,
    ) -> Limits:
        by_k, by_p = top_k < vocab_size, top_p < np.inf
        checked = np.flatnonzero(by_k | by_p)
        partial = by_p & (by_k | (log_min_p > -np.inf))
        return Limits(rows, temperature, top_k, top_p, log_min_p, checked, partial, vocab_size)


@dataclass(frozen=True, slots=True)
class Packed:
    """All that stays the same while the same sequences are sampled in the same order."""

    states: tuple[SequenceState, ...]
    streams: UInt32
    """[rows, 2]"""
    greedy: Int64
    """Places of the rows that take the most likely token."""
    few: Limits
    """Rows with a top_k of at most ``MOST_CANDIDATES``: drawn among their best tokens."""
    many: Limits
    """The other rows."""
    bias: Entries
    allowed_rows: Int64
    allowed: Int64
    """Flat indices of the elements that stay in ``allowed_rows``."""
    banning: tuple[int, ...]
    penalised: tuple[int, ...]
    recording: tuple[int, ...]
    """Rows whose sampled token must be appended to their state."""
    logprobs: tuple[int, ...]


def pack(states: Sequence[SequenceState], vocab_size: int) -> Packed:
    """Pack the sequences of a step, in the order of its rows."""
    rows = range(len(states))
    params = [state.params for state in states]
    few = [r for r in rows if not states[r].greedy and 0 < params[r].top_k <= MOST_CANDIDATES]
    greedy = [r for r in rows if states[r].greedy]
    biased = [
        (r, token, bias) for r in rows for token, bias in (params[r].logit_bias or {}).items()
    ]
    allowing = [r for r in rows if states[r].allowed is not None]
    return Packed(
        states=tuple(states),
        streams=np.stack([state.streams for state in states]),
        greedy=np.array(greedy, dtype=np.int64),
        few=Limits.of(states, few, vocab_size),
        many=Limits.of(states, sorted(set(rows).difference(few, greedy)), vocab_size),
        bias=Entries(
            index=np.array([r * vocab_size + token for r, token, _ in biased], dtype=np.int64),
            value=_float32([bias for _, _, bias in biased]),
        ),
        allowed_rows=np.array(allowing, dtype=np.int64),
        allowed=_concatenate(
            [r * vocab_size + a for r in allowing if (a := states[r].allowed) is not None]
        ),
        banning=tuple(r for r in rows if states[r].has_bans),
        penalised=tuple(r for r in rows if states[r].counts is not None),
        recording=tuple(r for r in rows if states[r].has_history),
        logprobs=tuple(r for r in rows if params[r].logprobs is not None),
    )


def bans(packed: Packed, positions: Sequence[int], vocab_size: int) -> Int64:
    """Flat indices of the logits that this step must not choose."""
    return np.array(
        [
            r * vocab_size + token
            for r in packed.banning
            for token in packed.states[r].banned(positions[r])
        ],
        dtype=np.int64,
    )


def penalties(packed: Packed, vocab_size: int) -> Penalties:
    """What this step penalises, from the tokens counted so far."""
    counts = [(r, c) for r in packed.penalised if (c := packed.states[r].counts) is not None]
    lengths = [len(c.tokens) for _, c in counts]
    params = [packed.states[r].params for r, _ in counts]

    def spread(values: list[float]) -> Float32:
        return np.repeat(_float32(values), lengths)

    return Penalties(
        index=_concatenate([r * vocab_size + c.tokens for r, c in counts]),
        count=np.concatenate([c.counts for _, c in counts]),
        repetition=spread([p.repetition_penalty for p in params]),
        frequency=spread([p.frequency_penalty for p in params]),
        presence=spread([p.presence_penalty for p in params]),
    )


def _float32(values: Sequence[float]) -> Float32:
    return np.array(values, dtype=np.float32)


def _concatenate(parts: Sequence[Int64]) -> Int64:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
