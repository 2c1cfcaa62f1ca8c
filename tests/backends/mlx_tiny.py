"""Tiny models on the MLX backend, driven like the torch ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_tiny import MODELS

from pippin.backends.mlx.runner import MlxRunner, load
from pippin.config import Config, ModelConfig
from pippin.models.files import local_directory
from pippin.types.step import StepPlan

#: What differs from the torch backend's models, and what only MLX runs.
MLX_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **MODELS,
    # mlx-lm's file takes the width of a head from the hidden size.
    "phi3": ("phi3", {"partial_rotary_factor": 0.5}),
    "glm4_moe": (
        "glm4_moe",
        {
            "head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
}


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
