"""Choosing tokens from logits with MLX, for all rows at once.

The order of operations is ``docs/sampling.md``'s: this file edits the logits, ``draw`` chooses.
What a sequence asks for and how rows are packed is shared with the other backends.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pippin.backends.base import SampledToken, SampleRow, SamplingState
from pippin.backends.mlx.draw import Drawer, falling
from pippin.backends.noise import position_keys
from pippin.backends.sampler import (
    LOWEST_LOGPROB,
    Packed,
    SequenceState,
    bans,
    pack,
    penalties,
)
from pippin.types.request import Logprobs

logger = logging.getLogger(__name__)


class MlxSampler:
    """A ``backends.base.Sampler``.

    It has a stream of its own: tokens of one step are chosen while the next one computes.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._drawer = Drawer(vocab_size)
        self._states: dict[int, SequenceState] = {}
        self._seqs: tuple[int, ...] = ()
        self._packed: Packed | None = None
        self._warned = False
        self._stream = mx.new_stream(mx.default_device())

    def add(self, seq: int, state: SamplingState) -> None:
        self._states[seq] = SequenceState(state, self._vocab_size)
        self._packed = None

    def remove(self, seq: int) -> None:
        del self._states[seq]
        self._packed = None

    def sample(self, logits: mx.array, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """Choose a token for every row. ``logits``: [rows, vocab_size], any float type; they need
        not be evaluated yet."""
        if not rows:
            return []
        with mx.stream(self._stream):
            return self._sample(logits, rows)

    def _sample(self, logits: mx.array, rows: Sequence[SampleRow]) -> list[SampledToken]:
        packed = self._pack(tuple(row.seq for row in rows))
        positions = [row.position for row in rows]
        raw = _take(logits, [row.row for row in rows])
        x = self._edit(raw, packed, positions)
        chosen = self._choose(x, packed, positions)
        # Anything but finite numbers shows in the sum. Edits add -inf, which only the largest of a
        # row must not be.
        signs = [raw.sum(axis=1), *([] if x is raw else [x.max(axis=1)])]
        mx.eval(chosen, *signs)
        if not all(np.isfinite(np.array(sign)).all() for sign in signs):
            broken = mx.isnan(x).any(axis=1) | ~mx.isfinite(x.max(axis=1))
            bad = np.flatnonzero(np.array(broken)).tolist()
            if bad:
                x = mx.array(x)
                self._repair(x, bad, packed, positions)
                chosen = self._choose(x, packed, positions)
        tokens = _integers(chosen)
        for r in packed.recording:
            packed.states[r].append(tokens[r])
        sampled = [SampledToken(token) for token in tokens]
        if packed.logprobs:
            reported = list(packed.logprobs)
            tops = [packed.states[r].params.logprobs or 0 for r in reported]
            reports = report(raw[mx.array(reported)], [tokens[r] for r in reported], tops)
            for r, logprobs in zip(reported, reports, strict=True):
                sampled[r] = SampledToken(tokens[r], logprobs)
        return sampled

    def prompt_logprobs(
        self, logits: mx.array, first_row: int, targets: Sequence[int], top: int
    ) -> list[Logprobs]:
        """Raw log probabilities of ``targets[i]`` in row ``first_row + i``, with the best."""
        with mx.stream(self._stream):
            lines = logits[first_row : first_row + len(targets)].astype(mx.float32)
            return report(lines, list(targets), [top] * len(targets))

    def _pack(self, seqs: tuple[int, ...]) -> Packed:
        if self._packed is None or self._seqs != seqs:
            self._packed = pack([self._states[seq] for seq in seqs], self._vocab_size)
            self._seqs = seqs
        return self._packed

    def _edit(self, x: mx.array, packed: Packed, positions: list[int]) -> mx.array:
        """Masks, bias and penalties; ``x`` itself keeps its values, and is what comes back where
        nothing is edited."""
        if not (len(packed.allowed_rows) or packed.banning or packed.bias or packed.penalised):
            return x
        shape, flat = x.shape, x.reshape(-1)
        if len(packed.allowed_rows):
            allowed = mx.array(packed.allowed)
            kept = flat[allowed]
            lines = flat.reshape(shape)
            lines[mx.array(packed.allowed_rows)] = -mx.inf
            flat = lines.reshape(-1)
            flat[allowed] = kept
        if packed.banning:
            banned = bans(packed, positions, self._vocab_size)
            if len(banned):
                flat[mx.array(banned)] = -mx.inf
        if packed.bias:
            index = mx.array(packed.bias.index)
            flat[index] = flat[index] + mx.array(packed.bias.value)
        if packed.penalised:
            entries = penalties(packed, self._vocab_size)
            index, count = mx.array(entries.index), mx.array(entries.count)
            repetition = mx.array(entries.repetition)
            value = flat[index]
            value = mx.where(value > 0, value / repetition, value * repetition)
            value = value - mx.array(entries.frequency) * count
            value = value - mx.array(entries.presence) * (count > 0).astype(mx.float32)
            flat[index] = value
        return flat.reshape(shape)

    def _choose(self, x: mx.array, packed: Packed, positions: list[int]) -> mx.array:
        """Tokens of all rows, uint32 [rows]. Nothing is evaluated yet."""
        chosen = mx.argmax(x, axis=1)
        for limits in (packed.few, packed.many):
            if len(limits.rows):
                at = np.array(positions)[limits.rows]
                keys = position_keys(packed.streams[limits.rows], at)
                places = mx.array(limits.rows)
                chosen[places] = self._drawer.draw(x[places], limits, keys)
        return chosen

    def _repair(self, x: mx.array, bad: list[int], packed: Packed, positions: list[int]) -> None:
        """Make rows with NaN or without any finite best logit fit to be sampled, in place.

        NaN counts as -inf; of several +inf one is drawn; a row without hope draws from all tokens
        that its request allows. The other rows keep their values.
        """
        for r in bad:
            state = packed.states[r]
            row: NDArray[Any] = np.nan_to_num(
                np.array(x[r]), nan=-np.inf, posinf=np.inf, neginf=-np.inf
            )
            if row.max() == np.inf:
                row = np.where(row == np.inf, np.float32(0), np.float32(-np.inf))
            elif row.max() == -np.inf:
                row[... if state.allowed is None else state.allowed] = 0.0
                row[state.banned(positions[r])] = -np.inf
            x[r] = mx.array(row.astype(np.float32))
        if not self._warned:
            self._warned = True
            logger.warning(
                "the model gave logits without a finite maximum (%d of %d rows);"
                " such rows are sampled from what is left, and not reported again",
                len(bad),
                x.shape[0],
            )


def _take(logits: mx.array, rows: list[int]) -> mx.array:
    """The wanted rows as float32."""
    if rows != list(range(logits.shape[0])):
        logits = logits[mx.array(rows)]
    return logits.astype(mx.float32)


def report(x: mx.array, tokens: Sequence[int], tops: Sequence[int]) -> list[Logprobs]:
    """``tokens[i]`` and the ``tops[i]`` most likely tokens of row ``i``.

    ``x``: raw logits, float32 [rows, vocab_size].
    """
    own = mx.take_along_axis(x, mx.array(list(tokens))[:, None], axis=1)
    normaliser = mx.logsumexp(x, axis=1, keepdims=True)
    ranks = _integers((x > own).sum(axis=1) + 1)
    ids = falling(x)[:, : min(max(tops), x.shape[1])]
    shown = mx.concatenate([own, mx.take_along_axis(x, ids, axis=1)], axis=1) - normaliser
    # Neither -inf nor NaN (of broken logits) may reach a client's JSON.
    values = np.nan_to_num(np.array(shown), nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB)
    logprobs: list[list[float]] = values.clip(min=LOWEST_LOGPROB).tolist()
    best: list[list[int]] = np.array(ids).tolist()
    return [
        Logprobs([token, *best[r][:top]], logprobs[r][: 1 + top], ranks[r])
        for r, (token, top) in enumerate(zip(tokens, tops, strict=True))
    ]


def _integers(array: mx.array) -> list[int]:
    values: list[int] = np.array(array).tolist()
    return values
