"""Choosing tokens from logits with torch, on any device, for all rows at once.

The order of operations is ``docs/sampling.md``'s: this file edits the logits, ``draw`` chooses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pippin.backends.base import SampledToken, SampleRow, SamplingState
from pippin.backends.noise import position_keys
from pippin.backends.sampler import Packed, SequenceState, bans, pack, penalties
from pippin.backends.torch.draw import DeviceLimits, Drawer
from pippin.backends.torch.lanes import Lanes, Looked
from pippin.backends.torch.logprobs import report
from pippin.types.request import Logprobs

logger = logging.getLogger(__name__)

_INFINITY = float("inf")


class TorchSampler:
    """A ``backends.base.Sampler``."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._lanes = Lanes(vocab_size, device)
        self._drawer = Drawer(self._lanes)
        self._put = self._lanes.put
        self._states: dict[int, SequenceState] = {}
        self._seqs: tuple[int, ...] = ()
        self._batch: _Batch | None = None
        self._warned = False

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
        raw = self._keep_raw(x, batch) if packed.logprobs else None
        self._edit(x, batch, positions)
        looked = self._lanes.look(x)
        if not looked.top.isfinite().all():
            self._repair(x, packed, positions)
            looked = self._lanes.look(x)
        chosen = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        if len(packed.greedy):
            chosen[batch.greedy] = self._lanes.first(looked, batch.greedy)
        for draw, limits in batch.draws:
            places = limits.host.rows
            keys = position_keys(packed.streams[places], np.array(positions)[places])
            chosen[limits.rows] = draw(looked, limits, self._put(keys.view(np.int32)))
        tokens: list[int] = chosen.tolist()
        for r in packed.recording:
            packed.states[r].append(tokens[r])
        sampled = [SampledToken(token) for token in tokens]
        if raw is not None:
            tops = [packed.states[r].params.logprobs or 0 for r in packed.logprobs]
            reports = self._report(raw, chosen[batch.logprobs], tops)
            for r, logprobs in zip(packed.logprobs, reports, strict=True):
                sampled[r] = SampledToken(tokens[r], logprobs)
        return sampled

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: Tensor, first_row: int, targets: Sequence[int], top: int
    ) -> list[Logprobs]:
        """Raw log probabilities of ``targets[i]`` in row ``first_row + i``, with the best."""
        lines = logits[first_row : first_row + len(targets)]
        tokens = torch.tensor(targets, dtype=torch.int64, device=self._device)
        return self._report(lines, tokens, [top] * len(targets))

    def _report(self, raw: Tensor, tokens: Tensor, tops: list[int]) -> list[Logprobs]:
        result: list[Logprobs] = []
        for start in range(0, len(tops), self._lanes.most_rows):
            part = slice(start, start + self._lanes.most_rows)
            lines = raw[part].float().contiguous()
            result += report(self._lanes, lines, tokens[part], tops[part])
        return result

    def _keep_raw(self, x: Tensor, batch: _Batch) -> Tensor:
        """Copies of the rows whose log probabilities are wanted, before they are edited."""
        kept = self._lanes.keep("raw", len(batch.logprobs))
        return torch.index_select(x, 0, batch.logprobs, out=kept)

    def _batch_of(self, seqs: tuple[int, ...]) -> _Batch:
        if self._batch is None or self._seqs != seqs:
            packed = pack([self._states[seq] for seq in seqs], self._vocab_size)
            self._batch = _Batch.make(packed, self._lanes, self._drawer)
            self._seqs = seqs
        return self._batch

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

    def _repair(self, x: Tensor, packed: Packed, positions: list[int]) -> None:
        """Make rows with NaN or without any finite best logit fit to be sampled, in place.

        NaN counts as -inf; of several +inf one is drawn; a row without hope draws from all tokens
        that its request allows. The other rows keep their values.
        """
        bad = (~x.amax(1).isfinite()).nonzero().flatten().tolist()
        for r in bad:
            state = packed.states[r]
            row = x[r].nan_to_num_(nan=-_INFINITY, posinf=_INFINITY, neginf=-_INFINITY)
            best = row.max()
            if best == _INFINITY:
                row.copy_(torch.where(row == best, 0.0, -_INFINITY))
            elif best == -_INFINITY:
                row[... if state.allowed is None else self._put(state.allowed)] = 0.0
                row[state.banned(positions[r])] = -_INFINITY
        if not self._warned:
            self._warned = True
            logger.warning(
                "the model gave logits without a finite maximum (%d of %d rows);"
                " such rows are sampled from what is left, and not reported again",
                len(bad),
                len(x),
            )


_Draw = Callable[[Looked, DeviceLimits, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Batch:
    """``sampler.Packed`` with its arrays on the device."""

    packed: Packed
    greedy: Tensor
    draws: tuple[tuple[_Draw, DeviceLimits], ...]
    """What draws the random rows."""
    bias_index: Tensor
    bias_value: Tensor
    allowed_rows: Tensor
    allowed: Tensor
    logprobs: Tensor

    @staticmethod
    def make(packed: Packed, lanes: Lanes, drawer: Drawer) -> _Batch:
        put, draws = lanes.put, list[tuple[_Draw, DeviceLimits]]()
        if len(packed.few.rows):
            draws.append((drawer.few, DeviceLimits.make(packed.few, put)))
        for start in range(0, len(packed.many.rows), lanes.most_rows):
            part = packed.many.take(slice(start, start + lanes.most_rows))
            draws.append((drawer.many, DeviceLimits.make(part, put)))
        return _Batch(
            packed=packed,
            greedy=put(packed.greedy),
            draws=tuple(draws),
            bias_index=put(packed.bias.index),
            bias_value=put(packed.bias.value),
            allowed_rows=put(packed.allowed_rows),
            allowed=put(packed.allowed),
            logprobs=put(np.array(packed.logprobs, dtype=np.int64)),
        )
