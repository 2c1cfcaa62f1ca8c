"""Choosing tokens from logits with torch, on any device, for all rows at once.

The order of operations is ``docs/sampling.md``'s, the noise is ``backends.noise``'s. The tokens a
row may choose are always the first ``n`` in the order (logit falling, id rising), so they are found
without sorting the vocabulary: mostly among the ``CANDIDATES`` best, otherwise by asking for the
best token with noise whether it lies inside, which is exact for every top_k, top_p and min_p.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pippin.backends.base import SampledToken, SampleRow, SamplingState
from pippin.backends.noise import (
    LARGEST_U,
    MULTIPLIER_1,
    MULTIPLIER_2,
    SMALLEST_U,
    position_keys,
    token_table,
)
from pippin.backends.sampler import (
    LOWEST_LOGPROB,
    Limits,
    Packed,
    SequenceState,
    bans,
    pack,
    penalties,
)
from pippin.types.request import Logprobs

logger = logging.getLogger(__name__)

#: Most likely tokens looked at before the whole row is.
CANDIDATES = 256

#: Elements of the logits that ``prompt_logprobs`` turns into float32 at once.
_CHUNK_ELEMENTS = 1 << 24

_INFINITY = float("inf")


class TorchSampler:
    """A ``backends.base.Sampler``."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._table = self._put(token_table(vocab_size).view(np.int32))
        self._states: dict[int, SequenceState] = {}
        self._seqs: tuple[int, ...] = ()
        self._batch: _Batch | None = None

    def add(self, seq: int, state: SamplingState) -> None:
        self._states[seq] = SequenceState(state, self._vocab_size)
        self._batch = None

    def remove(self, seq: int) -> None:
        del self._states[seq]
        self._batch = None

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """Choose a token for every row. ``logits``: [rows, vocab_size], any float type."""
        if not rows:
            return []
        batch = self._batch_of(tuple(row.seq for row in rows))
        packed = batch.packed
        positions = [row.position for row in rows]
        x = self._take(logits, [row.row for row in rows])
        raw = torch.log_softmax(x[batch.logprobs], -1) if packed.logprobs else None
        self._edit(x, batch, positions)
        chosen = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        if len(packed.greedy):
            chosen[batch.greedy] = self._greedy(x, batch, positions)
        if len(packed.random.rows):
            chosen[batch.random.rows] = self._draw(x, batch, positions)
        tokens: list[int] = chosen.tolist()
        for r in packed.recording:
            packed.states[r].append(tokens[r])
        sampled = [SampledToken(token) for token in tokens]
        if raw is not None:
            tops = [packed.states[r].params.logprobs or 0 for r in packed.logprobs]
            reports = _report(raw, chosen[batch.logprobs], tops)
            for r, report in zip(packed.logprobs, reports, strict=True):
                sampled[r] = SampledToken(tokens[r], report)
        return sampled

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: Tensor, first_row: int, targets: Sequence[int], top: int
    ) -> list[Logprobs]:
        """Raw log probabilities of ``targets[i]`` in row ``first_row + i``, with the best."""
        chunk = max(1, _CHUNK_ELEMENTS // self._vocab_size)
        result: list[Logprobs] = []
        for start in range(0, len(targets), chunk):
            wanted = targets[start : start + chunk]
            row = first_row + start
            lines = torch.log_softmax(logits[row : row + len(wanted)].float(), -1)
            tokens = torch.tensor(wanted, dtype=torch.int64, device=self._device)
            result += _report(lines, tokens, [top] * len(wanted))
        return result

    def _batch_of(self, seqs: tuple[int, ...]) -> _Batch:
        if self._batch is None or self._seqs != seqs:
            packed = pack([self._states[seq] for seq in seqs], self._vocab_size)
            self._batch = _Batch.make(packed, self._put)
            self._seqs = seqs
        return self._batch

    def _put(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _take(self, logits: Tensor, rows: list[int]) -> Tensor:
        """The wanted rows as contiguous float32; the logits themselves where they are that."""
        if rows != list(range(logits.shape[0])):
            logits = logits[torch.tensor(rows, device=self._device)]
        return logits.float().contiguous()

    def _edit(self, x: Tensor, batch: _Batch, positions: list[int]) -> None:
        """Masks, bias and penalties, in place."""
        packed = batch.packed
        flat = x.view(-1)
        if len(packed.allowed_rows):
            kept = flat[batch.allowed]
            x[batch.allowed_rows] = -_INFINITY
            flat[batch.allowed] = kept
        if packed.banning:
            flat[self._put(bans(packed, positions, self._vocab_size))] = -_INFINITY
        if packed.bias:
            flat[batch.bias_index] += batch.bias_value
        if packed.penalised:
            entries = penalties(packed, self._vocab_size)
            index, count = self._put(entries.index), self._put(entries.count)
            repetition = self._put(entries.repetition)
            value = flat[index]
            value = torch.where(value > 0, value / repetition, value * repetition)
            value -= self._put(entries.frequency) * count
            value -= self._put(entries.presence) * (count > 0)
            flat[index] = value

    def _greedy(self, x: Tensor, batch: _Batch, positions: list[int]) -> Tensor:
        x = x if len(batch.packed.greedy) == len(x) else x[batch.greedy]
        tokens = x.argmax(-1)
        finite = x.gather(1, tokens[:, None]).isfinite()
        if not finite.all():
            self._repair(x, batch.packed, batch.packed.greedy.tolist(), positions)
            tokens = x.argmax(-1)
        return tokens

    def _draw(self, x: Tensor, batch: _Batch, positions: list[int]) -> Tensor:
        places = batch.packed.random.rows
        x = x if len(places) == len(x) else x[batch.random.rows]
        if not x.amax(-1).isfinite().all():
            self._repair(x, batch.packed, places.tolist(), positions)
        keys = position_keys(
            batch.packed.streams[places], [positions[place] for place in places.tolist()]
        )
        k = self._put(keys.view(np.int32))
        return self._reject(x, batch.random, k)

    def _reject(self, x: Tensor, limits: _Limits, keys: Tensor) -> Tensor:
        """Exact for all limits: the best token with noise, until it is one of those allowed."""
        s = (x - x.amax(-1, keepdim=True)) / limits.temperature[:, None]
        z = s + self._gumbel(self._table, keys)
        tokens = z.argmax(-1)
        if not limits.any_limit:
            return tokens
        weights = s.exp()
        bound = limits.top_p * self._mass(s, weights, limits)
        ids = torch.arange(self._vocab_size, device=self._device)
        pending = torch.arange(len(x), device=self._device)
        best = tokens.clone()
        while len(pending):
            value = s.gather(1, best[:, None])
            before = (s > value) | ((s == value) & (ids < best[:, None]))
            rank = before.sum(-1)
            inside = (
                (value[:, 0] >= limits.log_min_p[pending])
                & (rank < limits.top_k[pending])
                & ((weights * before).sum(-1) < bound[pending])
            ) | (rank == 0)
            tokens[pending] = best
            outside = ~inside
            pending, s, weights = pending[outside], s[outside], weights[outside]
            z = z[outside].masked_fill_(~before[outside], -_INFINITY)
            best = z.argmax(-1)
        return tokens

    def _mass(self, s: Tensor, weights: Tensor, limits: _Limits) -> Tensor:
        """Sum of the weights that min_p and top_k leave, of which top_p takes its part. [rows]."""
        kept = weights * (s >= limits.log_min_p[:, None])
        total = kept.sum(-1)
        for r in limits.large_k:
            kth = min(int(limits.top_k[r]), self._vocab_size)
            total[r] = kept[r].topk(kth).values.sum()
        return total

    def _gumbel(self, table: Tensor, keys: Tensor) -> Tensor:
        """``noise.gumbel(noise.noise_bits(keys, table))`` in torch. float32 [rows, tokens]."""
        x = table + keys[:, :1]
        x ^= (x >> 16) & 0xFFFF
        x *= _signed(MULTIPLIER_1)
        x ^= (x >> 15) & 0x1FFFF
        x = torch.add(keys[:, 1:], x, alpha=_signed(MULTIPLIER_2))
        x ^= x >> 16
        x &= 0x7FFFFFFF
        u = x.float().mul_(-(2.0**-31)).clamp_(-LARGEST_U, -SMALLEST_U)
        return u.log1p_().neg_().log_().neg_()

    def _repair(self, x: Tensor, packed: Packed, places: list[int], positions: list[int]) -> None:
        """Make rows with NaN or without any finite best logit fit to be sampled, in place.

        NaN counts as -inf; of several +inf one is drawn; a row without hope draws from all tokens
        that its request allows. The other rows keep their values.
        """
        bad = (~x.amax(-1).isfinite()).nonzero().flatten().tolist()
        for r in bad:
            place = places[r]
            state = packed.states[place]
            row = x[r].nan_to_num_(nan=-_INFINITY, posinf=_INFINITY, neginf=-_INFINITY)
            if row.max() == _INFINITY:
                row.masked_fill_(row < _INFINITY, -_INFINITY).masked_fill_(row == _INFINITY, 0.0)
            elif row.max() == -_INFINITY:
                if state.allowed is None:
                    row.zero_()
                else:
                    row[self._put(state.allowed)] = 0.0
                row[state.banned(positions[place])] = -_INFINITY
        logger.warning("%d row(s) of logits had no finite maximum", len(bad))


@dataclass(frozen=True, slots=True)
class _Limits:
    """``sampler.Limits`` on the device."""

    rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    any_limit: bool
    large_k: tuple[int, ...]
    """Rows in which top_k and top_p both count."""

    @staticmethod
    def make(limits: Limits, put: _Put) -> _Limits:
        both = (limits.top_p < _INFINITY) & (limits.top_k < np.iinfo(np.int64).max)
        return _Limits(
            rows=put(limits.rows),
            temperature=put(limits.temperature),
            top_k=put(limits.top_k),
            top_p=put(limits.top_p),
            log_min_p=put(limits.log_min_p),
            any_limit=bool(limits.limited.any()),
            large_k=tuple(np.flatnonzero(both).tolist()),
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    """``sampler.Packed`` with its arrays on the device."""

    packed: Packed
    greedy: Tensor
    random: _Limits
    bias_index: Tensor
    bias_value: Tensor
    allowed_rows: Tensor
    allowed: Tensor
    logprobs: Tensor

    @staticmethod
    def make(packed: Packed, put: _Put) -> _Batch:
        return _Batch(
            packed=packed,
            greedy=put(packed.greedy),
            random=_Limits.make(packed.random, put),
            bias_index=put(packed.bias.index),
            bias_value=put(packed.bias.value),
            allowed_rows=put(packed.allowed_rows),
            allowed=put(packed.allowed),
            logprobs=put(np.array(packed.logprobs, dtype=np.int64)),
        )


class _Put(Protocol):
    def __call__(self, array: npt.NDArray[Any]) -> Tensor: ...


def _signed(value: int) -> int:
    """The int32 with the same bits."""
    return value - 2**32 if value >= 2**31 else value


def _report(lines: Tensor, tokens: Tensor, tops: list[int]) -> list[Logprobs]:
    """Log probabilities of ``tokens`` [rows] in ``lines`` [rows, vocab], and the best of each."""
    own = lines.gather(1, tokens[:, None])
    ranks: list[int] = ((lines > own).sum(-1) + 1).tolist()
    best = lines.topk(min(max(tops), lines.shape[1]), -1)
    values = torch.cat((own, best.values), 1).nan_to_num_(nan=LOWEST_LOGPROB)
    shown: list[list[float]] = values.clamp_(min=LOWEST_LOGPROB).tolist()
    ids: list[list[int]] = torch.cat((tokens[:, None], best.indices), 1).tolist()
    return [
        Logprobs(ids[r][: 1 + top], shown[r][: 1 + top], ranks[r]) for r, top in enumerate(tops)
    ]
