"""The noise of docs/sampling.md: its test vectors, and that it is random enough to sample with."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pippin.backends.noise import (
    gumbel,
    mix,
    noise_bits,
    position_keys,
    stream_keys,
    token_table,
)

# (seed, choice, position): keys, then bits and noise of tokens 0, 1 and 49,151.
VECTORS = {
    (0, 0, 0): (
        (0x736416E5, 0x7DAF664A),
        (0x8D1500E0, 0xD635D9FC, 0xC517A2C6),
        (0.22195, -0.59472, -0.38472),
    ),
    (0, 0, 1): (
        (0x2894197C, 0x3E05CFD4),
        (0x264CA64F, 0x91676FD9, 0x80E9405B),
        (1.81981, 0.17519, 0.35626),
    ),
    (0, 1, 0): (
        (0x9C2C7AEA, 0x8F8CB5F9),
        (0xD8CF01BF, 0xB987431C, 0x49F2934F),
        (-0.62953, -0.25462, 1.07622),
    ),
    (1, 0, 0): (
        (0x9543891B, 0xF84C3612),
        (0x21049271, 0xF02A3936, 0x5229FCDA),
        (1.97988, -1.02351, 0.94916),
    ),
    (-1, 0, 7): (
        (0x21AF7096, 0x426C137E),
        (0xFA021121, 0x83FA0CCA, 0x672C1A78),
        (-1.32303, 0.32199, 0.66191),
    ),
    (2**63 - 1, 5, 131071): (
        (0x25DF4563, 0xB18B3673),
        (0x4BCBF942, 0x79B597D4, 0xC98DD5BF),
        (1.04671, 0.43824, -0.43694),
    ),
    (-(2**63), 127, 42): (
        (0xD12BDF31, 0x64714356),
        (0x3B555E40, 0x86651CC9, 0x1EF7D1B5),
        (1.33307, 0.29518, 2.04845),
    ),
    (1234567890123, 0, 128): (
        (0xFF70D00F, 0x145F2853),
        (0xB130B17B, 0xD85B0FC1, 0xF3AAB013),
        (-0.16394, -0.62338, -1.10951),
    ),
}


def keys(seed: int, choice: int, position: int) -> np.ndarray:
    return position_keys(stream_keys(seed, choice)[None], [position])


def many_keys(seeds: range, choices: range, positions: range) -> np.ndarray:
    return np.concatenate(
        [
            position_keys(np.repeat(stream_keys(seed, choice)[None], len(positions), 0), positions)
            for seed in seeds
            for choice in choices
        ]
    )


def z_score(counts: np.ndarray) -> float:
    """Chi-square of counts that should be equal, as standard deviations from its mean."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return float((chi_square - freedom) / math.sqrt(2 * freedom))


