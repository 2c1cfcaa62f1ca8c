"""Every architecture on MLX: our paged, chunked, batched logits equal transformers' own forward."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mlx_tiny import MLX_MODELS, make_mlx
from test_torch_models import LENGTHS, prompts, random_steps
from torch_tiny import DYNAMIC, LONGROPE, MODELS, Driver, make_reference
from torch_tiny import reference_logits as expected

from pippin.backends.base import HiddenStates, SampleRow, SamplingState
from pippin.backends.description import read_config
from pippin.backends.mlx.batch import MOST_PADDING, BatchBuilder, Single, group_decodes
from pippin.backends.mlx.model import SUPPORTED, build
from pippin.backends.mlx.runner import MlxRunner, load
from pippin.backends.mlx.weights import Weights
from pippin.backends.mlx.wire import from_wire, to_wire
from pippin.backends.torch.runner import load as load_torch
from pippin.config import CacheConfig, Config, ModelConfig
from pippin.engine import backend as engine_backend
from pippin.engine import core as engine_core
from pippin.errors import (
    ConfigError,
    EngineError,
    ModelInvalid,
    OutOfMemory,
    ProtocolError,
    UnsupportedModel,
)
from pippin.models.checkpoint import open_checkpoint
from pippin.models.files import local_directory
from pippin.types.request import Request, SamplingParams
from pippin.types.step import Chunk, StepPlan

CONFIG = Config(model=ModelConfig(device="cpu"))


def check(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert actual.shape == wanted.shape
    torch.testing.assert_close(actual, wanted, atol=1e-3, rtol=0)


def add_all(driver: Driver, tokens: dict[int, list[int]]) -> None:
    for seq, ids in tokens.items():
        driver.add(seq, ids)


@pytest.mark.parametrize("name", MLX_MODELS)
def test_chunks_and_mixed_batches(name: str, tmp_path: Path) -> None:
    reference = make_reference(*MLX_MODELS[name])
    driver = Driver(make_mlx(reference, tmp_path), num_blocks=64)
    tokens = prompts(LENGTHS)
    add_all(driver, tokens)
    logits = driver.run(random_steps(LENGTHS))
    for seq, ids in tokens.items():
        check(logits[seq], expected(reference, ids))


@pytest.mark.parametrize("wanted", [1, 4])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_only_wanted_rows_come_back(name: str, wanted: int, tmp_path: Path) -> None:
    """The last layer then runs for those rows only, beside other sequences' decodes."""
    reference = make_reference(*MODELS[name])
    driver = Driver(make_mlx(reference, tmp_path), num_blocks=64)
    tokens = prompts((21, 31, 25, 17))
    add_all(driver, tokens)
    assert driver.step({0: 10, 1: 13, 3: 16}, num_logits=0) == {}
    # Neighbours, a prompt from its first token on, and one that is wanted whole.
    logits = driver.step({3: 1} if wanted == 1 else {}, num_logits=1)
    logits |= driver.step({0: 11, 2: 25, 1: 14}, num_logits=wanted)
    for seq in (0, 2):
        check(logits[seq], expected(reference, tokens[seq])[-wanted:])
    check(logits[1], expected(reference, tokens[1])[27 - wanted : 27])
    # What was written of the last layer is read by what follows.
    last = driver.step({1: 4}, num_logits=4)
    check(last[1], expected(reference, tokens[1])[-4:])


