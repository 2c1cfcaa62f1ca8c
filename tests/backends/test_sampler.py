"""The torch sampler: parameters, independence of the batch, edges, log probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sampler_kit import DEVICES, VARIED, VOCAB, logits, sample_one, state

from pippin.backends.base import SampleRow, SamplingState
from pippin.backends.torch.sampler import TorchSampler


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


class Model:
    """Logits that depend on the last token and the position, as a stand-in for a model."""

    def __init__(self, vocab: int = VOCAB) -> None:
        self._lines = logits(64, seed=9, scale=3.0, vocab=vocab)

    def line(self, last: int, position: int) -> torch.Tensor:
        return self._lines[(last * 7 + position) % len(self._lines)]


def generate(
    sampler: TorchSampler, states: dict[int, SamplingState], steps: int, device: torch.device
) -> dict[int, list[int]]:
    """Run sequences together; ``states`` by slot, outputs included in what is returned."""
    model = Model()
    outputs = {seq: list(state.output_token_ids) for seq, state in states.items()}
    for _ in range(steps):
        rows, lines = [], []
        for row, (seq, one) in enumerate(states.items()):
            tokens = [*one.prompt_token_ids, *outputs[seq]]
            rows.append(SampleRow(row, seq, len(tokens)))
            lines.append(model.line(tokens[-1], len(tokens)))
        for seq, token in zip(
            states, sampler.sample(torch.stack(lines).to(device), rows), strict=True
        ):
            outputs[seq].append(token.token_id)
    return outputs


@pytest.mark.parametrize("params", VARIED, ids=str)
def test_same_tokens_alone_and_in_a_batch(params: dict[str, Any], device: torch.device) -> None:
    mine = state(seed=77, choice=2, **params)
    alone = TorchSampler(VOCAB, device)
    alone.add(3, mine)
    [expected] = generate(alone, {3: mine}, 12, device).values()

    batch = TorchSampler(VOCAB, device)
    others = {
        seq: state(seed=seq, prompt=tuple(range(seq + 1)), **VARIED[seq % len(VARIED)])
        for seq in range(16)
    }
    states = others | {9: mine}
    for seq, one in states.items():
        batch.add(seq, one)
    together = generate(batch, states, 12, device)
    assert together[9] == expected
    assert len({tuple(tokens) for tokens in together.values()}) > 12


@pytest.mark.parametrize("params", VARIED, ids=str)
def test_same_tokens_after_preemption(params: dict[str, Any], device: torch.device) -> None:
    mine = state(seed=5, **params)
    sampler = TorchSampler(VOCAB, device)
    sampler.add(0, mine)
    expected = generate(sampler, {0: mine}, 12, device)[0]
    for cut in (1, 7):
        kept = dict(params, output=tuple(expected[:cut]))
        sampler.remove(0)
        again = state(seed=5, **kept)
        sampler.add(0, again)
        assert generate(sampler, {0: again}, 12 - cut, device)[0] == expected


def test_rows_of_the_logits_may_be_any(device: torch.device) -> None:
    sampler = TorchSampler(VOCAB, device)
    lines = logits(6).to(device)
    for seq in range(6):
        sampler.add(seq, state(temperature=0.0))
    best = lines.argmax(1).tolist()
    rows = [SampleRow(5, 0, 3), SampleRow(2, 4, 3)]
    assert [t.token_id for t in sampler.sample(lines.clone(), rows)] == [best[5], best[2]]
    assert sampler.sample(lines, []) == []
    rows = [SampleRow(0, 4, 4), SampleRow(3, 0, 4), SampleRow(4, 1, 3)]
    assert [t.token_id for t in sampler.sample(lines.clone(), rows)] == [best[r] for r in (0, 3, 4)]
    sampler.remove(4)
    with pytest.raises(KeyError):
        sampler.sample(lines, rows)


def test_parameters_follow_their_sequence_when_rows_change_places(device: torch.device) -> None:
    sampler = TorchSampler(VOCAB, device)
    sampler.add(0, state(allowed_token_ids=(10,)))
    sampler.add(1, state(logit_bias={20: 100.0}))
    sampler.add(2, state(top_p=0.5, temperature=0.0))
    line = logits()[0]
    best = int(line.argmax())
    for order in ((0, 1, 2), (2, 0, 1), (1, 2), (0,)):
        rows = [SampleRow(row, seq, 3) for row, seq in enumerate(order)]
        sampled = sampler.sample(line.repeat(len(order), 1).to(device), rows)
        assert [t.token_id for t in sampled] == [(10, 20, best)[seq] for seq in order]


def test_a_slot_can_be_used_again(device: torch.device) -> None:
    sampler = TorchSampler(VOCAB, device)
    line = logits().to(device)
    sampler.add(0, state(allowed_token_ids=(4,)))
    assert sampler.sample(line.clone(), [SampleRow(0, 0, 3)])[0].token_id == 4
    sampler.remove(0)
    sampler.add(0, state(allowed_token_ids=(9,)))
    assert sampler.sample(line.clone(), [SampleRow(0, 0, 3)])[0].token_id == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_of_logits(dtype: torch.dtype, device: torch.device) -> None:
    line = logits().to(dtype)
    expected = sample_one(device, state(seed=3, top_p=0.9), line.float())
    assert sample_one(device, state(seed=3, top_p=0.9), line) == expected


@pytest.mark.parametrize("vocab", [VOCAB, 5_000])
@pytest.mark.parametrize(
    ("params", "chosen"),
    [
        ({}, "all"),
        ({"temperature": 2.0}, "all"),
        ({"top_k": 7}, "seven"),
        ({"top_k": 7, "top_p": 0.5}, "some"),
        ({"top_p": 0.3}, "some"),
        ({"top_p": 0.9, "temperature": 1.5}, "some"),
        ({"min_p": 0.3}, "some"),
    ],
    ids=str,
)
def test_distribution(params: dict[str, Any], chosen: str, vocab: int) -> None:
    """Frequencies over 6,000 seeds and positions equal the probabilities that numpy finds."""
    device = torch.device("cpu")
    line = logits(scale=3.0, vocab=vocab, seed=4)[0]
    scores = line.numpy().astype(np.float64) / params.get("temperature", 1.0)
    chances = np.exp(scores - scores.max())
    order = np.argsort(-scores)
    kept = order[chances[order] >= params.get("min_p", 0.0) * chances.max()]
    kept = kept[: params.get("top_k", vocab)]
    before = np.cumsum(chances[kept]) - chances[kept]
    kept = kept[before < params.get("top_p", 1.0) * chances[kept].sum() + 1e-12]
    chances /= chances[kept].sum()

    sampler = TorchSampler(vocab, device)
    for seq in range(60):
        sampler.add(seq, state(seed=seq, **params))
    drawn = np.zeros(vocab)
    for position in range(100):
        rows = [SampleRow(seq, seq, position) for seq in range(60)]
        for token in sampler.sample(line.repeat(60, 1), rows):
            drawn[token.token_id] += 1
    assert drawn[kept].sum() == 6000
    expected = chances[kept] * 6000
    frequent = expected >= 5
    rest = np.array([drawn[kept][~frequent].sum()])
    counts = np.concatenate((drawn[kept][frequent], rest))
    wanted = np.concatenate((expected[frequent], [expected[~frequent].sum() + 1e-9]))
    if wanted[-1] < 5:
        counts, wanted = counts[:-1], wanted[:-1]
    freedom = max(1, len(counts) - 1)
    score = (((counts - wanted) ** 2 / wanted).sum() - freedom) / np.sqrt(2 * freedom)
    assert score < 4
    assert chosen != "seven" or np.count_nonzero(drawn) == 7
    assert chosen != "some" or np.count_nonzero(drawn) < vocab


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"top_k": 1},
        {"min_p": 1.0},
        {"top_p": 1e-7},
        {"top_p": 1e-60},
        {"temperature": 1e-5, "top_p": 1e-60},
        {"top_k": 5, "top_p": 1e-60},
    ],
    ids=str,
)
def test_only_the_most_likely(params: dict[str, Any], device: torch.device) -> None:
    for seed in range(8):
        line = logits(seed=seed)[0]
        line[[30, 20]] = line.max() + 1  # a tie: the lower id is the first
        assert sample_one(device, state(seed=seed, **params), line).token_id == 20


@pytest.mark.parametrize(
    "params", [{"temperature": 1e6}, {"top_k": VOCAB + 1}, {"top_k": -1}, {"top_p": 1.0}], ids=str
)
def test_no_limit(params: dict[str, Any], device: torch.device) -> None:
    line = torch.zeros(VOCAB)
    tokens = {sample_one(device, state(seed=s, **params), line).token_id for s in range(40)}
    assert len(tokens) > 30
    assert any(token > VOCAB // 2 for token in tokens)


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1])
def test_any_seed(seed: int, device: torch.device) -> None:
    line = logits()[0]
    token = sample_one(device, state(seed=seed), line, position=0)
    assert token == sample_one(device, state(seed=seed), line, position=0)
    tokens = [sample_one(device, state(seed=seed), line, position=p).token_id for p in range(9)]
    other = [sample_one(device, state(seed=seed ^ 1), line, position=p).token_id for p in range(9)]
    assert tokens != other


def test_choices_differ(device: torch.device) -> None:
    line = torch.zeros(VOCAB)
    tokens = {sample_one(device, state(choice=c), line).token_id for c in range(8)}
    assert len(tokens) > 5


def test_large_top_k_with_top_p_is_exact() -> None:
    """top_p takes its part of what top_k leaves, beyond the tokens that are sorted out."""
    line = torch.zeros(5000)
    line[:2000] = 1.0
    for seed in range(60):
        one = state(seed=seed, top_k=1000, top_p=0.5)
        assert sample_one(torch.device("cpu"), one, line).token_id < 500


def test_ties_with_the_last_of_top_k() -> None:
    """Of equal logits the lower ids are kept, though there are more of them than candidates."""
    tokens = {
        sample_one(torch.device("cpu"), state(seed=seed, top_k=5), torch.zeros(5000)).token_id
        for seed in range(60)
    }
    assert tokens == {0, 1, 2, 3, 4}


def test_bias_forces_and_forbids(device: torch.device) -> None:
    line = logits()[0]
    assert sample_one(device, state(logit_bias={8: 100.0}), line).token_id == 8
    best = int(line.argmax())
    forbidden = state(temperature=0.0, logit_bias={best: -100.0})
    assert sample_one(device, forbidden, line).token_id == int(line.topk(2).indices[1])


def test_allowed_tokens(device: torch.device) -> None:
    line = logits()[0]
    for seed in range(10):
        assert sample_one(device, state(seed, allowed_token_ids=(7, 300, 7)), line).token_id in (
            7,
            300,
        )
    assert sample_one(device, state(allowed_token_ids=(42,), temperature=0), line).token_id == 42


def test_penalties_follow_the_formula(device: torch.device) -> None:
    line = torch.tensor([4.0, -1.0, 3.5, 3.0, 3.9, -5.0])
    # 4.0 / 2 = 2; 3.5 - 0.4 * 2 - 0.3 = 2.4 after / 2 -> 0.65; 3.9 is in the prompt only: 1.95
    one = state(
        prompt=(4, 1),
        output=(0, 2, 2),
        temperature=0.0,
        repetition_penalty=2.0,
        frequency_penalty=0.4,
        presence_penalty=0.3,
    )
    assert sample_one(device, one, line).token_id == 3
    repeat = state(prompt=(4, 1), output=(0, 2, 2), temperature=0.0, frequency_penalty=0.4)
    assert sample_one(device, repeat, line).token_id == 4
    negative = state(prompt=(), output=(1,), temperature=0.0, repetition_penalty=0.1)
    assert sample_one(device, negative, torch.tensor([-0.5, -1.0])).token_id == 1


def test_penalties_count_each_sampled_token(device: torch.device) -> None:
    sampler = TorchSampler(200, device)
    sampler.add(0, state(prompt=(), temperature=0.0, presence_penalty=2.0))
    line = torch.linspace(1, 0, 200)[None].to(device)
    tokens = [sampler.sample(line.clone(), [SampleRow(0, 0, i)])[0].token_id for i in range(200)]
    assert tokens == list(range(200))  # more distinct tokens than the table starts with


def test_bad_words_look_at_generated_tokens_only(device: torch.device) -> None:
    line = torch.zeros(10)
    line[6] = 5.0
    words = ((5, 6), (4, 5, 7))
    greedy = {"temperature": 0.0, "bad_words": words}
    assert sample_one(device, state(prompt=(1, 5), **greedy), line).token_id == 6
    assert sample_one(device, state(output=(5,), **greedy), line).token_id == 0
    line[7] = 6.0
    assert sample_one(device, state(output=(4, 5), **greedy), line).token_id == 0
    assert sample_one(device, state(output=(5, 4), **greedy), line).token_id == 7
    assert sample_one(device, state(prompt=(4,), output=(5,), **greedy), line).token_id == 7


def test_bad_words_after_each_token(device: torch.device) -> None:
    sampler = TorchSampler(10, device)
    sampler.add(0, state(prompt=(1,), temperature=0.0, bad_words=((3, 3, 3), (8,))))
    line = torch.zeros(1, 10)
    line[0, 8], line[0, 3], line[0, 5] = 9.0, 5.0, 4.0
    tokens = [
        sampler.sample(line.clone().to(device), [SampleRow(0, 0, 1 + i)])[0].token_id
        for i in range(7)
    ]
    assert tokens == [3, 3, 5, 3, 3, 5, 3]


def test_min_tokens(device: torch.device) -> None:
    line = torch.zeros(10)
    line[4] = 9.0
    one = {"stops": (4,), "min_tokens": 2, "temperature": 0.0}
    assert sample_one(device, state(output=(), **one), line).token_id == 0
    assert sample_one(device, state(output=(1,), **one), line).token_id == 0
    assert sample_one(device, state(output=(1, 1), **one), line).token_id == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_that_leave_nothing_give_way(temperature: float, device: torch.device) -> None:
    line = logits(vocab=6)[0]
    common = {"temperature": temperature, "allowed_token_ids": (2, 3), "logprobs": 2}
    stops = state(stops=(2, 3), min_tokens=9, **common)
    assert sample_one(device, stops, line).token_id in (2, 3)
    both = state(stops=(2, 3), min_tokens=9, bad_words=((2,),), **common)
    assert sample_one(device, both, line).token_id == 3
    words = state(bad_words=((2,), (3,)), **common)
    assert sample_one(device, words, line).token_id in (2, 3)
    everything = state(stops=tuple(range(6)), min_tokens=9, temperature=temperature)
    assert 0 <= sample_one(device, everything, line).token_id < 6
