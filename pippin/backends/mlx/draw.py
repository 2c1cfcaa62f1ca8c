"""Drawing tokens from edited logits with MLX.

The rules are ``docs/sampling.md``'s, and so are the numbers: the token with the largest sum of
``logit / temperature`` and noise, among those that top_k, min_p and top_p leave. The order of a
row's tokens is: logit falling, id rising. Rows without top_k and top_p need no sorting.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.noise import gumbel, noise_bits
from pippin.backends.noise import UInt32, token_table
from pippin.backends.sampler import Limits


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that are limited in the same way."""

    limits: Limits
    places: np.ndarray[tuple[int], np.dtype[np.int64]]
    """Which of the drawn rows these are."""
    sort: bool


class Drawer:
    """Draws from rows of ``vocab_size`` logits."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._table = mx.array(token_table(vocab_size))

    def draw(self, x: mx.array, limits: Limits, keys: UInt32) -> mx.array:
        """``x`` float32 [rows, vocab_size] with finite maxima, ``keys`` [rows, 2], one for each of
        ``limits``; returns the tokens, uint32 [rows]."""
        order = np.full(len(limits.rows), 0, dtype=np.int64)
        tokens = []
        done = 0
        for part in _parts(limits):
            rows = x[mx.array(part.places)]
            drawn = self._sorted if part.sort else self._plain
            tokens.append(drawn(rows, part.limits, mx.array(keys[part.places])))
            order[part.places] = np.arange(done, done + len(part.places))
            done += len(part.places)
        return mx.concatenate(tokens)[mx.array(order)]

    def _plain(self, x: mx.array, limits: Limits, keys: mx.array) -> mx.array:
        """Without top_k and top_p."""
        scores = _scores(x, limits)
        sums = scores + gumbel(noise_bits(self._table, keys))
        if (limits.log_min_p > -np.inf).any():
            sums = mx.where(scores >= _column(limits.log_min_p), sums, -mx.inf)
        # The first of several largest sums has the lowest id.
        return mx.argmax(sums, axis=1)

    def _sorted(self, x: mx.array, limits: Limits, keys: mx.array) -> mx.array:
        """With any limits."""
        ids = falling(x)
        scores = mx.take_along_axis(_scores(x, limits), ids, axis=1)
        left = mx.arange(self._vocab_size)[None] < _column(limits.top_k.astype(np.int32))
        left = left & (scores >= _column(limits.log_min_p))
        weights = mx.where(left, mx.exp(scores), 0.0)
        before = mx.cumsum(weights, axis=1) - weights
        # Without top_p its limit is infinite, and infinity times a sum stays so.
        left = left & (before < _column(limits.top_p) * weights.sum(axis=1, keepdims=True))
        left[:, 0] = True
        sums = scores + gumbel(noise_bits(self._table[ids], keys))
        sums = mx.where(left, sums, -mx.inf)
        best = sums == sums.max(axis=1, keepdims=True)
        return mx.where(best, ids, self._vocab_size).min(axis=1).astype(mx.uint32)


def falling(x: mx.array) -> mx.array:
    """Ids of each row's tokens: logit falling, id rising. MLX's sort keeps the order of equals."""
    return mx.argsort(-x, axis=1)


def _scores(x: mx.array, limits: Limits) -> mx.array:
    return (x - x.max(axis=1, keepdims=True)) / _column(limits.temperature)


def _column(values: np.ndarray[tuple[int], np.dtype[np.generic]]) -> mx.array:
    return mx.array(values)[:, None]


def _parts(limits: Limits) -> list[_Part]:
    """Rows with top_k or top_p, and the others."""
    places = np.arange(len(limits.rows))
    checked = limits.checked
    other = np.setdiff1d(places, checked)
    parts = [(checked, True), (other, False)]
    return [_Part(limits.take(at), at, sort) for at, sort in parts if len(at)]
