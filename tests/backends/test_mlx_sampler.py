"""The MLX sampler against torch's: the same noise to the bit, the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_tiny import make_reference

from pippin.backends import noise
from pippin.backends.base import SampledToken, SampleRow, SamplingState
from pippin.backends.mlx import noise as mlx_noise
from pippin.backends.mlx.sampler import MlxSampler
from pippin.backends.torch.sampler import TorchSampler
from pippin.config import CacheConfig, Config, ModelConfig
from pippin.engine import core
from pippin.types.request import Request, SamplingParams

VOCAB = 1009
CPU = torch.device("cpu")


def test_noise_has_the_same_bits() -> None:
    keys = noise.position_keys(
        np.stack([noise.stream_keys(seed, choice) for seed in (0, -1, 2**40) for choice in (0, 3)]),
        [0, 1, 7, 4000, 2**20, 5],
    )
    table = noise.token_table(VOCAB)
    bits = mlx_noise.noise_bits(mx.array(table), mx.array(keys))
    assert np.array_equal(np.array(bits), noise.noise_bits(keys, table))
    np.testing.assert_allclose(
        np.array(mlx_noise.gumbel(bits)), noise.gumbel(np.array(bits)), atol=2e-6, rtol=2e-6
    )


def test_noise_is_finite_at_its_ends() -> None:
    bits = np.array([0, 1, 2**32 - 1, 2**31], dtype=np.uint32)
    values = np.array(mlx_noise.gumbel(mx.array(bits)))
    assert np.isfinite(values).all()
    np.testing.assert_allclose(values, noise.gumbel(bits), atol=2e-6)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 40, 700, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.sampled_from([None, {3: 5.0, 700: -100.0}]),
    allowed_token_ids=st.sampled_from([None, (1, 2, 3, 500)]),
    min_tokens=st.sampled_from([0, 4]),
    max_tokens=st.just(16),
    logprobs=st.sampled_from([None, 0, 4]),
)


def run(
    sampler: Any, rows: list[tuple[SamplingParams, int]], put: Callable[[Any], Any], spread: float
) -> list[list[SampledToken]]:
    """Four steps of random logits."""
    for seq, (params, seed) in enumerate(rows):
        state = SamplingState(
            params, seed, seq % 3, [5, 6, 7], [8], frozenset({2}), ((9,), (8, 10))
        )
        sampler.add(seq, state)
    source = np.random.default_rng(7)
    steps = []
    for step in range(4):
        logits = (source.standard_normal((len(rows), VOCAB)) * spread).astype(np.float32)
        order = [SampleRow(len(rows) - 1 - i, i, 4 + step) for i in range(len(rows))]
        steps.append(sampler.sample(put(logits), order))
    return steps


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(PARAMS, st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=6),
    st.sampled_from([1.0, 4.0]),
)
def test_tokens_are_torchs(rows: list[tuple[SamplingParams, int]], spread: float) -> None:
    ours = run(MlxSampler(VOCAB), rows, mx.array, spread)
    wanted = run(TorchSampler(VOCAB, CPU), rows, torch.from_numpy, spread)
    for own, other in zip(ours, wanted, strict=True):
        assert [token.token_id for token in own] == [token.token_id for token in other]
        for a, b in zip(own, other, strict=True):
            assert (a.logprobs is None) == (b.logprobs is None)
            if a.logprobs is not None and b.logprobs is not None:
                assert a.logprobs.token_ids == b.logprobs.token_ids
                assert a.logprobs.rank == b.logprobs.rank
                np.testing.assert_allclose(a.logprobs.logprobs, b.logprobs.logprobs, atol=1e-4)


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros((2, VOCAB), dtype=np.float32)
    logits[:, [40, 600]] = 3.0
    rows = [
        (SamplingParams(temperature=0, logprobs=2), 0),
        (SamplingParams(temperature=1, top_k=1, logprobs=2), 0),
    ]
    sampler = MlxSampler(VOCAB)
    for seq, (params, seed) in enumerate(rows):
        sampler.add(seq, SamplingState(params, seed, 0, [1], [], frozenset()))
    sampled = sampler.sample(mx.array(logits), [SampleRow(0, 0, 1), SampleRow(1, 1, 1)])
    assert [token.token_id for token in sampled] == [40, 40]
    assert [token.logprobs.token_ids for token in sampled if token.logprobs] == [[40, 40, 600]] * 2


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_logits_still_give_a_token(value: float) -> None:
    params = SamplingParams(temperature=1, allowed_token_ids=(3, 4), logprobs=1)
    both: list[Any] = [MlxSampler(VOCAB), TorchSampler(VOCAB, CPU)]
    tokens = []
    for sampler, put in zip(both, (mx.array, torch.from_numpy), strict=True):
        sampler.add(0, SamplingState(params, 5, 0, [1], [], frozenset()))
        logits = np.full((1, VOCAB), value, dtype=np.float32)
        (token,) = sampler.sample(put(logits), [SampleRow(0, 0, 1)])
        assert all(np.isfinite(token.logprobs.logprobs))
        tokens.append(token.token_id)
    assert tokens[0] == tokens[1]
    assert tokens[0] in (3, 4)


def test_prompt_logprobs_are_torchs() -> None:
    logits = np.random.default_rng(1).standard_normal((5, VOCAB)).astype(np.float32)
    own = MlxSampler(VOCAB).prompt_logprobs(mx.array(logits), 1, [3, 4, 5], 2)
    wanted = TorchSampler(VOCAB, CPU).prompt_logprobs(torch.from_numpy(logits), 1, [3, 4, 5], 2)
    for a, b in zip(own, wanted, strict=True):
        assert (a.token_ids, a.rank) == (b.token_ids, b.rank)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def generate(backend: str, path: Path) -> dict[str, list[int]]:
    """Requests with all kinds of parameters on a tiny model, through the whole engine."""
    model = ModelConfig(model=str(path), backend=backend, device="cpu", dtype="float32")
    engine = core.load(Config(model=model, cache=CacheConfig(kv_cache_bytes=1 << 20)))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 5},
        {"temperature": 1.0, "min_p": 0.1, "presence_penalty": 0.5},
        {"temperature": 0.7, "repetition_penalty": 1.2, "top_k": 40, "top_p": 0.95},
    ]
    for index, kind in enumerate(kinds):
        engine.add(
            Request(
                request_id=str(index),
                prompt_token_ids=[3 + index, 50, 60][: 1 + index % 3] * (1 + 5 * index),
                params=SamplingParams(max_tokens=24, ignore_eos=True, **kind),
                seed=1000 + index,
                max_tokens=24,
            )
        )
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert engine.ready.backend == backend
    engine.close()
    return tokens


@pytest.mark.parametrize(("kind", "changes"), [("llama", {}), ("gemma3_text", {"head_dim": 16})])
def test_a_seed_gives_the_same_tokens_on_both_backends(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    make_reference(kind, {"initializer_range": 0.1, **changes}).save_pretrained(tmp_path)
    own, wanted = generate("mlx", tmp_path), generate("torch", tmp_path)
    assert all(len(tokens) == 24 for tokens in own.values())
    assert own == wanted
