"""Every architecture: our paged, chunked, batched logits equal transformers' own forward."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch_tiny import DEVICES, DYNAMIC, LONGROPE, MODELS, Driver, make_reference, make_runner
from torch_tiny import reference_logits as expected

from pippin.backends.torch.runner import load
from pippin.config import Config, ModelConfig
from pippin.models.files import local_directory
from pippin.types.step import Chunk, StepPlan

CONFIG = Config(model=ModelConfig(device="cpu", dtype="float32"))

LENGTHS = (1, 2, 7, 23, 40, 57)


def prompts(lengths: tuple[int, ...], seed: int = 0) -> dict[int, list[int]]:
    source = random.Random(seed)
    return {seq: [source.randrange(3, 151) for _ in range(n)] for seq, n in enumerate(lengths)}


def random_steps(lengths: tuple[int, ...], seed: int = 0) -> list[dict[int, int]]:
    """Cuts sequences into chunks, many of one token, with several sequences in each step."""
    source = random.Random(seed)
    left = dict(enumerate(lengths))
    steps = []
    while left:
        step = {}
        for seq in source.sample(sorted(left), source.randint(1, len(left))):
            count = min(left[seq], source.choice((1, 1, 1, 2, 5, 9, 30)))
            step[seq] = count
            left[seq] -= count
            if not left[seq]:
                del left[seq]
        steps.append(step)
    return steps


def check(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    actual = actual.cpu()
    assert actual.shape == wanted.shape
    scale = wanted.abs().max().clamp(min=1.0)
    torch.testing.assert_close(actual / scale, wanted / scale, atol=1e-4, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_mixed_batches(name: str, device: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    reference = make_reference(kind, changes)
    driver = Driver(make_runner(reference, tmp_path, device=device), num_blocks=64)
    tokens = prompts(LENGTHS)
    for seq, ids in tokens.items():
        driver.add(seq, ids)
    logits = driver.run(random_steps(LENGTHS))
    for seq, ids in tokens.items():
        check(logits[seq], expected(reference, ids))


@pytest.mark.parametrize("name", MODELS)
def test_a_chunk_runs_a_few_layers_at_a_time(name: str, tmp_path: Path) -> None:
    """Beside decodes, by itself, and given up in the midst of it."""
    kind, changes = MODELS[name]
    reference = make_reference(kind, changes)
    runner = make_runner(reference, tmp_path)
    driver = Driver(runner, num_blocks=64)
    tokens = prompts((40, 40, 33))
    for seq, ids in tokens.items():
        driver.add(seq, ids)
    count = runner.info.num_layers
    parts: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def step(counts: dict[int, int], layers: tuple[int, int] | None = None) -> None:
        for seq, logits in driver.step(counts, layers=layers).items():
            parts[seq].append(logits)

    step({1: 9, 0: 13})
    for layer in range(count):
        if layer + 1 < count:
            step({1: 1, 2: 20}, (layer, layer + 1))
    driver.remove(2)  # the next to have its blocks must not have its hidden states
    for layer in range(count):
        step({1: 1, 0: 11}, (layer, layer + 1))
    for first, last in ((0, count - 1), (count - 1, count)):
        step({0: 16}, (first, last))
    step({1: 40 - sum(map(len, parts[1]))})
    for seq, pieces in parts.items():
        check(torch.cat(pieces), expected(reference, tokens[seq]))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
def test_prefix_pages_are_shared(name: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    reference = make_reference(kind, changes)
    driver = Driver(make_runner(reference, tmp_path), num_blocks=64)
    common = prompts((9,))[0]
    tails = prompts((8, 15), seed=1)
    tokens = {seq: common + tail for seq, tail in tails.items()}
    driver.add(0, tokens[0])
    driver.step({0: 9})
    driver.add(1, tokens[1], prefix_of=0)
    assert driver.sequences[1].done == 8
    logits = driver.run([{0: 3, 1: 5}, {1: 1, 0: 5}, {1: len(tokens[1]) - 14}])
    check(logits[0], expected(reference, tokens[0])[9:])
    check(logits[1], expected(reference, tokens[1])[8:])


def test_slot_numbers_are_reused(tmp_path: Path) -> None:
    reference = make_reference("llama", {})
    driver = Driver(make_runner(reference, tmp_path), num_blocks=9)
    for seed in range(4):
        tokens = prompts((30, 2), seed=seed)
        for seq, ids in tokens.items():
            driver.add(seq, ids)
        logits = driver.run([{0: 20, 1: 1}, {1: 1, 0: 10}])
        for seq, ids in tokens.items():
            check(logits[seq], expected(reference, ids))
            driver.remove(seq)


@pytest.mark.parametrize("block_size", [1, 16])
def test_block_sizes(block_size: int, tmp_path: Path) -> None:
    kind, changes = MODELS["gemma3"]
    reference = make_reference(kind, changes)
    runner = make_runner(reference, tmp_path)
    driver = Driver(runner, num_blocks=200 // block_size + 8, block_size=block_size)
    tokens = prompts(LENGTHS)
    for seq, ids in tokens.items():
        driver.add(seq, ids)
    logits = driver.run(random_steps(LENGTHS, seed=3))
    for seq, ids in tokens.items():
        check(logits[seq], expected(reference, ids))


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe", "deepseek_v3"])
def test_only_wanted_rows_come_back(name: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    reference = make_reference(kind, changes)
    driver = Driver(make_runner(reference, tmp_path), num_blocks=64)
    tokens = prompts((21, 30, 5))
    for seq, ids in tokens.items():
        driver.add(seq, ids)
    assert driver.step({0: 10, 1: 13}, num_logits=0) == {}
    logits = driver.step({0: 11, 2: 5, 1: 17}, num_logits=1)
    for seq, ids in tokens.items():
        check(logits[seq], expected(reference, ids)[-1:])


@pytest.mark.parametrize(
    ("kind", "changes"), [("phi3", LONGROPE), ("llama", DYNAMIC)], ids=["longrope", "dynamic"]
)
def test_rope_depends_on_the_sequence_and_not_on_the_batch(
    kind: str, changes: dict[str, object], tmp_path: Path
) -> None:
    reference = make_reference(kind, changes)
    driver = Driver(make_runner(reference, tmp_path), num_blocks=64)
    tokens = prompts((10, 32, 33, 60, 1))
    for seq, ids in tokens.items():
        driver.add(seq, ids)
    logits = driver.step({seq: len(ids) for seq, ids in tokens.items()})
    for seq, ids in tokens.items():
        # A fresh model: transformers keeps the frequencies of the longest sequence it has seen.
        check(logits[seq], expected(make_reference(kind, changes), ids))


def test_longrope_decodes_beyond_the_original_length(tmp_path: Path) -> None:
    reference = make_reference("phi3", LONGROPE)
    driver = Driver(make_runner(reference, tmp_path), num_blocks=64)
    tokens = prompts((50, 12))
    for seq, ids in tokens.items():
        driver.add(seq, ids)
    logits = driver.run([{0: 40, 1: 2}] + [{0: 1, 1: 1}] * 10)
    check(logits[0], expected(reference, tokens[0]))
    check(logits[1], expected(reference, tokens[1]))


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_stages_pass_the_residual_stream(name: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    reference = make_reference(kind, changes)
    reference.save_pretrained(tmp_path)
    stages = [
        load(CONFIG, local_directory("tiny", tmp_path), first_layer=first, last_layer=last)
        for first, last in ((0, 1), (1, 2), (2, 3))
    ]
    groups = len(stages[0].info.kv_groups)
    assert all(len(stage.info.kv_groups) == groups for stage in stages)
    tokens = prompts((19,))[0]
    for stage in stages:
        stage.allocate_kv((8,) * groups, 4)
    hidden = None
    for first, last in ((0, 12), (12, 13), (13, 19)):
        table = tuple(range(-(-first // 4), -(-last // 4)))
        chunk = Chunk(
            seq=0,
            start=first,
            token_ids=tokens[first:last],
            new_blocks=(table,) * groups,
            num_logits=last - first,
        )
        plan = StepPlan(step=0, chunks=(chunk,))
        hidden = None
        for stage in stages:
            hidden = stage.execute(plan, hidden)
        assert hidden is not None
        check(hidden, expected(reference, tokens)[first:last])


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_stays_near_float32(device: str, tmp_path: Path) -> None:
    for index, name in enumerate(("llama", "qwen3", "gemma3", "gpt_oss", "deepseek_v3")):
        kind, changes = MODELS[name]
        reference = make_reference(kind, changes | {"initializer_range": 0.1})
        runner = make_runner(reference, tmp_path / str(index), dtype="bfloat16", device=device)
        assert runner.info.dtype == "bfloat16"
        driver = Driver(runner, num_blocks=64)
        tokens = prompts((20, 31))
        for seq, ids in tokens.items():
            driver.add(seq, ids)
        logits = driver.run([{0: 12, 1: 20}, {0: 1, 1: 5}, {0: 7, 1: 6}])
        for seq, ids in tokens.items():
            wanted = expected(reference, ids)
            error = (logits[seq].cpu().float() - wanted).norm() / wanted.norm()
            assert error < 0.05, (name, error)
