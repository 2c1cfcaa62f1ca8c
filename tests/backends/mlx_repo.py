"""Writes a model as an MLX-quantised repository, and gives back its dequantised weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

GROUP = 32

_EXPERT = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(\w+_proj)\.weight")
_DENSE = re.compile(r"\.mlp\.gate\.|\.router\.")


def write_quantised(reference: Any, path: Path, bits: int) -> Any:
    """Save ``reference`` with embedding, head, linears and experts in ``bits`` bits, as mlx-lm
    does (experts stacked), at ``path``; returns a transformers model of the dequantised weights."""
    reference.save_pretrained(path / "dense")
    tensors = load_file(path / "dense" / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, tensor in list(tensors.items()):
        # Routers stay dense. GPT-OSS's experts, [experts, in, out], have no affine form that both
        # backends read, and biases [experts, out].
        if tensor.ndim != 2 or not name.endswith(".weight") or _DENSE.search(name):
            packed[name] = tensor
            continue
        parts, tensors[name] = _quantise(tensor, bits)
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            module = name.removesuffix(".weight")
            packed |= {f"{module}.{part}": value for part, value in parts.items()}
        else:
            layer, number, projection = expert.groups()
            stacks.setdefault(f"{layer}.switch_mlp.{projection}", {})[int(number)] = parts
    for module, experts in stacks.items():
        for part in ("weight", "scales", "biases"):
            in_order = [experts[number][part] for number in range(len(experts))]
            packed[f"{module}.{part}"] = torch.stack(in_order)
    save_file(tensors, path / "dense" / "model.safetensors", {"format": "pt"})
    save_file(packed, path / "model.safetensors")
    config = json.loads((path / "dense" / "config.json").read_text())
    config["quantization"] = {"group_size": GROUP, "bits": bits}
    (path / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(
        path / "dense", dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _quantise(tensor: torch.Tensor, bits: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    parts = mx.quantize(mx.array(tensor.numpy()), group_size=GROUP, bits=bits)
    values = mx.dequantize(*parts, group_size=GROUP, bits=bits)
    names = ("weight", "scales", "biases")
    stored = {name: _torch(part) for name, part in zip(names, parts, strict=True)}
    return stored, _torch(values)


def _torch(array: mx.array) -> torch.Tensor:
    return torch.from_numpy(np.array(array))
