"""How many tokens a step may hold: a time budget with a learned model of the machine (pure).

Three things are learned from what steps took::

    decode step   a + b * sequences + c * their context
    prompt alone  a decode step and d * tokens + e * pairs of a token and a position it sees
    prompt beside decodes  the decode step and a price per token, at the size and context of late

The price beside decodes is its own because some tokens ride for free (the weights are read anyway)
and some cost more (chunks are small). Time is taken to be convex in tokens: fewer tokens than of
late cost at most the price of late, more of them at most what they cost alone. Each is learned
from its own kind of step, so a wrong guess of a price cannot move the decode step, from which the
limit is derived.

While somebody's stream runs, a step may take some multiple of the decode step. A multiple ``x``
makes a prompt take ``x / (x - 1)`` times what it takes alone, times the ratio of the two prices.
The smallest multiple that keeps this at ``SLOWDOWN`` is chosen, so that streams pause no longer
than they must, and at most ``MAX_GAP``, so that a pause stays under 4 decode steps with something
to spare for noise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np

from pippin.config import SchedulerConfig

#: Most that a prompt's time may grow by beside streams, aimed at.
SLOWDOWN = 1.35

#: Longest and shortest limit of a step while sequences decode, in decode-only steps.
MAX_GAP = 3.6
MIN_GAP = 2.0

#: What passes between two tokens beside the step: the engine's loop, their way to the client.
DELIVERY_SECONDS = 0.001

#: Nobody sees a gap this short (seconds): a step may take it if that is not above ``MAX_GAP``.
FLOOR_SECONDS = 0.025

#: Longest step, in seconds, while nothing decodes: how long a newcomer or an abort may wait.
IDLE_SECONDS = 0.5

#: But a step may always take so many times its fixed part: prefill is to be worth its steps.
IDLE_STEPS = 5

#: Most tokens in a step where the configuration names no number.
MAX_TOKENS = 2048

#: Tokens of a chunk that runs a few layers at a time: hardly dearer than in a large one.
PART_TOKENS = 48

_LARGE = 512
"""Tokens from which a prompt's step tells what a prompt costs alone."""
_SMALL = 128
"""Below that, what a prompt's step costs says little of larger ones."""
_RATE = 0.2
"""Share of an error that is corrected at once, when enough was seen."""
_MIXED_RATE = 0.4
_PART_RATE = 0.2
_SETTLED = 5
"""Observations after which the rate is down to that, and outliers are ignored."""
_MAX_RATIO = 4.0
"""From then on, an observation counts as at most so many times longer or shorter than predicted."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes."""

    decodes: int = 0
    context: int = 0
    """Sum of the positions that the decoded tokens see."""
    prefill_tokens: int = 0
    attention: int = 0
    """Sum, over the prefill tokens, of the positions that each sees."""
    share: float = 1.0
    """Of the layers, that the prefill tokens ran through."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Starting values, in seconds. The default suits no machine; it errs on the slow side."""

    step: float = 0.02
    """Of any step: weights are read, kernels started."""
    per_sequence: float = 0.001
    per_context: float = 1e-7
    per_token: float = 0.00125
    per_pair: float = 1e-8


