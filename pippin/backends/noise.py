"""The sampling noise: a specified function of (seed, choice, position, token), in numpy.

Every backend draws a token as ``argmax(logit / temperature + gumbel)``. The noise belongs to the
request and not to the batch, so a stream gives the same tokens alone, in any batch, after
preemption and on another replica or backend. ``docs/sampling.md`` is the specification with test
vectors; this file is its reference implementation, and backends evaluate the same integers with
their own arrays (32-bit wrap-around arithmetic, so ``int32`` serves as well as ``uint32``).

The mixing function is Chris Wellons' ``lowbias32``: https://nullprogram.com/blog/2018/07/31/
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

UInt32 = npt.NDArray[np.uint32]

MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B
TOKEN_OFFSET = 0x9E3779B9
#: Starting values of the two halves of a key (first bits of pi).
KEY_START = (0x243F6A88, 0x85A308D3)

#: ``u`` is kept inside these, so that the noise is finite: it lies in [-2.82, 22.19].
SMALLEST_U = 2.0**-32
LARGEST_U = 1.0 - 2.0**-24


def mix(x: UInt32) -> UInt32:
    """``lowbias32``: a bijection of 32-bit integers that changes half the bits. Element-wise."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(MULTIPLIER_1)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(MULTIPLIER_2)
    return x ^ (x >> np.uint32(16))


def token_table(vocab_size: int) -> UInt32:
    """``T[t] = mix(t + TOKEN_OFFSET)`` for every token id: made once per model. [vocab_size]."""
    return mix(np.arange(vocab_size, dtype=np.uint32) + np.uint32(TOKEN_OFFSET))


def stream_keys(seed: int, choice: int) -> UInt32:
    """The part of the key that stays the same for a whole sequence. [2].

    ``seed``: any 64-bit integer, negative ones in two's complement.
    """
    key = np.array(KEY_START, dtype=np.uint32)
    for word in (seed, seed >> 32, choice):
        key = mix(key ^ np.uint32(word & 0xFFFFFFFF))
    return key


def position_keys(streams: UInt32, positions: Sequence[int] | npt.NDArray[np.int64]) -> UInt32:
    """Keys of rows. ``streams`` [rows, 2], ``positions`` [rows], absolute -> [rows, 2]."""
    words = (np.asarray(positions, dtype=np.int64) & 0xFFFFFFFF).astype(np.uint32)
    return mix(streams ^ words[:, None])


def noise_bits(keys: UInt32, table: UInt32) -> UInt32:
    """32 random bits for every row and token, exact on every backend.

    This is ``mix`` of ``token ^ key`` with a second key, less the parts that cost time and not
    quality. Its first shift, linear over ``^``, is already in the table and the keys; its last one
    would only better the lowest eight bits, which refine the noise by
    less than 2**-24.

    ``keys`` [rows, 2]; ``table`` [tokens] (any selection of ``token_table``) or [rows, tokens].
    -> [rows, tokens].
    """
    x = table ^ keys[:, :1]
    x = x * np.uint32(MULTIPLIER_1)
    x = x ^ (x >> np.uint32(15))
    return x * np.uint32(MULTIPLIER_2) + keys[:, 1:]


def gumbel(bits: UInt32) -> npt.NDArray[np.float32]:
    """Standard Gumbel noise from ``noise_bits``, float32 of the same shape. Falls with the bits."""
    u = (bits >> np.uint32(1)).astype(np.float32) * np.float32(2.0**-31)
    u = np.clip(u, np.float32(SMALLEST_U), np.float32(LARGEST_U))
    noise: npt.NDArray[np.float32] = -np.log(-np.log1p(-u))
    return noise
