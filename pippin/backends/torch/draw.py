"""Drawing tokens from edited logits with torch: exact, and without sorting or full-size logarithms.

A row's logits are seen as *blocks*: block ``b`` holds tokens ``b, b + m, b + 2m, …`` (so that the
largest of each block is a few vectorised passes). A block's largest logit and smallest noise bits
bound the best sum of logit and noise in it; only blocks whose bound reaches the best sum found so
far are evaluated, a dozen a row on average.

The tokens that top_k, top_p and min_p leave are the first ones in the order (logit falling, id
rising). Instead of finding where they end, the best token with noise is asked whether it lies
inside; if it does not, nothing behind it in that order does either, and the next best is asked.
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
from pippin.backends.torch.noise import gumbel, noise_bits

Put = Callable[[npt.NDArray[Any]], Tensor]

_INFINITY = float("inf")
_BLOCK = 16
#: Candidates beyond top_k, so that tokens tied with the last one are mostly among them.
_TIES = 16
#: Blocks evaluated to find a good sum, before all whose bound reaches it are.
_FIRST = 8
#: Elements of the logits that are worked on at once, which bounds the memory needed beside them:
#: three times 4 bytes for each.
_CPU_ELEMENTS = 1 << 21
_ELEMENTS = 1 << 24
#: Far above the rounding errors of a bound, far below any difference that matters for speed.
_SLACK = 1e-4
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
    checked: Tensor
    partial: Tensor
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
            log_min_p=put(limits.log_min_p),
            checked=put(limits.checked),
            partial=put(limits.partial),
            tempered=bool((limits.temperature != 1.0).any()),
        )


@dataclass(frozen=True, slots=True)
class Looked:
    """Edited logits with the largest of each block and each row."""

    x: Tensor
    """float32 [rows, vocab_size], contiguous."""
    maxima: Tensor
    """[rows, blocks]"""
    top: Tensor
    """[rows, 1]"""


@dataclass(slots=True)
class _Search:
    """The random rows being drawn, and how far each search has come."""

    looked: Looked
    limits: DeviceLimits
    bits: Tensor
    """[rows, vocab_size]"""
    bounds: Tensor
    """The best that logit and noise may sum to, [rows, blocks]."""
    last: Tensor
    """Only tokens before this one in the order are left: its logit, [rows]."""
    last_id: Tensor


class Drawer:
    """Draws from rows of ``vocab_size`` logits on one device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._table = self.put(token_table(vocab_size).view(np.int32))
        elements = _CPU_ELEMENTS if device.type == "cpu" else _ELEMENTS
        #: Most rows in one call of ``many``.
        self.most_rows = max(1, elements // vocab_size)
        self._buffers = [self._table.new_empty((0, vocab_size))] * 3
        self._blocks = -(-vocab_size // _BLOCK)
        self._in_block = -(-vocab_size // self._blocks)
        self._whole = (self._in_block - 1) * self._blocks
        self._ids = torch.arange(vocab_size, device=device)
        self._offsets = torch.arange(self._in_block, device=device) * self._blocks

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _buffer(self, number: int, rows: int) -> Tensor:
        """One of three int32 arrays [rows, vocab_size] that are kept from step to step.

        Fresh memory of this size would be given back to the system and faulted in again each time,
        which costs more than the arithmetic does.
        """
        if len(self._buffers[number]) < rows:
            self._buffers[number] = torch.empty(
                (rows, self._vocab_size), dtype=torch.int32, device=self._device
            )
        return self._buffers[number][:rows]

    def look(self, x: Tensor) -> Looked:
        """One pass over the logits, float32 [rows, vocab_size], contiguous."""
        maxima = self._fold(x, Tensor.amax, torch.maximum)
        return Looked(x, maxima, maxima.amax(1, keepdim=True))

    def greedy(self, looked: Looked, rows: Tensor) -> Tensor:
        """The most likely token of ``rows``, the lowest id among equals. [rows]."""
        row, block = (looked.maxima[rows] == looked.top[rows]).nonzero(as_tuple=True)
        ids, values = self._elements(looked.x, rows[row], block)
        return self._lowest(ids, values, row, looked.top[rows, 0])

    def few(self, looked: Looked, limits: DeviceLimits, keys: Tensor) -> Tensor:
        """Draw where top_k is small: among the best tokens. ``keys``: int32 [rows, 2] -> [rows]."""
        top_k = limits.top_k[:, None]
        count = min(int(limits.host.top_k.max()) + _TIES, self._vocab_size)
        values, ids = self._best(looked, limits.rows, count)
        scores = (values - looked.top[limits.rows]) / limits.temperature
        left = torch.arange(count, device=self._device) < top_k
        left &= scores >= limits.log_min_p[:, None]
        weights = scores.exp() * left
        before = weights.cumsum(1) - weights
        left &= before < limits.top_p[:, None] * weights.sum(1, keepdim=True)
        left[:, 0] = True
        sums = scores + gumbel(noise_bits(self._table[ids], keys))
        sums.masked_fill_(~left, -_INFINITY)
        best = sums.amax(1, keepdim=True)
        tokens = ids.masked_fill(sums != best, self._vocab_size).amin(1)
        if count < self._vocab_size:
            kth = values.gather(1, top_k - 1)[:, 0]
            # Tokens tied with the last one may be missing from the candidates.
            unsure = ((kth == values[:, -1]) & (kth > -_INFINITY)).nonzero().flatten()
            if len(unsure):
                some = DeviceLimits.make(limits.host.take(unsure.cpu().numpy()), self.put)
                tokens[unsure] = self.many(looked, some, keys[unsure])
        return tokens

    def many(self, looked: Looked, limits: DeviceLimits, keys: Tensor) -> Tensor:
        """Draw with any limits. ``keys``: int32 [rows, 2] -> [rows]."""
        bits = noise_bits(self._table, keys, self._buffer(0, len(keys)), self._buffer(1, len(keys)))
        search = _Search(
            looked=looked,
            limits=limits,
            bits=bits,
            bounds=self._bounds(looked, limits, bits),
            last=torch.full((len(bits),), -_INFINITY, device=self._device),
            last_id=torch.full((len(bits),), self._vocab_size, device=self._device),
        )
        tokens = self._next(search, torch.arange(len(bits), device=self._device))
        if len(limits.checked):
            self._check(search, tokens)
        return tokens

    def _fold(
        self, x: Tensor, reduce: Callable[..., Tensor], join: Callable[..., Tensor]
    ) -> Tensor:
        """Reduce every block. [rows, vocab_size] -> [rows, blocks]."""
        rest = x[:, self._whole :]
        if not self._whole:
            return rest.clone()
        folded = reduce(x[:, : self._whole].view(len(x), -1, self._blocks), 1)
        part = folded[:, : rest.shape[1]]
        join(part, rest, out=part)
        return folded

    def _bounds(self, looked: Looked, limits: DeviceLimits, bits: Tensor) -> Tensor:
        minima = self._fold(bits, Tensor.amin, torch.minimum)
        scores = (looked.maxima[limits.rows] - looked.top[limits.rows]) / limits.temperature
        bounds = scores + gumbel(minima)
        return bounds.masked_fill_(scores < limits.log_min_p[:, None], -_INFINITY)

    def _next(self, search: _Search, which: Tensor) -> Tensor:
        """The best token with noise of those left, for the rows ``which`` of the search."""
        bounds = search.bounds[which]
        count = min(_FIRST, self._blocks)
        first = bounds.topk(count, 1, sorted=False).indices.reshape(-1)
        _, sums = self._sums(search, which.repeat_interleave(count), first)
        found = sums.view(len(which), -1).amax(1, keepdim=True)
        row, block = ((bounds >= found - _SLACK) & (bounds > -_INFINITY)).nonzero(as_tuple=True)
        ids, sums = self._sums(search, which[row], block)
        best = torch.full((len(which),), -_INFINITY, device=self._device)
        best.scatter_reduce_(0, row, sums.amax(1), "amax")
        return self._lowest(ids, sums, row, best)

    def _sums(self, search: _Search, row: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        """Ids, and logit / temperature + noise, of blocks; -inf for tokens not left. [n, 16]."""
        limits = search.limits
        ids, values = self._elements(search.looked.x, limits.rows[row], block)
        bits = search.bits.view(-1)[row[:, None] * self._vocab_size + ids]
        scores = (values - search.looked.top[limits.rows[row]]) / limits.temperature[row]
        last = search.last[row, None]
        left = (values > last) | ((values == last) & (ids < search.last_id[row, None]))
        left &= scores >= limits.log_min_p[row, None]
        return ids, (scores + gumbel(bits)).masked_fill_(~left, -_INFINITY)

    def _check(self, search: _Search, tokens: Tensor) -> None:
        """Replace tokens outside top_k or top_p, until all are inside."""
        limits, x = search.limits, search.looked.x
        checked = limits.checked
        rows = limits.rows[checked]
        scratch = self._buffer(1, len(rows)).view(torch.float32)
        source = x if len(rows) == len(x) else torch.index_select(x, 0, rows, out=scratch)
        if limits.tempered:
            source = torch.sub(source, search.looked.top[rows], out=scratch)
            source /= limits.temperature[checked]
        weights = self._buffer(2, len(rows)).view(torch.float32)
        torch.softmax(source, 1, out=weights)
        allowance = limits.top_p[checked] * self._masses(search, weights)
        at = checked
        while True:
            rows = limits.rows[at]
            outside = self._outside(x, rows, weights, allowance, limits.top_k[at], tokens[at])
            if not len(outside):
                return
            at, weights, allowance = at[outside], weights[outside], allowance[outside]
            search.last_id[at] = tokens[at]
            search.last[at] = x[limits.rows[at], tokens[at]]
            behind = search.looked.maxima[limits.rows[at]] < search.last[at, None]
            search.bounds[at] = search.bounds[at].masked_fill_(behind, -_INFINITY)
            tokens[at] = self._next(search, at)

    def _masses(self, search: _Search, weights: Tensor) -> Tensor:
        """Probability left by min_p and top_k, of which top_p takes its part. [checked rows]."""
        limits = search.limits
        masses = torch.ones(len(weights), device=self._device)
        if len(limits.host.partial):
            at = limits.checked[limits.partial]
            rows = limits.rows[at]
            scores = (search.looked.x[rows] - search.looked.top[rows]) / limits.temperature[at]
            kept = weights[limits.partial] * (scores >= limits.log_min_p[at, None])
            masses[limits.partial] = kept.sum(1)
            for i, j in enumerate(limits.host.partial.tolist()):
                top_k = int(limits.host.top_k[limits.host.checked[j]])
                if top_k < self._vocab_size:
                    masses[j] = kept[i].topk(top_k, sorted=False).values.sum()
        return masses

    def _outside(
        self,
        x: Tensor,
        rows: Tensor,
        weights: Tensor,
        allowance: Tensor,
        top_k: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        """Indices of ``rows`` whose token has too many tokens or too much weight before it."""
        own = weights.gather(1, tokens[:, None])
        # Two passes bound the weight before the token: with and without those that weigh the same.
        ratios = torch.div(weights, own, out=self._buffer(1, len(rows)).view(torch.float32))
        most = (_sum_above(ratios, _JUST_BELOW_ONE) - 1.0) * own[:, 0]
        unsure = ((most >= allowance) | (top_k < self._vocab_size)).nonzero().flatten()
        if not len(unsure):
            return unsure
        weights, own, allowance = weights[unsure], own[unsure], allowance[unsure]
        outside = _sum_above(weights / own, 1.0) * own[:, 0] >= allowance
        left = (~outside).nonzero().flatten()
        if len(left):
            token = tokens[unsure[left], None]
            line = x[rows[unsure[left]]]
            value = line.gather(1, token)
            before = (line > value) | ((line == value) & (self._ids < token))
            rank = before.sum(1)
            mass = (weights[left] * before).sum(1)
            outside[left] = (rank >= top_k[unsure[left]]) | (mass >= allowance[left])
            outside[left] &= rank > 0
        return unsure[outside]

    def _best(self, looked: Looked, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The ``count`` best logits and their ids, in order. [rows, count] each."""
        if self._blocks >= 2 * count:
            # These blocks' maxima are ``count`` logits, so none of the best is anywhere else.
            block = looked.maxima[rows].topk(count, 1, sorted=False).indices
            shape = (len(rows), count * self._in_block)
            ids, values = self._elements(looked.x, rows.repeat_interleave(count), block.reshape(-1))
            values, place = values.view(shape).topk(count, 1, sorted=False)
            ids = ids.view(shape).gather(1, place)
        else:
            values, ids = looked.x[rows].topk(count, 1, sorted=False)
        ids, place = ids.sort(1)
        values, place = values.gather(1, place).sort(dim=1, descending=True, stable=True)
        return values, ids.gather(1, place)

    def _elements(self, x: Tensor, row: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and logits of the tokens of blocks; -inf past the vocabulary. [n, 16] each."""
        ids = block[:, None] + self._offsets
        past = ids >= self._vocab_size
        ids = ids.clamp_(max=self._vocab_size - 1)
        values = x.view(-1)[row[:, None] * self._vocab_size + ids]
        return ids, values.masked_fill_(past, -_INFINITY)

    def _lowest(self, ids: Tensor, values: Tensor, row: Tensor, best: Tensor) -> Tensor:
        """The lowest id in each row whose value is that row's best. [rows of ``best``]."""
        ids = ids.masked_fill(values != best[row, None], self._vocab_size).amin(1)
        lowest = torch.full((len(best),), self._vocab_size, device=self._device)
        return lowest.scatter_reduce_(0, row, ids, "amin")


def _sum_above(x: Tensor, least: float) -> Tensor:
    """Sum of each row's values above ``least``; ``x`` is overwritten."""
    return functional.threshold(x, least, 0.0, inplace=True).sum(1)