class _Linear:
    """Sum of terms ``coefficient * feature``, all positive, learned multiplicatively.

    Each term is scaled by the ratio of measured to predicted time, to a power that grows with the
    term's share (least mean squares in units of the terms, kept positive by the exponential). The
    ratio is the median of the last three: one outlier changes nothing, a lasting change is
    followed within a few steps.
    """

    def __init__(self, *coefficients: float) -> None:
        self.coefficients = list(coefficients)
        self.num_seen = 0
        self._ratios: deque[float] = deque(maxlen=3)

    def __call__(self, *features: float) -> float:
        return sum(c * f for c, f in zip(self.coefficients, features, strict=True))

    def learn(self, seconds: float, *features: float) -> None:
        """Take a step's time into account."""
        predicted = self(*features)
        self.num_seen += 1
        self._ratios.append(max(seconds / predicted, 0.1))
        if self.num_seen > _SETTLED:
            ratio = min(max(median(self._ratios), 1 / _MAX_RATIO), _MAX_RATIO)
            self.correct(predicted * ratio, _RATE, *features)
        else:
            self.correct(
                predicted * self._ratios[-1], 1.0 if self.num_seen == 1 else 0.5, *features
            )

    def fit(self, measured: Sequence[tuple[float, tuple[float, ...]]], before: float = 0.0) -> None:
        """Least squares over seconds and features, no term negative.

        Errors count relative to the seconds and ``before``, which passed beside them. A feature
        that was the same in all measurements keeps its ratio to the first.
        """
        positive = [(s, f) for s, f in measured if s > 0]
        if not positive:
            return
        self.num_seen += len(positive)
        rows = np.array([[x / (s + before) for x in f] for s, f in positive])
        goal = np.array([s / (s + before) for s, _ in positive])
        best: tuple[float, tuple[int, ...], np.ndarray[Any, Any]] | None = None
        known = [i for i in range(rows.shape[1]) if len({f[i] for _, f in positive}) > 1 or i == 0]
        for size in range(len(known), 0, -1):
            for chosen in combinations(known, size):
                found, *_ = np.linalg.lstsq(rows[:, chosen], goal)
                error = float(np.square(rows[:, chosen] @ found - goal).sum())
                if (found > 0).all() and (best is None or error < 0.999 * best[0]):
                    best = error, chosen, found
        if best is None:
            return
        first = self.coefficients[0]
        for index in known:
            self.coefficients[index] *= 1e-3
        for index, value in zip(best[1], best[2], strict=True):
            self.coefficients[index] = float(value)
        for index in set(range(len(self.coefficients))) - set(known):
            self.coefficients[index] *= self.coefficients[0] / first

    def correct(self, seconds: float, rate: float, *features: float) -> None:
        """Move the prediction for ``features`` towards ``seconds``, all the way at rate 1."""
        terms = [c * f for c, f in zip(self.coefficients, features, strict=True)]
        predicted = sum(terms)
        power = rate * math.log(seconds / predicted) * predicted / sum(t * t for t in terms)
        for index, term in enumerate(terms):
            self.coefficients[index] *= math.exp(power * term)


