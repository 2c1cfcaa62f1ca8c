"""Tiny models on the MLX backend, driven like the torch ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from pippin.backends.mlx.runner import MlxRunner, load
from pippin.config import Config, ModelConfig
from pippin.models.files import local_directory
from pippin.types.step import StepPlan


class AsTorch:
    """An MLX runner whose logits are torch tensors, for ``torch_tiny.Driver``."""

    def __init__(self, runner: MlxRunner) -> None:
        self.runner = runner
        self.info = runner.info

    def allocate_kv(self, num_blocks: tuple[int, ...], block_size: int) -> None:
        self.runner.allocate_kv(num_blocks, block_size)

    def execute(self, plan: StepPlan) -> torch.Tensor | None:
        logits = self.runner.execute(plan)
        return None if logits is None else torch.from_numpy(np.array(logits))


def make_mlx(reference: Any, path: Path, **model: Any) -> AsTorch:
    """Save a transformers model and load it with MLX."""
    reference.save_pretrained(path)
    return load_mlx(path, **model)


def load_mlx(path: Path, **model: Any) -> AsTorch:
    settings = {"device": "cpu", "dtype": "float32"} | model
    config = Config(model=ModelConfig(model=str(path), **settings))
    return AsTorch(load(config, local_directory("tiny", path)))