@pytest.mark.parametrize(
    ("kind", "changes"), [("phi3", LONGROPE), ("llama", DYNAMIC)], ids=["longrope", "dynamic"]
)
def test_rope_depends_on_the_sequence_and_not_on_the_batch(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    reference = make_reference(kind, changes)
    driver = Driver(make_mlx(reference, tmp_path), num_blocks=64)
    tokens = prompts((10, 32, 33, 60, 1))
    add_all(driver, tokens)
    logits = driver.step({seq: len(ids) for seq, ids in tokens.items()})
    for seq, ids in tokens.items():
        # A fresh model: transformers keeps the frequencies of the longest sequence it has seen.
        check(logits[seq], expected(make_reference(kind, changes), ids))


def wide_logits(logits: Any) -> torch.Tensor:
    if isinstance(logits, torch.Tensor):
        return logits
    return torch.from_numpy(np.array(logits.astype(mx.float32)))


@pytest.mark.parametrize("backends", ["mlx mlx mlx", "mlx torch mlx", "torch mlx torch"])
@pytest.mark.parametrize(
    "name", ["llama-tied", "qwen2", "qwen3_moe", "gemma3", "gpt_oss", "deepseek_v3"]
)
def test_stages_pass_the_residual_stream(name: str, backends: str, tmp_path: Path) -> None:
    """As bytes, so that neighbours may be of different backends."""
    reference = make_reference(*MODELS[name])
    reference.save_pretrained(tmp_path)
    stages: list[Any] = []
    for number, backend in enumerate(backends.split()):
        settings = ModelConfig(model=str(tmp_path), device="cpu", dtype="float32")
        loader: Any = load if backend == "mlx" else load_torch
        files = local_directory("tiny", tmp_path)
        stages.append(
            loader(Config(model=settings), files, first_layer=number, last_layer=number + 1)
        )
    groups = len(stages[0].info.kv_groups)
    assert all(len(stage.info.kv_groups) == groups for stage in stages)
    tokens = prompts((19,))[0]
    for stage in stages:
        stage.allocate_kv((8,) * groups, 4)
    for first, last in ((0, 12), (12, 13), (13, 19)):
        table = tuple(range(-(-first // 4), -(-last // 4)))
        chunk = Chunk(0, first, tokens[first:last], (table,) * groups, last - first)
        passed: Any = None
        for stage in stages:
            passed = stage.execute(StepPlan(step=0, chunks=(chunk,)), passed)
            if stage is not stages[-1]:
                assert isinstance(passed, HiddenStates)
                assert passed.shape == (last - first, 48)
                assert passed.data.nbytes == (last - first) * 48 * 4
        check(wide_logits(passed), expected(reference, tokens)[first:last])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_hidden_states_survive_the_wire(dtype: str) -> None:
    sent = mx.random.normal((5, 48)).astype(getattr(mx, dtype))
    wire = to_wire(sent[:, :32])
    assert (wire.dtype, wire.shape) == (dtype, (5, 32))
    assert bytes(wire.data) == np.array(sent[:, :32].view(mx.uint8)).tobytes()
    assert mx.array_equal(from_wire(wire, sent.dtype), sent[:, :32])
    assert from_wire(wire, mx.float32).dtype == mx.float32
    with pytest.raises(ProtocolError, match="int8"):
        from_wire(HiddenStates("int8", (5, 32), wire.data), mx.float32)


def sampled_in_turns(runner: MlxRunner, ahead: bool) -> dict[int, list[int]]:
    """Two sets of sequences in alternate steps; with ``ahead``, the tokens of a step are read after
    the next one was executed."""
    groups = len(runner.info.kv_groups)
    runner.allocate_kv((64,) * groups, 4)
    tokens = prompts((9, 5, 14, 3), seed=6)
    parameters = SamplingParams(temperature=0.8, top_p=0.95, logprobs=2)
    done = dict.fromkeys(tokens, 0)
    outputs: dict[int, list[int]] = {seq: [] for seq in tokens}
    for seq, ids in tokens.items():
        runner.sampler.add(seq, SamplingState(parameters, seq, 0, ids, [], frozenset()))
    open_steps: list[tuple[Any, list[SampleRow]]] = []

    def read() -> None:
        logits, rows = open_steps.pop(0)
        for row, token in zip(rows, runner.sampler.sample(logits, rows), strict=True):
            outputs[row.seq].append(token.token_id)
            tokens[row.seq].append(token.token_id)

    for step in range(24):
        chunks, rows = [], []
        for seq in (0, 1) if step % 2 == 0 else (2, 3):
            first, last = done[seq], len(tokens[seq])
            table = tuple(16 * seq + i for i in range(-(-first // 4), -(-last // 4)))
            chunks.append(Chunk(seq, first, tokens[seq][first:], (table,) * groups, 1))
            rows.append(SampleRow(len(rows), seq, last))
            done[seq] = last
        open_steps.append((runner.execute(StepPlan(step, tuple(chunks))), rows))
        if len(open_steps) > ahead:
            read()
    while open_steps:
        read()
    for seq in tokens:
        runner.sampler.remove(seq)
    return outputs


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_a_step_may_be_executed_before_the_last_ones_tokens_are_read(
    name: str, tmp_path: Path
) -> None:
    runner = make_mlx(make_reference(*MODELS[name]), tmp_path).runner
    one_by_one = sampled_in_turns(runner, ahead=False)
    assert all(len(tokens) == 12 for tokens in one_by_one.values())
    assert sampled_in_turns(runner, ahead=True) == one_by_one


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi3-window"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(name: str, dtype: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    reference = make_reference(kind, changes | {"initializer_range": 0.1})
    runner = make_mlx(reference, tmp_path, dtype=dtype).runner
    model = runner._model
    assert runner.info.dtype == dtype
    runner.allocate_kv((32,) * len(runner.info.kv_groups), 4)
    assert {pool.dtype for pool in model.pools()} == {model.dtype}
    tokens = prompts((20,))[0]
    results = []
    for first, last in ((0, 12), (12, 13), (13, 20)):
        table = tuple(range(-(-first // 4), -(-last // 4)))
        blocks = (table,) * len(runner.info.kv_groups)
        chunk = Chunk(0, first, tokens[first:last], blocks, last - first)
        logits = runner.execute(StepPlan(step=0, chunks=(chunk,)))
        assert logits is not None
        results.append(np.array(logits.astype(mx.float32)))
    wanted = expected(reference, tokens).numpy()
    assert np.linalg.norm(np.concatenate(results) - wanted) < 0.05 * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", MLX_MODELS)
def test_half_precision_is_kept_through_the_layers(name: str, tmp_path: Path) -> None:
    """One operand in float32 would make all that follows float32. Types are known before anything
    is evaluated, which MLX's CPU build cannot do for experts."""
    make_reference(*MLX_MODELS[name]).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(local_directory("tiny", tmp_path))
    config = read_config(checkpoint.config, SUPPORTED)
    model = build(config, Weights(checkpoint, mx.bfloat16), 0, config.num_hidden_layers)
    model.allocate((8,) * len(model.groups), 4)
    windows = [group.window for group in model.groups]
    builder = BatchBuilder(windows, 4, (8,) * len(windows), model.pool_heads)
    table = ((0, 1, 2, 3),) * len(model.groups)
    for first, last in ((0, 12), (12, 13)):
        blocks = table if first == 0 else ((),) * len(model.groups)
        chunk = Chunk(0, first, [5] * (last - first), blocks, 1)
        logits = model.forward(builder.build(StepPlan(step=0, chunks=(chunk,))))
        assert logits is not None
        assert logits.dtype == mx.bfloat16
        assert {pool.dtype for pool in model.pools()} == {mx.bfloat16}


def test_experts_in_half_precision_are_refused_on_cpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float32"):
        make_mlx(make_reference(*MODELS["qwen3_moe"]), tmp_path, dtype="bfloat16")


def test_a_contiguous_sequence_is_read_without_a_copy(tmp_path: Path) -> None:
    reference = make_reference("llama", {"max_position_embeddings": 4096})
    runner = make_mlx(reference, tmp_path).runner
    runner.allocate_kv((400,), 16)
    tokens = prompts((101,))[0]
    for first, last in ((0, 50), (50, 100), (100, 101)):
        table = tuple(range(9 + -(-first // 16), 9 + -(-last // 16)))
        chunk = Chunk(0, first, tokens[first:last], (table,), 1)
        logits = runner.execute(StepPlan(step=0, chunks=(chunk,)))
    assert logits is not None
    check(torch.from_numpy(np.array(logits)), expected(reference, tokens)[-1:])
    # One of 4,000 tokens, whose pages are empty here.
    chunk = Chunk(1, 4000, [5], (tuple(range(100, 351)),), 1)
    runner.execute(StepPlan(step=0, chunks=(chunk,)))
    assert runner.gathered_bytes == 0


def test_long_and_short_decodes_are_not_padded_to_one_length(tmp_path: Path) -> None:
    runner = make_mlx(make_reference("llama", {"max_position_embeddings": 4096}), tmp_path).runner
    runner.allocate_kv((400,), 16)
    scattered = tuple(reversed(range(100, 351)))
    chunks = [Chunk(0, 4000, [5], (scattered,), 1)]
    chunks += [Chunk(seq, 1, [5], ((seq,),), 1) for seq in range(1, 8)]
    runner.execute(StepPlan(step=0, chunks=tuple(chunks)))
    slot = runner.info.kv_groups[0].bytes_per_token
    assert runner.gathered_bytes == slot * 16 * (251 + 7)


def test_kv_of_long_and_short_sequences_is_near_its_ideal(tmp_path: Path) -> None:
    """One of 4,000 tokens and seven of two: a batch padded to the longest takes eight times."""
    changes = {"max_position_embeddings": 4096, "hidden_size": 12, "intermediate_size": 12}
    make_reference("llama", changes).save_pretrained(tmp_path)
    engine = engine_core.load(
        Config(
            model=ModelConfig(model=str(tmp_path), backend="mlx", device="cpu"),
            cache=CacheConfig(kv_cache_bytes=4 << 20),
        )
    )
    lengths = (4000, *(2,) * 7)
    counts = dict.fromkeys(map(str, range(8)), 0)
    for number, length in enumerate(lengths):
        engine.add(
            Request(
                request_id=str(number),
                prompt_token_ids=[3 + number] * length,
                params=SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
                seed=0,
                max_tokens=40,
            )
        )
        while not counts[str(number)]:
            for output in engine.step():
                counts[output.request_id] += len(output.token_ids)
    # Of the last token there is no KV yet.
    ideal = sum(lengths) + sum(counts.values()) - len(lengths)
    size = engine.ready.num_blocks[0] * engine.ready.block_size
    assert ideal <= engine.stats().kv_cache_usage * size < 1.1 * ideal
    engine.close()


@given(st.lists(st.integers(1, 300), min_size=1, max_size=64))
def test_padding_of_decodes_is_bounded(lengths: list[int]) -> None:
    singles = [Single(row, 0, 16 * n, np.zeros(n, np.int64)) for row, n in enumerate(lengths)]
    sets = group_decodes(singles)
    assert sorted(single.row for one in sets for single in one) == list(range(len(lengths)))
    for one in sets:
        own = [len(single.blocks) for single in one]
        assert max(own) * len(own) - sum(own) <= MOST_PADDING * max(own) * len(own)


@pytest.mark.parametrize("sequences", [1, 3])
def test_pools_are_written_in_place(sequences: int, tmp_path: Path) -> None:
    """Also where a step is executed while the one before it runs."""
    runner = make_mlx(make_reference("llama", {}), tmp_path).runner
    runner.allocate_kv((20_000,), 16)
    mx.clear_cache()
    held = mx.get_active_memory()
    pool = runner.info.kv_groups[0].bytes_per_token * 20_000 * 16
    assert held > pool
    mx.reset_peak_memory()
    for position in range(6):
        chunks = tuple(
            Chunk(seq, position, [5], ((7 + 5 * seq,),) if position == 0 else ((),), 1)
            for seq in range(sequences)
        )
        runner.execute(StepPlan(step=position, chunks=chunks))
    runner.synchronize()
    assert mx.get_peak_memory() - held < pool // len(runner.info.kv_groups[0].layers) // 4


def test_half_the_layers_take_half_the_memory(tmp_path: Path) -> None:
    make_reference("llama", {"num_hidden_layers": 8, "hidden_size": 384}).save_pretrained(tmp_path)
    files = local_directory("tiny", tmp_path)
    peaks = []
    for last in (8, 4):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        runner = load(CONFIG, files, first_layer=0, last_layer=last)
        peaks.append(mx.get_peak_memory() - before)
        runner.close()
        del runner
    assert peaks[1] < 0.6 * peaks[0]


def test_pools_that_do_not_fit_are_a_clear_error(tmp_path: Path) -> None:
    runner = make_mlx(make_reference("llama", {}), tmp_path).runner
    with pytest.raises(OutOfMemory, match="KV cache"):
        runner.allocate_kv((1 << 26,), 16)
    runner.allocate_kv((4,), 16)
    runner.execute(StepPlan(step=0, chunks=(Chunk(0, 0, [5], ((0,),), 1),)))


def test_memory_for_kv_leaves_room_for_the_largest_step(tmp_path: Path) -> None:
    runner = make_mlx(make_reference("llama", {}), tmp_path).runner
    few, many = (runner.available_kv_bytes(tokens, 4) for tokens in (16, 256))
    assert 0 < many <= few <= 512 << 20
    assert runner._profile(256, 4) > 4 * runner._profile(16, 4)


def test_other_threads_are_refused(tmp_path: Path) -> None:
    runner = make_mlx(make_reference("llama", {}), tmp_path).runner
    runner.allocate_kv((4,), 16)
    runner._thread += 1
    with pytest.raises(EngineError, match="thread"):
        runner.execute(StepPlan(step=0, chunks=(Chunk(0, 0, [5], ((0,),), 1),)))


def test_recurrent_models_are_refused_with_the_reason(tmp_path: Path) -> None:
    make_reference("llama", {}).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"qwen3_next"'))
    with pytest.raises(UnsupportedModel, match="recurrent state"):
        load(CONFIG, local_directory("tiny", tmp_path))


def test_heads_that_the_library_cannot_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="heads of 8, the model of 16"):
        make_mlx(make_reference("phi3", {"head_dim": 16}), tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    make_reference("llama", {}).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    text = config.read_text().replace('"intermediate_size": 80', '"intermediate_size": 96')
    config.write_text(text)
    with pytest.raises(ModelInvalid, match="gate_proj"):
        load(CONFIG, local_directory("tiny", tmp_path))


_WITHOUT_TORCH = """
import importlib.util, sys

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.split(".")[0] == "torch" else find_spec(name, package)
)


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")


sys.meta_path.insert(0, Missing())
from pippin.config import Config, CacheConfig, ModelConfig
from pippin.engine import core
from pippin.types.request import Request, SamplingParams

engine = core.load(
    Config(
        model=ModelConfig(model=sys.argv[1], backend="mlx", device="cpu"),
        cache=CacheConfig(kv_cache_bytes=1 << 20),
    )
)
params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=5, ignore_eos=True)
engine.add(
    Request(request_id="a", prompt_token_ids=[3, 4, 5], params=params, seed=1, max_tokens=5)
)
tokens = []
while engine.has_unfinished():
    for output in engine.step():
        tokens += output.token_ids
print(len(tokens), "torch" in sys.modules)
"""


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_torch_is_not_needed(name: str, tmp_path: Path) -> None:
    make_reference(*MODELS[name]).save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["5", "False"], done.stderr


@pytest.mark.parametrize(
    ("system", "machine", "backend"),
    [("darwin", "arm64", "mlx"), ("darwin", "x86_64", "torch"), ("linux", "aarch64", "torch")],
)
def test_the_backend_is_chosen_by_the_machine(
    system: str, machine: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_backend.sys, "platform", system)
    monkeypatch.setattr(engine_backend.platform, "machine", lambda: machine)
    assert engine_backend.choose_backend(Config())[0] == backend
    assert "Apple Silicon" in engine_backend.choose_backend(Config())[1]
    asked = engine_backend.choose_backend(Config(model=ModelConfig(backend="mlx")))
    assert asked == ("mlx", "asked for by --backend mlx")