class StepBudget:
    """Decides how much prefill fits in a step, and learns from how long steps took."""

    def __init__(
        self,
        config: SchedulerConfig,
        block_size: int,
        calibration: Calibration | None = None,
        *,
        splits_layers: bool = False,
    ) -> None:
        """``splits_layers``: prompts beside decodes run a few layers at a time."""
        start = calibration or Calibration()
        self.max_tokens = config.max_num_batched_tokens or MAX_TOKENS
        self._block_size = block_size
        self._least = max(1, block_size // 2)
        self._step_seconds = config.step_time_ms and config.step_time_ms / 1000
        self._decodes = _Linear(start.step, start.per_sequence, start.per_context)
        self._calm_context = 1e12
        """Mean context of sequences in the last step that only decoded."""
        self._alone = _Linear(start.per_token, start.per_pair)
        self._splits_layers = splits_layers
        self._alone_tokens = 0.0
        """Size of the steps that ``_alone`` was learned from."""
        self._mixed_price: float | None = None
        """Seconds per prompt token beside decodes, for ``_mixed_tokens`` in a step of which each
        sees ``_mixed_context`` positions."""
        self._mixed_tokens = 0.0
        self._mixed_context = 0.0
        self._part_ratio = 1.0
        """Of what a chunk costs that runs a few layers at a time, to what it costs alone."""
        self._part_ratios: deque[float] = deque(maxlen=5)

    # Predictions

    def decode_seconds(self, sequences: int, context: int) -> float:
        """Predicted time of a step that decodes ``sequences`` with ``context`` positions in all."""
        return self._decodes(1, sequences, context)

    def prefill_seconds(self, before: int, start: int, count: int, *, mixed: bool) -> float:
        """Predicted time that prompt tokens add to a step.

        ``count`` tokens from position ``start`` on, in a step that holds ``before`` others already.
        """
        if not mixed:
            return self._alone(count, attention_pairs(start, count))
        price, room, beyond = self._mixed_prices(before, start)
        return price * min(count, room) + beyond * max(count - room, 0.0)

    def _mixed_prices(self, before: int, start: int) -> tuple[float, float, float]:
        """Price per token, the number of tokens that it is for, and the price of those beyond."""
        per_token, per_pair = self._alone.coefficients
        bulk = per_token + per_pair * start + self.decode_seconds(1, 1) / _LARGE
        if self._mixed_price is None:
            return bulk, 0.0, bulk
        price = self._mixed_price + per_pair * (start - self._mixed_context)
        price = max(price, self._mixed_price / 4)
        return price, max(0.0, self._mixed_tokens - before), max(price, bulk)

    # Decisions

    def allowance(self, sequences: int, context: int) -> float:
        """Seconds of prefill that may go with a step while so many sequences decode.

        Negative where the decodes alone take longer than they should.
        """
        if not sequences:
            step = self.decode_seconds(1, 1)
            return max(IDLE_SECONDS, IDLE_STEPS * step) - step
        decode = self.decode_seconds(sequences, context)
        if self._step_seconds is not None:
            return self._step_seconds - decode
        # What streams had before a prompt came, not what they come to have meanwhile.
        calm_context = min(context, int(self._calm_context * sequences))
        calm = self.decode_seconds(sequences, calm_context)
        calm += DELIVERY_SECONDS
        longest = max(self._gap() * calm, min(FLOOR_SECONDS, MAX_GAP * calm))
        return longest - DELIVERY_SECONDS - decode

    def _gap(self) -> float:
        """Longest step in decode steps."""
        if self._splits_layers:
            return _multiple(SLOWDOWN / self._part_ratio)
        if self._mixed_price is None or self._alone_tokens < _LARGE:
            return MAX_GAP
        per_token, per_pair = self._alone.coefficients
        alone = per_token + per_pair * self._mixed_context
        alone += self.decode_seconds(1, 1) / self._alone_tokens
        return _multiple(SLOWDOWN * alone / self._mixed_price)

    def chunk(
        self, seconds: float, before: int, start: int, wanted: int, tokens_left: int, *, mixed: bool
    ) -> int:
        """Prompt tokens from position ``start`` on that fit in ``seconds`` and ``tokens_left``.

        ``before`` as in ``prefill_seconds``. A chunk above one block ends at a block's border
        where that costs little, or with the prompt. 0 where not even half a block (or all of
        ``wanted``) fits.
        """
        if seconds <= 0:
            return 0
        if mixed:
            price, room, beyond = self._mixed_prices(before, start)
            limit = seconds / price
            if limit > room:
                limit = room + (seconds - price * room) / beyond
            # Nothing is known of steps much larger than any before.
            limit = min(limit, 2 * max(self._mixed_tokens, self._alone_tokens, self._block_size))
        else:
            limit = _solve(seconds, start, *self._alone.coefficients)
        count = min(wanted, tokens_left, int(limit))
        if count == wanted:
            return count
        aligned = (start + count) // self._block_size * self._block_size - start
        if aligned >= count - count // 8:
            count = aligned
        return count if count >= min(self._least, tokens_left) else 0

    def least_chunk(self, wanted: int, tokens_left: int) -> int:
        """What a prompt gets even where ``chunk`` is 0, so that it goes on."""
        return min(wanted, self._least, tokens_left)

    def part(self, seconds: float, start: int, wanted: int, num_layers: int) -> int:
        """Tokens from position ``start`` on of a chunk that runs a few layers at a time.

        In few steps, but not so few that the chunk is small and dear; among these, so that the
        layers fill the steps evenly.
        """
        best, best_rate = min(wanted, PART_TOKENS), 0.0
        per_layer = self._part_seconds(start, best) / best / num_layers
        for steps in range(1, num_layers + 1):
            count = min(wanted, int(seconds / (per_layer * -(-num_layers // steps))))
            if count < min(wanted, PART_TOKENS):
                continue
            if count > 2 * PART_TOKENS and best_rate:
                break
            if count / steps > 1.01 * best_rate:
                best, best_rate = count, count / steps
        return best

    def part_layers(
        self, seconds: float, start: int, count: int, left: int, num_layers: int
    ) -> int:
        """Layers of a chunk begun at ``start`` that fit in ``seconds``, of ``left``; at least 1."""
        # A little more than fits, rather than a step more for the rest.
        most = int(seconds * 1.03 / self._part_seconds(start, count) * num_layers)
        steps = -(-left // max(most, 1))
        return -(-left // steps)

    def _part_seconds(self, start: int, count: int) -> float:
        """Predicted time of all layers of such a chunk."""
        return self._part_ratio * self._alone(count, attention_pairs(start, count))

    # Learning

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step."""
        if seconds <= 0:
            return
        if not work.prefill_tokens:
            self._decodes.learn(seconds, 1, work.decodes, work.context)
            self._calm_context = work.context / max(1, work.decodes)
        elif work.share < 1.0:
            if work.decodes:
                self._observe_part(work, seconds)
        elif work.decodes:
            self._observe_mixed(work, seconds)
        elif work.prefill_tokens >= min(self._alone_tokens / 2, _SMALL):
            rest = seconds - self.decode_seconds(1, 1)
            self._alone.learn(rest, work.prefill_tokens, work.attention)
            self._alone_tokens = max(work.prefill_tokens, 0.9 * self._alone_tokens)

    def _observe_part(self, work: StepWork, seconds: float) -> None:
        predicted = work.share * self._alone(work.prefill_tokens, work.attention)
        ratio = (seconds - self.decode_seconds(work.decodes, work.context)) / predicted
        self._part_ratios.append(max(ratio, 0.1))
        if self._part_ratios.maxlen == len(self._part_ratios):
            # The median: outliers change nothing.
            self._part_ratio += _PART_RATE * (median(self._part_ratios) - self._part_ratio)

    def _observe_mixed(self, work: StepWork, seconds: float) -> None:
        rest = seconds - self.decode_seconds(work.decodes, work.context)
        count = work.prefill_tokens
        context = work.attention / count
        known = self._mixed_price
        if known is not None and count < self._mixed_tokens / 2 and rest < known * count:
            # A prompt's rest: says nothing of larger chunks.
            self._mixed_tokens *= 0.9
            return
        per_token, per_pair = self._alone.coefficients
        alone = per_token + per_pair * context
        price = max(rest / count, 0.02 * alone)
        if known is None:
            self._mixed_price, self._mixed_tokens = price, count
        else:
            price = min(price, 2 * max(known, alone))
            self._mixed_price = known + _MIXED_RATE * (price - known)
            self._mixed_tokens += _MIXED_RATE * (count - self._mixed_tokens)
        self._mixed_context = context

    def calibrate(self, measured: Sequence[tuple[StepWork, float]]) -> None:
        """Learn from steps measured on purpose: like ``observe``, but fits all of them together."""
        decodes = [(s, (1, w.decodes, w.context)) for w, s in measured if not w.prefill_tokens]
        self._decodes.fit(decodes)
        step = self.decode_seconds(1, 1)
        prompts = [(w, s) for w, s in measured if not w.decodes]
        most = max((w.prefill_tokens for w, _ in prompts), default=0)
        # Of steps that took little more than a decode, most may have been the fixed part.
        large = [
            (w, s)
            for w, s in prompts
            if w.prefill_tokens == most or (w.prefill_tokens >= _SMALL and s > 2 * step)
        ]
        self._alone.fit([(s - step, (w.prefill_tokens, w.attention)) for w, s in large], step)
        self._alone_tokens = most
        for work, seconds in measured:
            if work.prefill_tokens and work.decodes:
                self._observe_mixed(work, seconds)


def _multiple(slowdown: float) -> float:
    """Smallest step, in decode steps, that slows a prompt down by no more than that."""
    return min(max(slowdown / (slowdown - 1), MIN_GAP), MAX_GAP) if slowdown > 1 else MAX_GAP


def attention_pairs(start: int, count: int) -> int:
    """Pairs of one of ``count`` tokens from position ``start`` and a position that it sees."""
    return count * start + count * (count + 1) // 2


def _solve(seconds: float, start: int, per_token: float, per_pair: float) -> float:
    """Tokens ``n`` with ``n * per_token + per_pair * (start * n + n² / 2)`` = ``seconds``."""
    linear = per_token + per_pair * (start + 0.5)
    return 2 * seconds / (linear + math.sqrt(linear * linear + 2 * per_pair * seconds))