def joint(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Counts of the pairs of leading four bits."""
    return np.bincount(((a >> 28) * 16 + (b >> 28)).ravel().astype(np.int64), minlength=256)


@pytest.mark.parametrize(("stream", "vector"), VECTORS.items(), ids=str)
def test_vectors(
    stream: tuple[int, int, int],
    vector: tuple[tuple[int, int], tuple[int, ...], tuple[float, ...]],
) -> None:
    expected_keys, expected_bits, expected_noise = vector
    row = keys(*stream)
    assert tuple(row[0].tolist()) == expected_keys
    bits = noise_bits(row, token_table(49_152)[[0, 1, 49_151]])
    assert tuple(bits[0].tolist()) == expected_bits
    assert gumbel(bits).dtype == np.float32
    assert gumbel(bits)[0] == pytest.approx(expected_noise, abs=6e-6)


def test_mix_and_table_vectors() -> None:
    words = np.array([0, 1, 2, 0xDEADBEEF, 0xFFFFFFFF], dtype=np.uint32)
    assert mix(words).tolist() == [0, 0x688990C0, 0xD1132181, 0xE628C683, 0x6768824A]
    table = token_table(49_152)[[0, 1, 2, 17, 49_151]]
    assert table.tolist() == [0x01FCE552, 0x9F505634, 0x079F4ECE, 0x5D20BCEF, 0x653924CE]


def test_noise_at_the_ends() -> None:
    bits = np.array([0, 1, 2, 0xFFFFFF00, 0xFFFFFFFF], dtype=np.uint32)
    noise = gumbel(bits)
    assert noise == pytest.approx([22.18071, 22.18071, 21.48756, -2.81154, -2.81154], abs=1e-5)


def integers(seed: int, choice: int, position: int, token: int) -> int:
    """The specification in plain integers, word by word."""
    low = 0xFFFFFFFF

    def mix32(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & low
        x ^= x >> 15
        x = x * 0x846CA68B & low
        return x ^ x >> 16

    first, second = 0x243F6A88, 0x85A308D3
    for word in (seed & low, seed >> 32 & low, choice, position):
        first, second = mix32(first ^ word), mix32(second ^ word)
    x = mix32(token + 0x9E3779B9 & low) ^ first
    x = x * 0x7FEB352D & low
    x ^= x >> 15
    return x * 0x846CA68B + second & low


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 127),
    st.integers(0, 2**31),
    st.integers(0, 9_999),
)
def test_equals_plain_integers(seed: int, choice: int, position: int, token: int) -> None:
    bits = noise_bits(keys(seed, choice, position), token_table(10_000)[token : token + 1])
    assert int(bits[0, 0]) == integers(seed, choice, position, token)


def test_a_row_does_not_depend_on_the_others() -> None:
    batch = many_keys(range(5), range(3), range(4))
    table = token_table(100)
    together = noise_bits(batch, table)
    for row in (0, 17, 59):
        assert np.array_equal(together[row : row + 1], noise_bits(batch[row : row + 1], table))
    some = np.array([[3, 99, 4]] * len(batch))
    assert np.array_equal(noise_bits(batch, table[some]), together[:, [3, 99, 4]])


def test_uniform_within_and_across_rows() -> None:
    table = token_table(49_152)
    scores = []
    for seed in range(40):
        bits = noise_bits(many_keys(range(seed, seed + 1), range(1), range(100, 102)), table)
        scores.append(z_score(np.bincount(bits[0] >> 23, minlength=512)))
        scores.append(z_score(joint(bits[0], bits[1])))  # the next position
        scores.append(z_score(joint(bits[0, 1:], bits[0, :-1])))  # the next token
    assert max(scores) < 5
    assert abs(np.mean(scores)) < 0.5


@pytest.mark.parametrize(
    "related",
    [
        many_keys(range(-500, 500), range(1), range(1)),
        many_keys(range(1), range(1000), range(1)),
        many_keys(range(1), range(1), range(1000)),
        position_keys(np.stack([stream_keys(seed << 32, 0) for seed in range(1000)]), [9]),
    ],
    ids=["seeds", "choices", "positions", "high-words"],
)
def test_neighbours_are_independent(related: np.ndarray) -> None:
    assert len(np.unique(related, axis=0)) == 1000
    bits = noise_bits(related, token_table(2048))
    assert abs(z_score(np.bincount(bits.ravel() >> 24, minlength=256))) < 5
    assert abs(z_score(joint(bits[1:], bits[:-1]))) < 5


def test_pairs_of_tokens_are_independent() -> None:
    rows = many_keys(range(20), range(1), range(10_000))
    table = token_table(49_152)
    rng = np.random.default_rng(0)
    pairs = [(0, 1), (1, 2), (0, 49_151), (100, 101), *rng.integers(0, 49_152, (12, 2)).tolist()]
    for pair in pairs:
        bits = noise_bits(rows, table[list(pair)])
        for shift in (0, 4, 12, 20):  # all but the lowest eight bits
            moved = bits << np.uint32(shift)
            assert z_score(joint(moved[:, 0], moved[:, 1])) < 5, (pair, shift)


def test_smallest_of_a_row_is_exponential() -> None:
    """The tail that decides which of many unlikely tokens is drawn."""
    rows = many_keys(range(3), range(1), range(500))
    bits = noise_bits(rows, token_table(49_152)[:16_384])
    smallest = bits.min(1) * (16_384 / 2**32)
    assert smallest.mean() == pytest.approx(1, abs=4 / math.sqrt(1500))
    ordered = np.sort(1 - np.exp(-smallest))
    gap = np.abs(ordered - np.arange(1, 1501) / 1500).max() * math.sqrt(1500)
    assert gap < 1.95  # Kolmogorov-Smirnov, one in a thousand
    assert abs(z_score(np.bincount(bits.argmin(1) // 1024, minlength=16))) < 5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_gumbel_max_samples_the_softmax(temperature: float) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, 50).astype(np.float32)
    chances = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    rows = many_keys(range(40), range(2), range(1000))
    noise = gumbel(noise_bits(rows, token_table(50)))
    drawn = np.bincount((logits / np.float32(temperature) + noise).argmax(1), minlength=50)
    expected = chances * len(rows)
    frequent = expected >= 5
    chi_square = ((drawn - expected) ** 2 / expected)[frequent].sum()
    freedom = frequent.sum() - 1
    assert (chi_square - freedom) / math.sqrt(2 * freedom) < 4
