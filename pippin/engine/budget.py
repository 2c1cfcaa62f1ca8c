"""How many tokens a step may hold: a time budget with a learned model of the machine (pure).

Three models of a step's seconds, each learned from steps of its own kind::

    decodes only   a + b * sequences + c * their context
    prompts only   d + e * tokens + f * pairs of a token and a position it sees
    mixed          decodes as above + g * tokens + h * pairs

They are kept apart because a prompt's tokens ride with decodes at another price than alone (the
weights are read anyway, the chunks are small), and because a wrong guess of the mixed step must
not move the decode step from which the limit is derived.

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
from statistics import median

from pippin.config import SchedulerConfig

#: Most that a prompt's time may grow by beside streams, aimed at.
SLOWDOWN = 1.35

#: Longest and shortest limit of a step while sequences decode, in decode-only steps.
MAX_GAP = 3.2
MIN_GAP = 2.0

#: Nobody sees a gap this short (seconds): a step may take it if that is not above ``MAX_GAP``.
FLOOR_SECONDS = 0.025

#: Longest step, in seconds, while nothing decodes: how long a newcomer or an abort may wait.
IDLE_SECONDS = 0.5

#: But a step may always take so many times its fixed part: prefill is to be worth its steps.
IDLE_STEPS = 5

#: Most tokens in a step where the configuration names no number.
MAX_TOKENS = 2048

_LARGE = 256
"""Tokens from which a prompt's step tells what a prompt costs alone; it takes three of them."""
_RATE = 0.2
"""Share of an error that is corrected at once, when enough was seen."""
_SETTLED = 5
"""Observations after which the rate is down to that, and outliers are ignored."""
_PASSES = 30
"""Over the measurements of a calibration."""
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
        terms = [c * f for c, f in zip(self.coefficients, features, strict=True)]
        predicted = sum(terms)
        self.num_seen += 1
        self._ratios.append(max(seconds / predicted, 0.1))
        if self.num_seen > _SETTLED:
            ratio = min(max(median(self._ratios), 1 / _MAX_RATIO), _MAX_RATIO)
            rate = _RATE
        else:
            ratio = self._ratios[-1]
            rate = 1.0 if self.num_seen == 1 else 0.5
        power = rate * math.log(ratio) * predicted / sum(term * term for term in terms)
        for index, term in enumerate(terms):
            self.coefficients[index] *= math.exp(power * term)


class StepBudget:
    """Decides how much prefill fits in a step, and learns from how long steps took."""

    def __init__(
        self, config: SchedulerConfig, block_size: int, calibration: Calibration | None = None
    ) -> None:
        start = calibration or Calibration()
        self.max_tokens = config.max_num_batched_tokens or MAX_TOKENS
        self._least = max(1, block_size // 2)
        self._block_size = block_size
        self._step_seconds = config.step_time_ms and config.step_time_ms / 1000
        self._decodes = _Linear(start.step, start.per_sequence, start.per_context)
        self._prompts = _Linear(start.step, start.per_token, start.per_pair)
        self._mixed = _Linear(start.per_token, start.per_pair)
        self._mixed_tokens = 0
        """Of prompts in the last mixed step."""
        self._mixed_context = 0.0
        """Positions that such a token saw, on average."""
        self._num_large = 0

    def decode_seconds(self, sequences: int, context: int) -> float:
        """Predicted time of a step that decodes ``sequences`` with ``context`` positions in all."""
        return self._decodes(1, sequences, context)

    def prefill_seconds(self, start: int, count: int, *, mixed: bool) -> float:
        """Predicted time that ``count`` prompt tokens from position ``start`` on add to a step."""
        per_token, per_pair = self._prices(mixed)
        return per_token * count + per_pair * attention_pairs(start, count)

    def _prices(self, mixed: bool) -> tuple[float, float]:
        """Seconds per token and per pair."""
        if mixed and self._mixed.num_seen:
            per_token, per_pair = self._mixed.coefficients
        else:
            _, per_token, per_pair = self._prompts.coefficients
        return per_token, per_pair

    def allowance(self, sequences: int, context: int) -> float:
        """Seconds of prefill that may go with a step while so many sequences decode.

        Negative where the decodes alone take longer than they should.
        """
        if not sequences:
            step = self._prompts.coefficients[0]
            return max(IDLE_SECONDS, IDLE_STEPS * step) - step
        decode = self.decode_seconds(sequences, context)
        if self._step_seconds is not None:
            return self._step_seconds - decode
        return max(self._gap() * decode, min(FLOOR_SECONDS, MAX_GAP * decode)) - decode

    def _gap(self) -> float:
        """Longest step in decode steps."""
        if self._num_large < 3 or not self._mixed.num_seen:
            return MAX_GAP
        step, per_token, per_pair = self._prompts.coefficients
        alone = step / self.max_tokens + per_token + per_pair * self._mixed_context
        mixed_token, mixed_pair = self._mixed.coefficients
        slowdown = SLOWDOWN * alone / (mixed_token + mixed_pair * self._mixed_context)
        return min(max(slowdown / (slowdown - 1), MIN_GAP), MAX_GAP) if slowdown > 1 else MAX_GAP

    def chunk(
        self, seconds: float, start: int, wanted: int, tokens_left: int, *, mixed: bool
    ) -> int:
        """Prompt tokens from position ``start`` on that fit in ``seconds`` and ``tokens_left``.

        A chunk above one block ends at a block's border where that costs little, or with the
        prompt. 0 where not even half a block (or all of ``wanted``) fits.
        """
        limit = _solve(seconds, start, *self._prices(mixed))
        if mixed and self._mixed.num_seen:
            # Prices of small chunks say little of large ones (weights are read in any case).
            sure = _solve(seconds, start, *self._prices(mixed=False))
            limit = max(min(limit, 2 * self._mixed_tokens), min(limit, sure))
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

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step."""
        if seconds <= 0:
            return
        if not work.prefill_tokens:
            self._decodes.learn(seconds, 1, work.decodes, work.context)
        elif not work.decodes:
            self._prompts.learn(seconds, 1, work.prefill_tokens, work.attention)
            self._num_large += work.prefill_tokens >= _LARGE
        else:
            if not self._mixed.num_seen:
                self._mixed.coefficients = self._prompts.coefficients[1:]
            rest = seconds - self.decode_seconds(work.decodes, work.context)
            self._mixed.learn(rest, work.prefill_tokens, work.attention)
            self._mixed_tokens = work.prefill_tokens
            self._mixed_context = work.attention / work.prefill_tokens

    def calibrate(self, measured: Sequence[tuple[StepWork, float]]) -> None:
        """Learn from steps measured on purpose, such as ``calibration_plans`` makes."""
        for _ in range(_PASSES):
            for work, seconds in measured:
                self.observe(work, seconds)


def attention_pairs(start: int, count: int) -> int:
    """Pairs of one of ``count`` tokens from position ``start`` and a position that it sees."""
    return count * start + count * (count + 1) // 2


def _solve(seconds: float, start: int, per_token: float, per_pair: float) -> float:
    """Tokens ``n`` with ``n * per_token + per_pair * (start * n + n² / 2)`` = ``seconds``."""
    if seconds <= 0:
        return 0.0
    linear = per_token + per_pair * (start + 0.5)
    return 2 * seconds / (linear + math.sqrt(linear * linear + 2 * per_pair * seconds))
