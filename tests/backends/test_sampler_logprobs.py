"""Log probabilities, and logits that are not numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sampler_kit import DEVICES, VARIED, VOCAB, logits, sample_one, state

from pippin.backends.base import SampleRow
from pippin.backends.torch.sampler import TorchSampler
from pippin.types.request import Logprobs


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Rows this small are faster on one thread, above all when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.mark.parametrize("params", VARIED, ids=str)
def test_broken_logits_do_not_hurt_other_rows(params: dict[str, Any], device: torch.device) -> None:
    whole = state(seed=1, temperature=0.8, top_p=0.9)
    broken = state(seed=2, **params)
    lines = logits(5)
    lines[1, 8] = torch.nan
    lines[2] = -torch.inf
    lines[3] = torch.nan
    lines[4, [6, 9]] = torch.inf
    sampler = TorchSampler(VOCAB, device)
    for seq in range(5):
        sampler.add(seq, broken if seq else whole)
    rows = [SampleRow(row, row, 3) for row in range(5)]
    sampled = sampler.sample(lines.clone().to(device), rows)
    assert sampled[0] == sample_one(device, whole, lines[0])
    for token in sampled:
        assert 0 <= token.token_id < VOCAB
        if broken.params.allowed_token_ids is not None and token is not sampled[0]:
            assert token.token_id in broken.params.allowed_token_ids
        if token.logprobs is not None:
            assert all(-9999.0 <= p <= 0 for p in token.logprobs.logprobs)
    assert sampled[1].token_id != 8
    if broken.params.logit_bias is None and broken.params.allowed_token_ids is None:
        assert sampled[4].token_id in (6, 9)


def test_not_a_number_is_never_drawn(device: torch.device) -> None:
    line = torch.full((VOCAB,), -90.0)
    line[[3, 400]] = torch.nan
    line[7] = -50.0
    for temperature in (0.0, 1.0):
        assert sample_one(device, state(temperature=temperature), line).token_id == 7


def test_a_row_without_hope_keeps_its_masks(device: torch.device) -> None:
    words = ((5,), (6,))
    one = {"allowed_token_ids": (5, 6, 7), "bad_words": words, "temperature": 0.0}
    assert sample_one(device, state(**one), torch.full((VOCAB,), -torch.inf)).token_id == 7
    assert sample_one(device, state(**one), torch.full((VOCAB,), torch.nan)).token_id == 7


def test_broken_logits_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    sampler = TorchSampler(VOCAB, torch.device("cpu"))
    sampler.add(0, state())
    for position in range(3):
        sampler.sample(torch.full((1, VOCAB), torch.nan), [SampleRow(0, 0, position)])
    assert len(caplog.records) == 1


def expected_logprobs(line: torch.Tensor, token: int, top: int) -> Logprobs:
    values = line.double().log_softmax(-1)
    best = sorted(range(len(line)), key=lambda t: (-float(line[t]), t))[:top]
    ids = [token, *best]
    return Logprobs(ids, [float(values[t]) for t in ids], 1 + int((line > line[token]).sum()))


def assert_close(actual: Logprobs | None, expected: Logprobs) -> None:
    assert actual is not None
    assert (actual.token_ids, actual.rank) == (expected.token_ids, expected.rank)
    assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_logprobs_are_those_of_the_raw_logits(device: torch.device) -> None:
    lines = logits(4)
    edits = {"logit_bias": {3: 50.0}, "temperature": 0.3, "presence_penalty": 1.0, "seed": 3}
    sampler = TorchSampler(VOCAB, device)
    sampler.add(0, state(logprobs=5, **edits))
    sampler.add(1, state(top_p=0.9))
    sampler.add(2, state(logprobs=0, seed=1))
    sampler.add(3, state(logprobs=20, allowed_token_ids=(8,)))
    sampled = sampler.sample(lines.clone().to(device), [SampleRow(i, i, 3) for i in range(4)])
    assert sampled[0].token_id == 3
    assert sampled[1].logprobs is None
    for row, top in ((0, 5), (2, 0), (3, 20)):
        assert_close(
            sampled[row].logprobs, expected_logprobs(lines[row], sampled[row].token_id, top)
        )


def test_logprobs_when_every_row_is_edited(device: torch.device) -> None:
    lines = logits(2)
    sampler = TorchSampler(VOCAB, device)
    for seq in range(2):
        sampler.add(seq, state(logprobs=2, temperature=0.0, logit_bias={40 + seq: 90.0}))
    sampled = sampler.sample(lines.clone().to(device), [SampleRow(i, i, 3) for i in range(2)])
    for row in range(2):
        assert_close(sampled[row].logprobs, expected_logprobs(lines[row], 40 + row, 2))


def test_logprobs_of_a_small_vocabulary(device: torch.device) -> None:
    line = torch.tensor([0.5, -torch.inf, 0.5])
    token = sample_one(device, state(logprobs=20, temperature=0.0), line)
    assert_close(
        token.logprobs,
        Logprobs([0, 0, 2, 1], [-np.log(2), -np.log(2), -np.log(2), -9999.0], rank=1),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [VOCAB, 70_000])
def test_prompt_logprobs(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    rows = 50  # more than are worked on at once at the larger size
    lines = logits(rows + 3, vocab=vocab).to(dtype)
    targets = [(row * 7919) % vocab for row in range(rows)]
    sampler = TorchSampler(vocab, device)
    before = lines.clone().to(device)
    reports = sampler.prompt_logprobs(before, 2, targets, 4)
    assert torch.equal(before.cpu(), lines)
    assert len(reports) == rows
    for row in (0, 1, 30, 49):
        assert_close(reports[row], expected_logprobs(lines[2 + row].float(), targets[row], 4))
    assert sampler.prompt_logprobs(before, 2, [], 4) == []
    assert_close(
        sampler.prompt_logprobs(before, 5, [9], 0)[0], expected_logprobs(lines[5].float(), 9, 0)
    )


def test_more_rows_than_are_worked_on_at_once() -> None:
    vocab = 70_000
    device = torch.device("cpu")
    lines = logits(35, vocab=vocab)
    sampler = TorchSampler(vocab, device)
    states = [state(seed=row, top_p=0.9, logprobs=1) for row in range(35)]
    for seq, one in enumerate(states):
        sampler.add(seq, one)
    sampled = sampler.sample(lines.clone(), [SampleRow(row, row, 3) for row in range(35)])
    for row in (0, 28, 29, 30, 34):
        alone = sample_one(device, states[row], lines[row])
        assert sampled[row].token_id == alone.token_id
        assert_close(sampled[row].logprobs, expected_logprobs(lines[row], alone.token_id, 1))
