"""Every architecture on both backends: prefix pages, quantised repositories, agreement.

With the plain checks of ``test_torch_models``, ``test_mlx_models`` and the GGUF ones, these make
the table of docs/models.md (``models_table``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mlx_repo import write_quantised
from mlx_tiny import MLX_MODELS, load_mlx, make_mlx
from test_torch_models import LENGTHS, prompts, random_steps
from torch_tiny import MODELS, Driver, make_reference, make_runner
from torch_tiny import reference_logits as expected

from pippin.backends.torch.runner import load as load_torch
from pippin.config import Config, ModelConfig
from pippin.models.files import local_directory

pytestmark = pytest.mark.slow

#: Widths in whole groups of 32.
_WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
}
_WIDE_EXPERTS = {"moe_intermediate_size": 64}
_WIDE_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 32, "v_head_dim": 16}


def check(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert actual.shape == wanted.shape
    torch.testing.assert_close(actual, wanted, atol=1e-3, rtol=0)


def run_all(runner: Any, tokens: dict[int, list[int]], seed: int) -> dict[int, torch.Tensor]:
    """In chunks and mixed batches."""
    driver = Driver(runner, num_blocks=64, seed=seed)
    for seq, ids in tokens.items():
        driver.add(seq, ids)
    return driver.run(random_steps(LENGTHS, seed=seed))


def share_prefix(runner: Any, reference: Any) -> None:
    driver = Driver(runner, num_blocks=64)
    common = prompts((9,))[0]
    tokens = {seq: common + tail for seq, tail in prompts((8, 15), seed=1).items()}
    driver.add(0, tokens[0])
    driver.step({0: 9})
    driver.add(1, tokens[1], prefix_of=0)
    assert driver.sequences[1].done == 8
    logits = driver.run([{0: 3, 1: 5}, {1: 1, 0: 5}, {1: len(tokens[1]) - 14}])
    check(logits[0], expected(reference, tokens[0])[9:])
    check(logits[1], expected(reference, tokens[1])[8:])


@pytest.mark.parametrize("name", MODELS)
def test_prefix_pages_on_torch(name: str, tmp_path: Path) -> None:
    reference = make_reference(*MODELS[name])
    share_prefix(make_runner(reference, tmp_path), reference)


@pytest.mark.parametrize("name", MLX_MODELS)
def test_prefix_pages_on_mlx(name: str, tmp_path: Path) -> None:
    reference = make_reference(*MLX_MODELS[name])
    share_prefix(make_mlx(reference, tmp_path), reference)


@pytest.mark.parametrize("name", MODELS)
def test_both_backends_agree(name: str, tmp_path: Path) -> None:
    reference = make_reference(*MLX_MODELS[name])
    tokens = prompts(LENGTHS, seed=2)
    own = run_all(make_runner(reference, tmp_path), tokens, seed=2)
    other = run_all(load_mlx(tmp_path), tokens, seed=3)
    for seq in tokens:
        check(other[seq], own[seq])


def wide(name: str) -> Any:
    kind, changes = MLX_MODELS[name]
    experts = _WIDE_EXPERTS if "moe_intermediate_size" in changes else {}
    latent = _WIDE_LATENT if "kv_lora_rank" in changes else {}
    rank = {"q_lora_rank": 32} if changes.get("q_lora_rank") else {}
    return make_reference(kind, {**changes, **_WIDE, **experts, **latent, **rank})


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_quantised_repositories_on_torch(name: str, bits: int, tmp_path: Path) -> None:
    reference = write_quantised(wide(name), tmp_path, bits)
    settings = ModelConfig(model=str(tmp_path), device="cpu", dtype="float32")
    runner = load_torch(Config(model=settings), local_directory("tiny", tmp_path))
    tokens = prompts(LENGTHS, seed=4)
    logits = run_all(runner, tokens, seed=4)
    for seq, ids in tokens.items():
        check(logits[seq], expected(reference, ids))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", MLX_MODELS)
def test_quantised_repositories_on_mlx(name: str, bits: int, tmp_path: Path) -> None:
    reference = write_quantised(wide(name), tmp_path, bits)
    runner = load_mlx(tmp_path)
    assert runner.info.quantization == f"mlx-{bits}bit"
    tokens = prompts(LENGTHS, seed=4)
    logits = run_all(runner, tokens, seed=4)
    for seq, ids in tokens.items():
        check(logits[seq], expected(reference, ids))
