"""Loading: what is missing, broken or not supported is told in one of Pippin's own errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_tiny import MODELS, make_reference, make_runner

from pippin.backends.torch.device import choose_device
from pippin.backends.torch.runner import load_checkpoint
from pippin.config import Config, ModelConfig
from pippin.errors import ConfigError, ModelInvalid, OutOfMemory, UnsupportedModel
from pippin.models.checkpoint import Checkpoint, open_checkpoint
from pippin.models.files import local_directory
from pippin.types.model import KVKind
from pippin.types.step import StepPlan

CONFIG = Config(model=ModelConfig(device="cpu", dtype="float32"))


class Changed:
    """A checkpoint with some weights gone and some configuration changed."""

    def __init__(self, inner: Checkpoint, gone: str = "", **config: Any) -> None:
        self.config = inner.config | config
        self.quantization = inner.quantization
        self._inner = inner
        self._gone = gone

    def names(self) -> frozenset[str]:
        return frozenset(name for name in self._inner.names() if name != self._gone)

    def tensor(self, name: str):
        return self._inner.tensor(name)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    make_reference("llama", {}).save_pretrained(tmp_path)
    return open_checkpoint(local_directory("tiny", tmp_path))


def load(checkpoint: Checkpoint):
    return load_checkpoint(CONFIG, checkpoint, name="tiny", fingerprint="f")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_weight_is_named(checkpoint: Checkpoint, name: str):
    with pytest.raises(ModelInvalid, match=name.replace(".", r"\.")):
        load(Changed(checkpoint, gone=name))


def test_an_unknown_architecture_is_refused(checkpoint: Checkpoint):
    with pytest.raises(UnsupportedModel, match="Strange") as caught:
        load(Changed(checkpoint, model_type="strange", architectures=["StrangeForCausalLM"]))
    assert "llama" in (caught.value.hint or "")


def test_a_configuration_without_sense_is_refused(checkpoint: Checkpoint):
    with pytest.raises(ModelInvalid):
        load(Changed(checkpoint, hidden_size="wide"))


def test_devices_that_are_not_here(tmp_path: Path):
    for name in ("cuda:99", "tpu", "nonsense"):
        with pytest.raises(ConfigError):
            choose_device(Config(model=ModelConfig(device=name)), {})


def test_what_a_runner_says_of_itself(tmp_path: Path):
    runner = make_runner(make_reference("gemma3_text", MODELS["gemma3"][1]), tmp_path)
    info = runner.info
    assert info.architecture == "Gemma3ForCausalLM"
    assert (info.num_layers, info.vocab_size, info.max_position_embeddings) == (3, 151, 256)
    full, window = info.kv_groups
    assert (full.kind, full.layers, full.window) == (KVKind.FULL, (1,), None)
    assert (window.kind, window.layers, window.window) == (KVKind.WINDOW, (0, 2), 9)
    # Keys and values, 2 heads of 16, float32.
    assert full.bytes_per_token == 2 * 2 * 16 * 4
    assert window.bytes_per_token == 2 * full.bytes_per_token
    assert info.weights_bytes > 0
    assert "cpu" in runner.device


def test_latent_pages_hold_the_latent_only(tmp_path: Path):
    runner = make_runner(make_reference("deepseek_v3", MODELS["deepseek_v3"][1]), tmp_path)
    (group,) = runner.info.kv_groups
    assert group.kind is KVKind.LATENT
    assert group.bytes_per_token == 3 * (16 + 8) * 4


def test_kv_bytes_are_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from pippin.backends.torch import runner as module

    runner = make_runner(make_reference("llama", {}), tmp_path)
    assert runner.available_kv_bytes(64, 4) > 0
    monkeypatch.setattr(module, "free_memory", lambda device: (1000, 10000))
    with pytest.raises(OutOfMemory) as caught:
        runner.available_kv_bytes(64, 4)
    assert caught.value.hint


def test_an_empty_plan_only_forgets(tmp_path: Path):
    runner = make_runner(make_reference("llama", {}), tmp_path)
    runner.allocate_kv((4,), 4)
    assert runner.execute(StepPlan(step=0, chunks=(), freed=(3,))) is None


def test_a_float16_checkpoint_is_computed_in_what_was_asked(tmp_path: Path):
    reference = make_reference("llama", {}).to(torch.float16)
    runner = make_runner(reference, tmp_path)
    assert runner.info.dtype == "float32"
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
