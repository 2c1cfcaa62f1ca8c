"""The torch sampler: parameters, independence of the batch, edges, log probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pippin.backends.base import SampledToken, SampleRow, SamplingState
from pippin.backends.torch.sampler import TorchSampler
from pippin.types.request import Logprobs, SamplingParams

DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append("cuda")
if torch.backends.mps.is_available():
    DEVICES.append("mps")
VOCAB = 500


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Rows this small are faster on one thread, above all when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def state(
    seed: int = 0,
    choice: int = 0,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    stops: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> SamplingState:
    return SamplingState(
        params=SamplingParams(max_tokens=None, **params),
        seed=seed,
        choice=choice,
        prompt_token_ids=prompt,
        output_token_ids=output,
        stop_token_ids=frozenset(stops),
        bad_words_token_ids=bad_words,
    )


def logits(rows: int = 1, seed: int = 0, scale: float = 2.0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.from_numpy(
        np.random.default_rng(seed).normal(0, scale, (rows, vocab)).astype(np.float32)
    )


def sample_one(
    device: torch.device, state: SamplingState, line: torch.Tensor, position: int | None = None
) -> SampledToken:
    sampler = TorchSampler(line.shape[-1], device)
    sampler.add(0, state)
    if position is None:
        position = len(state.prompt_token_ids) + len(state.output_token_ids)
    [token] = sampler.sample(line.reshape(1, -1).clone().to(device), [SampleRow(0, 0, position)])
    return token


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


VARIED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 20},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.0},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"min_p": 0.05, "temperature": 1.5},
    {"top_p": 0.95, "logit_bias": {4: 3.0, 9: -100.0}},
    {"allowed_token_ids": tuple(range(0, 500, 3))},
    {"min_tokens": 5, "stops": (0, 7), "bad_words": ((3,), (5, 6))},
    {"top_p": 0.95, "logprobs": 3},
]


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
