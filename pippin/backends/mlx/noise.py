"""The noise of ``backends.noise`` in MLX: the same bits, from uint32 arithmetic that wraps."""

from __future__ import annotations

import mlx.core as mx

from pippin.backends.noise import LARGEST_U, MULTIPLIER_1, MULTIPLIER_2, SMALLEST_U


def noise_bits(table: mx.array, keys: mx.array) -> mx.array:
    """``noise.noise_bits``: ``table`` [tokens] or [rows, tokens], ``keys`` [rows, 2], uint32."""
    x = mx.bitwise_xor(table, keys[:, :1])
    x = x * mx.array(MULTIPLIER_1, dtype=mx.uint32)
    x = mx.bitwise_xor(x, mx.right_shift(x, mx.array(15, dtype=mx.uint32)))
    return x * mx.array(MULTIPLIER_2, dtype=mx.uint32) + keys[:, 1:]


def gumbel(bits: mx.array) -> mx.array:
    """``noise.gumbel``: float32 of the same shape."""
    u = mx.right_shift(bits, mx.array(1, dtype=mx.uint32)).astype(mx.float32) * (2.0**-31)
    return -mx.log(-mx.log1p(-mx.clip(u, SMALLEST_U, LARGEST_U)))
