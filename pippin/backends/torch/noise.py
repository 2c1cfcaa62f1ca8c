"""The noise of ``backends.noise`` in torch: the same bits, from int32 arithmetic that wraps."""

from __future__ import annotations

import torch
from torch import Tensor

from pippin.backends.noise import LARGEST_U, MULTIPLIER_1, MULTIPLIER_2, SMALLEST_U


def noise_bits(
    table: Tensor, keys: Tensor, out: Tensor | None = None, scratch: Tensor | None = None
) -> Tensor:
    """``noise.noise_bits`` less 2**31: in the same order, but signed.

    ``table`` [tokens] or [rows, tokens], ``keys`` [rows, 2], all int32. ``out`` and ``scratch``,
    int32 [rows, tokens], save large allocations.
    """
    x = torch.bitwise_xor(table, keys[:, :1], out=out)
    x *= _signed(MULTIPLIER_1)
    shifted = torch.bitwise_right_shift(x, 15, out=scratch)
    x ^= shifted.bitwise_and_(0x1FFFF)
    return torch.add(keys[:, 1:] ^ -(2**31), x, alpha=_signed(MULTIPLIER_2), out=x)


def log_exponential(bits: Tensor) -> Tensor:
    """The noise with its sign turned, ``-noise.gumbel``: float32 of the same shape.

    (The noise is minus the logarithm of an exponentially distributed number.)
    """
    u = (bits >> 1).add_(2**30).float()
    return u.mul_(-(2.0**-31)).clamp_(-LARGEST_U, -SMALLEST_U).log1p_().neg_().log_()


def _signed(value: int) -> int:
    """The int32 with the same bits."""
    return value - 2**32 if value >= 2**31 else value
