"""Drawing tokens from edited logits with torch: exact, and without sorting a vocabulary.

In each lane (see ``lanes``), the largest logit and the smallest noise bits bound the best sum of
logit and noise; only lanes whose bound reaches the best sum found so far are evaluated, a dozen a
row on average. Nothing but integers is computed for every token.

The tokens that top_k, top_p and min_p leave are the first ones in the order. Instead of finding
where they end, the best token with noise is asked whether it lies inside; if it does not, nothing
behind it does either, and the best of those before it is asked. A nucleus of thousands of tokens
(usual for small models at temperature 1) costs no more than one of three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from pippin.backends.noise import token_table
from pippin.backends.sampler import Limits
from pippin.backends.torch.lanes import TIES, Lanes, Looked, some
from pippin.backends.torch.noise import log_exponential, noise_bits

Put = Callable[[npt.NDArray[Any]], Tensor]

_INFINITY = float("inf")
#: Parts of a row, the best lane of each being evaluated to find a good sum to start with.
_PARTS = 8
#: Far above the rounding errors of a bound, far below any difference that matters for speed.
_SLACK = 1e-4
_LOWEST = torch.finfo(torch.float32).min
_JUST_BELOW_ONE = 1.0 - 2.0**-24


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """``sampler.Limits`` on the device, for the rows of one call."""

    host: Limits
    rows: Tensor
    temperature: Tensor
    """[rows, 1]"""
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    """[rows, 1]"""
    any_min_p: bool
    checked: Tensor
    partial: Tensor
    """Whether top_p is a part of what top_k or min_p leave, [rows]."""
    any_partial: bool
    tempered: bool
    """Whether any temperature is not 1."""

    @staticmethod
    def make(limits: Limits, put: Put) -> DeviceLimits:
        return DeviceLimits(
            host=limits,
            rows=put(limits.rows),
            temperature=put(limits.temperature[:, None]),
            top_k=put(limits.top_k),
            top_p=put(limits.top_p),
            log_min_p=put(limits.log_min_p[:, None]),
            any_min_p=bool((limits.log_min_p > -_INFINITY).any()),
            checked=put(limits.checked),
            partial=put(limits.partial),
            any_partial=bool(limits.partial.any()),
            tempered=bool((limits.temperature != 1.0).any()),
        )


@dataclass(slots=True)
class _Search:
    """The random rows being drawn, and how far each search has come."""

    looked: Looked
    """All edited logits of the step."""
    rows: Tensor
    """Their rows that are drawn here; everything below is of these."""
    maxima: Tensor
    top: Tensor
    bits: Tensor
    """[rows, vocab_size]"""
    bounds: Tensor
    """The best that score and noise may sum to, [rows, lanes]."""
    limits: DeviceLimits
    last: Tensor | None = None
    """Only tokens before this one in the order are left: its logit, [rows]. None: all are left."""
    last_id: Tensor | None = None


class Drawer:
    """Draws from rows of logits."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._vocab_size = lanes.vocab_size
        self._device = lanes.device
        self._table = lanes.put(token_table(lanes.vocab_size).view(np.int32))
        self._ids = torch.arange(lanes.vocab_size, device=lanes.device)
        self._parts = min(_PARTS, lanes.count)

    def few(self, looked: Looked, limits: DeviceLimits, keys: Tensor) -> Tensor:
        """Draw where top_k is small: among the best tokens. ``keys``: int32 [rows, 2] -> [rows]."""
        top_k = limits.top_k[:, None]
        count = min(int(limits.host.top_k.max()) + TIES, self._vocab_size)
        values, ids = self._lanes.best(looked, limits.rows, count)
        top = some(looked.top, limits.rows)
        scores = self._scores(values, top, limits.temperature, limits)
        left = torch.arange(count, device=self._device) < top_k
        left &= scores >= limits.log_min_p
        weights = scores.exp() * left
        before = weights.cumsum(1) - weights
        left &= before < limits.top_p[:, None] * weights.sum(1, keepdim=True)
        left[:, 0] = True
        sums = scores - log_exponential(noise_bits(self._table[ids], keys))
        sums.masked_fill_(~left, -_INFINITY)
        best = sums.amax(1, keepdim=True)
        tokens = ids.masked_fill(sums != best, self._vocab_size).amin(1)
        if count < self._vocab_size:
            kth = values.gather(1, top_k - 1)[:, 0]
            # Tokens tied with the last one may be missing from the candidates.
            unsure = ((kth == values[:, -1]) & (kth > -_INFINITY)).nonzero().flatten()
            if len(unsure):
                again = DeviceLimits.make(limits.host.take(unsure.cpu().numpy()), self._lanes.put)
                tokens[unsure] = self.many(looked, again, keys[unsure])
        return tokens

    def many(self, looked: Looked, limits: DeviceLimits, keys: Tensor) -> Tensor:
        """Draw with any limits. ``keys``: int32 [rows, 2] -> [rows]."""
        bits = noise_bits(
            self._table,
            keys,
            out=self._lanes.keep("bits", len(keys)).view(torch.int32),
            scratch=self._lanes.keep("scratch", len(keys)).view(torch.int32),
        )
        maxima, top = some(looked.maxima, limits.rows), some(looked.top, limits.rows)
        scores = self._scores(maxima, top, limits.temperature, limits)
        bounds = scores - log_exponential(self._lanes.fold(bits, Tensor.amin, torch.minimum))
        if limits.any_min_p:
            bounds.masked_fill_(scores < limits.log_min_p, -_INFINITY)
        search = _Search(looked, limits.rows, maxima, top, bits, bounds, limits)
        tokens = self._next(search, torch.arange(len(bits), device=self._device))
        if len(limits.checked):
            self._check(search, tokens)
        return tokens

    def _scores(
        self, logits: Tensor, top: Tensor, temperature: Tensor, limits: DeviceLimits
    ) -> Tensor:
        scores = logits - top
        return scores.div_(temperature) if limits.tempered else scores

    def _next(self, search: _Search, which: Tensor) -> Tensor:
        """The best token with noise of those left, for the rows ``which`` of the search."""
        bounds = some(search.bounds, which)
        _, sums = self._sums(search, which.repeat_interleave(self._parts), self._first(bounds))
        found = sums.view(len(which), -1).amax(1, keepdim=True)
        # Nothing at all may be left in the lanes tried first; -inf is no bound worth looking at.
        found.sub_(_SLACK).clamp_(min=_LOWEST)
        row, lane = (bounds >= found).nonzero(as_tuple=True)
        ids, sums = self._sums(search, which[row], lane)
        best = torch.full((len(which),), -_INFINITY, device=self._device)
        best.scatter_reduce_(0, row, sums.amax(1), "amax")
        return self._lanes.lowest(ids, sums, row, best)

    def _first(self, bounds: Tensor) -> Tensor:
        """Lanes that may well hold the best sum: the best of each part of a row's."""
        part = self._lanes.count // self._parts
        best = bounds[:, : part * self._parts].reshape(len(bounds), self._parts, part).argmax(2)
        return (best + torch.arange(self._parts, device=self._device) * part).view(-1)

    def _sums(self, search: _Search, row: Tensor, lane: Tensor) -> tuple[Tensor, Tensor]:
        """Ids, and score + noise, of lanes; -inf for tokens not left. [n, 16] each."""
        limits = search.limits
        ids = self._lanes.ids(lane)
        places = row[:, None] * self._vocab_size + ids
        bits = search.bits.view(-1)[places]
        if len(search.rows) < len(search.looked.x):
            places = search.rows[row][:, None] * self._vocab_size + ids
        values = search.looked.x.view(-1)[places]
        scores = self._scores(values, search.top[row], limits.temperature[row], limits)
        sums = scores - log_exponential(bits)
        if limits.any_min_p:
            sums.masked_fill_(scores < limits.log_min_p[row], -_INFINITY)
        if search.last is not None and search.last_id is not None:
            last, last_id = search.last[row, None], search.last_id[row, None]
            left = (values > last) | ((values == last) & (ids < last_id))
            sums.masked_fill_(~left, -_INFINITY)
        return ids, sums

    def _check(self, search: _Search, tokens: Tensor) -> None:
        """Replace tokens outside top_k or top_p, until all are inside."""
        rows, at = search.rows, search.limits.checked
        first = torch.empty_like(tokens)
        first[at] = self._lanes.first(search.looked, rows[at])
        last = torch.full((len(tokens),), -_INFINITY, device=self._device)
        last_id = torch.full((len(tokens),), self._vocab_size, device=self._device)
        search.last, search.last_id = last, last_id
        while len(at := at[tokens[at] != first[at]]):
            at = at[self._outside(search, at, tokens[at])]
            if not len(at):
                return
            last_id[at] = tokens[at]
            last[at] = search.looked.x[rows[at], tokens[at]]
            behind = search.maxima[at] < last[at, None]
            search.bounds[at] = search.bounds[at].masked_fill_(behind, -_INFINITY)
            tokens[at] = self._next(search, at)

    def _outside(self, search: _Search, at: Tensor, tokens: Tensor) -> Tensor:
        """Indices of those ``tokens``, one of each row in ``at`` and none of them a row's first,
        that have too many tokens or too much weight before them.
        """
        limits, x, rows = search.limits, search.looked.x, search.rows[at]
        weights = self._lanes.keep("scratch", len(at))
        value = x[rows, tokens][:, None]
        source = x if len(at) == len(x) else torch.index_select(x, 0, rows, out=weights)
        torch.sub(source, value, out=weights)
        if limits.tempered:
            weights /= limits.temperature[at]
        weights.exp_()  # of every token, the own one weighing 1
        allowance = limits.top_p[at] * self._masses(search, at, weights)
        top_k = limits.top_k[at]
        most = _sum_above(weights, _JUST_BELOW_ONE) - 1.0
        unsure = ((most >= allowance) | (top_k < self._vocab_size)).nonzero().flatten()
        if not len(unsure):
            return unsure
        # Outside even if those that weigh the same were all behind it?
        weights, allowance = weights[unsure], allowance[unsure]
        outside = _sum_above(weights.clone(), 1.0) >= allowance
        left = (~outside).nonzero().flatten()
        if len(left):
            place = unsure[left]
            line, value, token = x[rows[place]], value[place], tokens[place, None]
            before = (line > value) | ((line == value) & (self._ids < token))
            mass = (weights[left] * before).sum(1)
            outside[left] = (before.sum(1) >= top_k[place]) | (mass >= allowance[left])
        return unsure[outside]

    def _masses(self, search: _Search, at: Tensor, weights: Tensor) -> Tensor:
        """Weight of the tokens that min_p and top_k leave, of which top_p takes its part."""
        limits = search.limits
        masses = weights.sum(1)
        if limits.any_partial:
            for i in limits.partial[at].nonzero().flatten().tolist():
                one = at[i : i + 1]
                line = search.looked.x[search.rows[one]]
                scores = self._scores(line, search.top[one], limits.temperature[one], limits)
                kept = weights[i] * (scores[0] >= limits.log_min_p[one])
                top_k = int(limits.top_k[one])
                best = kept if top_k == self._vocab_size else kept.topk(top_k, sorted=False).values
                masses[i] = best.sum()
        return masses


def _sum_above(x: Tensor, least: float) -> Tensor:
    """Sum of each row's values above ``least``; ``x`` is overwritten."""
    return functional.threshold(x, least, 0.0, inplace=True).sum(1)
