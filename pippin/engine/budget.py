"""How many tokens a step may hold: a time budget with a learned model of the machine (pure).

Seconds of a step are modelled as the sum of two parts, each learned from what steps took::

    decode   a + b * sequences + d * their context
    prefill  c * tokens + e * (pairs of a token and a position it sees)

The decode part is learned from steps without prefill only, the prefill part from what the others
took beyond it. Kept apart, so that a wrong guess of one cannot raise the limit that is derived
from the other. While somebody's stream runs, a step may take ``GAP`` times the decode part: a
stream's gap then stays under 4 times the usual one with something to spare for noise, and the
prompt gets 1 - 1/GAP of the machine, that is, it takes at most about 1.5 times what it takes alone.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from pippin.config import SchedulerConfig

#: Longest step while sequences decode, in decode-only steps.
GAP = 3.2

#: Nobody sees a gap this short (seconds), so a step may take it, up to ``FLOOR_GAP`` decode steps.
FLOOR_SECONDS = 0.025
FLOOR_GAP = 3.5

#: Longest step, in seconds, while nothing decodes: how long a newcomer or an abort may wait.
IDLE_SECONDS = 0.5

#: Most tokens in a step where the configuration names no number.
MAX_TOKENS = 2048

_RATE = 0.2
"""Share of an error that is corrected at once, when enough was seen."""
_SETTLED = 5
"""Observations after which the rate is down to that."""
_MAX_RATIO = 3.0
"""An observation counts as at most so many times longer or shorter than predicted."""


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
    """Sum of terms ``coefficient * feature``, none negative, learned multiplicatively.

    Terms are corrected in proportion to the square of their share (normalised least mean squares
    in units of the terms themselves), by the median of the last three ratios of measured to
    predicted time: one outlier changes nothing, a lasting change is followed within a few steps.
    """

    def __init__(self, *coefficients: float) -> None:
        self.coefficients = list(coefficients)
        self._ratios: deque[float] = deque(maxlen=3)
        self._seen = 0

    def __call__(self, *features: float) -> float:
        return sum(c * f for c, f in zip(self.coefficients, features, strict=True))

    def learn(self, seconds: float, *features: float) -> None:
        terms = [c * f for c, f in zip(self.coefficients, features, strict=True)]
        predicted = sum(terms)
        ratio = min(max(seconds / predicted, 1 / _MAX_RATIO), _MAX_RATIO)
        self._ratios.append(ratio)
        self._seen += 1
        if self._seen >= _SETTLED:
            ratio = median(self._ratios)
        rate = max(_RATE, 1 / self._seen)
        # At most 1.37 for three terms, so that factors below stay positive for ratios >= 1/3.
        gain = predicted / sum(term * term for term in terms)
        for index, term in enumerate(terms):
            self.coefficients[index] *= 1 + rate * (ratio - 1) * term * gain


class StepBudget:
    """Decides how much prefill fits in a step, and learns from how long steps took."""

    def __init__(
        self, config: SchedulerConfig, block_size: int, calibration: Calibration | None = None
    ) -> None:
        start = calibration or Calibration()
        self.max_tokens = config.max_num_batched_tokens or MAX_TOKENS
        self._block_size = block_size
        self._step_seconds = config.step_time_ms and config.step_time_ms / 1000
        self._decode = _Linear(start.step, start.per_sequence, start.per_context)
        self._prefill = _Linear(start.per_token, start.per_pair)

    def decode_seconds(self, sequences: int, context: int) -> float:
        """Predicted time of a step that decodes ``sequences`` with ``context`` positions in all."""
        return self._decode(1, sequences, context)

    def prefill_seconds(self, start: int, count: int) -> float:
        """Predicted extra time of ``count`` prompt tokens, the first at position ``start``."""
        return self._prefill(count, attention_pairs(start, count))

    def allowance(self, sequences: int, context: int) -> float:
        """Seconds of prefill that may go with a step while so many sequences decode.

        Negative where the decodes alone take longer than they should.
        """
        decode = self.decode_seconds(sequences, context)
        if not sequences:
            return IDLE_SECONDS - decode
        if self._step_seconds is not None:
            return self._step_seconds - decode
        return max(GAP * decode, min(FLOOR_SECONDS, FLOOR_GAP * decode)) - decode

    def chunk(self, seconds: float, start: int, wanted: int, tokens_left: int) -> int:
        """Prompt tokens from position ``start`` on that fit in ``seconds`` and ``tokens_left``.

        A chunk above one block ends at a block's border, unless it ends the prompt. 0 where not
        even a block (or all of ``wanted``) fits.
        """
        per_token, per_pair = self._prefill.coefficients
        # count * per_token + per_pair * (start * count + count² / 2) = seconds
        linear = per_token + per_pair * (start + 0.5)
        limit = (
            2 * seconds / (linear + math.sqrt(linear * linear + 2 * per_pair * seconds))
            if seconds > 0
            else 0.0
        )
        count = min(wanted, tokens_left, int(limit))
        if count == wanted:
            return count
        size = self._block_size
        if count > size:
            count = (start + count) // size * size - start
        return count if count >= min(size, tokens_left) else 0

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step."""
        if seconds <= 0:
            return
        if not work.prefill_tokens:
            if work.decodes:
                self._decode.learn(seconds, 1, work.decodes, work.context)
            return
        rest = seconds - self.decode_seconds(work.decodes, work.context)
        self._prefill.learn(max(rest, 0.0), work.prefill_tokens, work.attention)


def attention_pairs(start: int, count: int) -> int:
    """Pairs of one of ``count`` tokens from position ``start`` and a position that it sees."""
    return count * start + count * (count + 1) // 2
