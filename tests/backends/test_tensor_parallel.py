"""A stage cut among processes gives the logits of the whole, on every kind of architecture."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel_kit as kit
import torch
from tensor_parallel_kit import Ranks
from test_formats import FORMATS, write
from test_torch_models import prompts, random_steps
from torch_tiny import MODELS, Driver, make_reference, reference_logits

from pippin.backends.torch.runner import load
from pippin.config import Config, ModelConfig, ParallelConfig, environment
from pippin.errors import ConfigError, PeerLost, StageMismatch
from pippin.models.files import local_directory, resolve

pytestmark = pytest.mark.slow

LENGTHS = (1, 23, 40)

#: 8 heads with 2 KV heads: cut in 2 each has its own, in 4 two ranks share one.
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
#: name -> (sizes of groups, what differs from torch_tiny's model)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "llama": ((2, 4), _HEADS),
    "llama-bias": ((2,), _HEADS),
    "llama-tied": ((4,), _HEADS | {"num_key_value_heads": 8}),
    "mistral-window": ((2,), _HEADS),
    "qwen2": ((2, 4), {"num_attention_heads": 8, "hidden_size": 64}),
    "qwen3": ((4,), _HEADS | {"num_key_value_heads": 4}),
    "qwen3_moe": ((2, 4), _HEADS | {"moe_intermediate_size": 32}),
    "gemma3": ((2, 4), _HEADS),
    "smollm3": ((2,), _HEADS | {"intermediate_size": 72}),
    "phi3": ((2, 4), _HEADS),
    "gpt_oss": ((2, 4), _HEADS | {"intermediate_size": 96}),
    "deepseek_v3": ((2,), {"num_attention_heads": 8, "num_key_value_heads": 8}),
    "deepseek_v3-yarn": (
        (4,),
        {"num_attention_heads": 8, "num_key_value_heads": 8, "moe_intermediate_size": 40},
    ),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(4)
    yield started
    started.close()


def save(name: str, changes: dict[str, Any], path: Path) -> Any:
    kind, own = MODELS[name]
    reference = make_reference(kind, own | changes)
    reference.save_pretrained(path)
    return reference


def check(result: dict[str, Any], reference: Any, tokens: dict[int, list[int]]) -> None:
    for seq, ids in tokens.items():
        wanted = reference_logits(reference, ids)
        actual = torch.from_numpy(result["logits"][seq])
        assert actual.shape == wanted.shape
        scale = wanted.abs().max().clamp(min=1.0)
        torch.testing.assert_close(actual / scale, wanted / scale, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_whole(name: str, ranks: Ranks, tmp_path: Path) -> None:
    sizes, changes = CASES[name]
    reference = save(name, changes, tmp_path)
    files = local_directory("tiny", tmp_path)
    tokens, steps = prompts(LENGTHS), random_steps(LENGTHS)
    whole = load(Config(model=ModelConfig(device="cpu", dtype="float32")), files)
    for size in sizes:
        results = ranks.call(size, kit.logits, files, tokens, steps, {})
        assert all(
            f"rank {r} of {size} (shared memory)" in results[r]["reason"] for r in range(size)
        )
        check(results[0], reference, tokens)
        # No bytes stand twice but for what every rank needs (and KV heads that ranks share).
        kv_heads = changes.get("num_key_value_heads", 2)
        shared = size if name.startswith("deepseek") else max(1, size // kv_heads)
        for group, own in zip(whole.info.kv_groups, results[1]["kv_bytes"], strict=True):
            assert own == group.bytes_per_token * shared // size
        assert results[1]["weights_bytes"] < 0.9 * whole.info.weights_bytes


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
def test_over_gloo_and_without_kernels(name: str, ranks: Ranks, tmp_path: Path) -> None:
    reference = save(name, CASES[name][1], tmp_path)
    tokens, steps = prompts(LENGTHS), random_steps(LENGTHS, seed=1)
    files = local_directory("tiny", tmp_path)
    results = ranks.call(2, kit.logits, files, tokens, steps, {"native": False})
    assert "(gloo)" in results[0]["reason"]
    check(results[0], reference, tokens)


@pytest.mark.parametrize("name", ["llama-tied", "gemma3"])
def test_an_embedding_in_parts(name: str, ranks: Ranks, tmp_path: Path) -> None:
    reference = save(name, _HEADS, tmp_path)
    tokens, steps = prompts(LENGTHS), random_steps(LENGTHS)
    files = local_directory("tiny", tmp_path)
    arguments = (files, tokens, steps, {})
    whole = ranks.call(4, kit.logits, *arguments)
    parts = ranks.call(4, kit.in_pieces_of_the_embedding, *arguments)
    check(parts[0], reference, tokens)
    saved = whole[3]["weights_bytes"] - parts[3]["weights_bytes"]
    assert saved == (151 - 38) * 48 * 4


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_stages_that_are_cut_too(name: str, ranks: Ranks, tmp_path: Path) -> None:
    reference = save(name, _HEADS, tmp_path)
    token_ids = prompts((19,))[0]
    files = local_directory("tiny", tmp_path)
    between = f"127.0.0.1:{kit.free_port()}"
    result = ranks.call(2, kit.two_stages, files, token_ids, 1, between)[0]
    check(result, reference, {0: token_ids})
    held = [sorted(layer for group in stage for layer in group) for stage in result["layers"]]
    assert held == [[0], [1, 2]]


def test_bfloat16_stays_near_float32(ranks: Ranks, tmp_path: Path) -> None:
    reference = save("llama", _HEADS | {"initializer_range": 0.1}, tmp_path)
    tokens, steps = prompts(LENGTHS), random_steps(LENGTHS)
    files = local_directory("tiny", tmp_path)
    result = ranks.call(2, kit.logits, files, tokens, steps, {"dtype": "bfloat16"})[0]
    for seq, ids in tokens.items():
        wanted = reference_logits(reference, ids)
        error = (torch.from_numpy(result["logits"][seq]) - wanted).norm() / wanted.norm()
        assert error < 0.05


@pytest.mark.parametrize(
    ("name", "size"),
    [("gptq-4", 2), ("gptq-4-act-order", 2), ("awq-4", 2), ("mlx-4", 2), ("mlx-6", 4), ("fp8", 2)],
)
def test_quantised_weights_are_cut(name: str, size: int, ranks: Ranks, tmp_path: Path) -> None:
    packer, settings, _ = FORMATS[name]
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 16}
    if size == 4:
        shape["num_key_value_heads"] = 2
    reference = make_reference("llama", {**shape, "initializer_range": 0.1})
    path = tmp_path / "m"
    write(reference, path, packer, settings)
    tokens, steps = prompts(LENGTHS), random_steps(LENGTHS)
    files = resolve(str(path), home=tmp_path)
    result = ranks.call(size, kit.logits, files, tokens, steps, {})[0]
    check(result, reference, tokens)
    assert ("act-order weights are dense" in result["reason"]) == ("act-order" in name)


@pytest.mark.model
def test_the_demo_model_in_three(ranks: Ranks) -> None:
    files = resolve("demo", home=environment().home)
    config = Config(
        model=ModelConfig(device="cpu", dtype="float32"), parallel=ParallelConfig(cpus_per_rank=1)
    )
    runner = load(config, files)
    token_ids = [1, 504, 3575, 282, 4649, 314]
    prompt = len(token_ids)
    driver = Driver(runner, num_blocks=8, block_size=16)
    driver.add(0, token_ids)
    logits = driver.step({0: prompt}, num_logits=1)[0]
    for _ in range(40):
        # The driver's own list grows: the next step takes it from there.
        driver.sequences[0].token_ids.append(int(logits.argmax()))
        logits = driver.step({0: 1})[0]
    chosen = [*driver.sequences[0].token_ids[prompt:], int(logits.argmax())]
    assert len(set(chosen)) > 15
    found = ranks.call(3, kit.greedy, files, [*token_ids, *chosen[:-1]], prompt)
    assert found[0] == chosen


@pytest.mark.model
def test_a_rank_takes_the_memory_of_its_part(ranks: Ranks) -> None:
    files = resolve("demo", home=environment().home)
    peaks = [peak for peak, _ in ranks.call(3, kit.peak_memory, files)]
    one, weights = ranks.call(1, kit.peak_memory, files)[0]
    # The largest tensor, the embedding, is unpacked whole on its way.
    whole_tensor = 49152 * 576 * 5
    assert max(peaks) < one / 3 + whole_tensor, (peaks, one, weights)


def test_impossible_sizes_are_refused_at_once(ranks: Ranks, tmp_path: Path) -> None:
    save("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}, tmp_path)
    files = local_directory("tiny", tmp_path)
    for error in ranks.call(4, kit.logits, files, {}, [], {}):
        assert isinstance(error, ConfigError)
        assert "6 attention heads are not a multiple of 4" in str(error)


def test_ranks_with_different_models_do_not_start(ranks: Ranks, tmp_path: Path) -> None:
    dtypes = ({"dtype": "float32"}, {"dtype": "bfloat16"})
    save("llama", _HEADS, tmp_path)
    files = local_directory("tiny", tmp_path)
    for error in ranks.call(2, kit.with_own_options, files, dtypes):
        assert isinstance(error, StageMismatch)
        assert "float32" in str(error)
        assert "bfloat16" in str(error)


@pytest.mark.parametrize(
    ("number", "native"),
    [
        (signal.SIGKILL, True),
        (signal.SIGKILL, False),
        (signal.SIGSTOP, True),
        (signal.SIGSTOP, False),
    ],
)
def test_a_lost_rank_ends_in_an_error(
    number: int, native: bool, ranks: Ranks, tmp_path: Path
) -> None:
    save("llama", _HEADS, tmp_path)
    files = local_directory("tiny", tmp_path)
    killed = number == signal.SIGKILL
    # A stopped rank is given up after this; one that is gone is noticed long before.
    ranks.start(2, kit.wait_for_others, 0, 60.0 if killed else 1.0, native, files)
    assert ranks.result(1) == "summed once"
    pid = ranks.processes[1].pid
    assert pid is not None
    os.kill(pid, number)
    started = time.monotonic()
    try:
        answer = ranks.result(0)
        waited = time.monotonic() - started
    finally:
        if killed:
            ranks.replace(1)
        else:
            os.kill(pid, signal.SIGCONT)
    assert answer.startswith(PeerLost.__name__), answer
    assert waited < 5


def test_meeting_has_a_deadline_and_names_a_busy_port(ranks: Ranks) -> None:
    address = f"127.0.0.1:{kit.free_port()}"
    # Rank 1 alone: rank 0 never listens.
    ranks.start(2, kit.meet_alone, address, 1.0)
    assert ranks.result(0) == "stayed away"
    assert ranks.result(1).startswith("PeerLost")
    # Rank 0 alone.
    answers = ranks.call(1, kit.meet_as_first_of_two, address, 0.5)
    assert answers[0].startswith("PeerLost")
    assert "rank 1" in answers[0]
    with kit.listening() as busy:
        answers = ranks.call(1, kit.meet_as_first_of_two, busy, 0.5)
        assert answers[0].startswith("PortInUse")
        assert busy in answers[0]
