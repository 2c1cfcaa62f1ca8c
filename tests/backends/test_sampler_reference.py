"""The torch sampler against a slow and obvious one that follows docs/sampling.md word by word."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pippin.backends.base import SampleRow, SamplingState
from pippin.backends.noise import gumbel, noise_bits, position_keys, stream_keys, token_table
from pippin.backends.torch.sampler import TorchSampler
from pippin.types.request import SamplingParams


@dataclass
class Case:
    state: SamplingState
    output: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        return len(self.state.prompt_token_ids) + len(self.output)


def edited(case: Case, logits: np.ndarray) -> np.ndarray:
    """Masks, bias and penalties: steps 1 to 5 of the specification."""
    params = case.state.params
    x = logits.astype(np.float32)
    vocab = set(range(len(x)))
    allowed = vocab if params.allowed_token_ids is None else set(params.allowed_token_ids)
    history = list(case.output)
    bad = set()
    for word in case.state.bad_words_token_ids:
        prefix = list(word[:-1])
        if history[len(history) - len(prefix) :] == prefix and len(prefix) <= len(history):
            bad.add(word[-1])
    early = set(case.state.stop_token_ids) if len(case.output) < params.min_tokens else set()
    banned = bad | early
    if allowed <= banned:
        banned = bad
    if allowed <= banned:
        banned = set()
    left = sorted(allowed - banned)
    mask = np.full(len(x), -np.inf, dtype=np.float32)
    mask[left] = 0.0
    x += mask
    for token, bias in (params.logit_bias or {}).items():
        x[token] += np.float32(bias)
    for token in vocab:
        generated = case.output.count(token)
        if generated or token in case.state.prompt_token_ids:
            penalty = np.float32(params.repetition_penalty)
            x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
        x[token] -= np.float32(params.frequency_penalty) * np.float32(generated)
        x[token] -= np.float32(params.presence_penalty) * np.float32(generated > 0)
    return x if x.max() > -np.inf else mask


def acceptable(case: Case, logits: np.ndarray) -> set[int]:
    """Tokens that may be sampled: one, or several where float32 rounding decides between them."""
    params = case.state.params
    x = edited(case, logits)
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if params.temperature < 1e-5 or params.min_p >= 1.0:
        return {order[0]}
    scores = (x - x.max()) / np.float32(params.temperature)
    key = position_keys(stream_keys(case.state.seed, case.state.choice)[None], [case.position])
    sums = scores + gumbel(noise_bits(key, token_table(len(x))))[0]
    weights = np.exp(scores.astype(np.float64))
    tokens = set()
    for shift in (-1e-5, 0.0, 1e-5):
        kept = order
        if params.min_p > 0:
            least = math.log(params.min_p) + shift * 10
            kept = [token for token in kept if scores[token] >= least]
        if params.top_k > 0:
            kept = kept[: params.top_k]
        if params.top_p < 1:
            before = np.cumsum(weights[kept]) - weights[kept]
            total = weights[kept].sum()
            kept = [
                token
                for i, token in enumerate(kept)
                if i == 0 or before[i] < (params.top_p + shift) * total
            ]
        best = max(sums[kept or order[:1]])
        tokens |= {token for token in kept or order[:1] if sums[token] > best - 1e-5}
    return tokens


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Rows this small are faster on one thread, above all when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@st.composite
def states(draw: st.DrawFn, vocab: int) -> SamplingState:
    token = st.integers(0, vocab - 1)
    tokens = st.lists(token, max_size=12)
    maybe = lambda values, default: draw(st.one_of(st.just(default), values))  # noqa: E731
    params = SamplingParams(
        temperature=maybe(st.sampled_from([0.0, 1e-6, 1e-3, 0.3, 0.7, 1.5, 5.0, 1e6]), 1.0),
        top_p=maybe(st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999]), 1.0),
        top_k=maybe(st.sampled_from([-1, 1, 2, 5, 40, 513, 700, vocab, vocab + 9]), 0),
        min_p=maybe(st.sampled_from([1e-4, 0.05, 0.3, 1.0]), 0.0),
        repetition_penalty=maybe(st.sampled_from([0.5, 1.3, 3.0]), 1.0),
        presence_penalty=maybe(st.sampled_from([-2.0, 0.7]), 0.0),
        frequency_penalty=maybe(st.sampled_from([-0.5, 1.1]), 0.0),
        logit_bias=maybe(st.dictionaries(token, st.sampled_from([-100.0, -1.0, 4.0])), None),
        allowed_token_ids=maybe(st.lists(token, min_size=1, max_size=20).map(tuple), None),
        min_tokens=maybe(st.integers(1, 6), 0),
        max_tokens=None,
    )
    words = st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=6)
    return SamplingState(
        params=params,
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        choice=draw(st.integers(0, 127)),
        prompt_token_ids=draw(st.lists(token, min_size=1, max_size=12)),
        output_token_ids=draw(tokens),
        stop_token_ids=frozenset(draw(st.lists(token, max_size=3))),
        bad_words_token_ids=tuple(maybe(words, [])),
    )


def make_logits(kind: str, rows: int, vocab: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    match kind:
        case "flat":
            x *= 0.01
        case "ties":
            x = np.round(x)
        case "holes":
            x[rng.random(x.shape) < 0.9] = -np.inf
            x[:, rng.integers(vocab)] = 0.0
        case "bfloat16":
            x = torch.from_numpy(x).bfloat16().float().numpy()
    return x


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_equals_the_reference(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([1, 2, 15, 16, 17, 100, 257, 2000]))
    cases = [
        Case(state, list(state.output_token_ids))
        for state in data.draw(st.lists(states(vocab), min_size=1, max_size=5))
    ]
    sampler = TorchSampler(vocab, torch.device("cpu"))
    for seq, case in enumerate(cases):
        sampler.add(seq, case.state)
    kind = data.draw(st.sampled_from(["normal", "flat", "ties", "holes", "bfloat16"]))
    seed = data.draw(st.integers(0, 2**16))
    for step in range(3):
        logits = make_logits(kind, len(cases), vocab, seed + step)
        rows = [SampleRow(seq, seq, case.position) for seq, case in enumerate(cases)]
        sampled = sampler.sample(torch.from_numpy(logits.copy()), rows)
        for case, line, token in zip(cases, logits, sampled, strict=True):
            assert token.token_id in acceptable(case, line)
            case.output.append(token.token_id)
