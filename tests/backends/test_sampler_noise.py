"""Torch evaluates the noise of docs/sampling.md bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from pippin.backends import noise
from pippin.backends.torch import noise as torch_noise


def _keys(rows: int) -> np.ndarray:
    streams = np.stack([noise.stream_keys(seed * 7919 - 3, seed % 3) for seed in range(rows)])
    return noise.position_keys(streams, [position * 97 for position in range(rows)])


def test_same_bits_for_all_tokens() -> None:
    table, keys = noise.token_table(50_001), _keys(40)
    expected = noise.noise_bits(keys, table)
    bits = torch_noise.noise_bits(
        torch.from_numpy(table.view(np.int32)), torch.from_numpy(keys.view(np.int32))
    )
    assert np.array_equal(bits.numpy().astype(np.int64) + 2**31, expected.astype(np.int64))
    assert np.allclose(
        -torch_noise.log_exponential(bits).numpy(), noise.gumbel(expected), rtol=0, atol=4e-6
    )


def test_same_bits_for_chosen_tokens_into_given_arrays() -> None:
    table, keys = noise.token_table(1000), _keys(5)
    ids = np.random.default_rng(0).integers(0, 1000, (5, 77))
    out, scratch = torch.empty((2, 5, 77), dtype=torch.int32)
    bits = torch_noise.noise_bits(
        torch.from_numpy(table.view(np.int32))[torch.from_numpy(ids)],
        torch.from_numpy(keys.view(np.int32)),
        out,
        scratch,
    )
    assert bits.data_ptr() == out.data_ptr()
    expected = noise.noise_bits(keys, table[ids]).astype(np.int64)
    assert np.array_equal(bits.numpy().astype(np.int64) + 2**31, expected)


def test_noise_falls_with_the_bits() -> None:
    """The order that the sampler's bounds rely on, up to its slack."""
    bits = torch.arange(-(2**31), 2**31, 30_011, dtype=torch.int64).to(torch.int32)
    values = -torch_noise.log_exponential(bits)
    assert (values[1:] - values[:-1]).max() <= 1e-5
    assert values.isfinite().all()
    ends = -torch_noise.log_exponential(torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32))
    assert ends[0] > 22.1
    assert -2.83 < ends[1] < -2.81
