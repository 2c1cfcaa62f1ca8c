"""GPTQ, AWQ, MLX and fp8 checkpoints through the torch runner.

A tiny Llama is quantised and packed here by each format's published layout; the oracle is
transformers with the dequantised weights, in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch_tiny import MODELS, Driver, make_reference, reference_logits
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pippin.backends.torch.runner import load
from pippin.config import Config, ModelConfig
from pippin.models.checkpoint import open_checkpoint
from pippin.models.files import resolve

TOKENS = [int(x) for x in torch.randint(3, 151, (60,), generator=torch.Generator().manual_seed(5))]
GROUP = 64
Packed = tuple[np.ndarray, dict[str, np.ndarray]]
"""A weight after quantisation as float32 [out, in], and its tensors by suffix."""
Packer = Callable[[str, np.ndarray], Packed | None]
"""From a module's name and weight; None leaves it dense."""


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """[..., n] to int32 [..., n * bits / 32], lowest bits first."""
    per_word = 32 // bits
    parts = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, per_word)
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    return np.bitwise_or.reduce(parts << shifts, axis=-1).view(np.int32)


def affine(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [out, in], scales and integer zero points [out, groups] by minimum and maximum."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
    scales = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.round(-low / scales), 1, 2**bits - 1)
    codes = np.clip(np.round(groups / scales[..., None]) + zeros[..., None], 0, 2**bits - 1)
    return codes.reshape(weight.shape), scales, zeros


def restore(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    spread = [np.repeat(part, GROUP, axis=1) for part in (scales, zeros)]
    return ((codes - spread[1]) * spread[0]).astype(np.float32)


def gptq(bits: int, version: int, act_order: bool) -> Packer:
    def packer(name: str, weight: np.ndarray) -> Packed | None:
        if "self_attn" not in name and "mlp" not in name:
            return None
        width = weight.shape[1]
        # All weights that read the same input share its order, as in real act-order files.
        order = np.random.default_rng(width).permutation(width) if act_order else np.arange(width)
        codes, scales, zeros = affine(weight[:, order], bits)
        result = np.empty_like(weight)
        result[:, order] = restore(codes, scales, zeros)
        unsorted = np.empty_like(codes)
        unsorted[:, order] = codes
        g_idx = np.empty(width, np.int32)
        g_idx[order] = np.arange(width) // GROUP
        return result, {
            ".qweight": pack(unsorted, bits).T,
            ".qzeros": pack((zeros - (version == 1)).T, bits),
            ".scales": scales.T.astype(np.float16),
            ".g_idx": g_idx,
        }

    return packer


def awq(name: str, weight: np.ndarray) -> Packed | None:
    if "self_attn" not in name and "mlp" not in name:
        return None
    codes, scales, zeros = affine(weight, 4)

    def interleaved(values: np.ndarray) -> np.ndarray:
        columns = values.reshape(values.shape[0], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return pack(columns.reshape(values.shape), 4)

    return restore(codes, scales, zeros), {
        ".qweight": interleaved(np.ascontiguousarray(codes.T)),
        ".qzeros": interleaved(np.ascontiguousarray(zeros.T)),
        ".scales": scales.T.astype(np.float16),
    }


def compressed(bits: int, symmetric: bool) -> Packer:
    """compressed-tensors' pack-quantized: codes and zeros shifted by half the range."""

    def packer(name: str, weight: np.ndarray) -> Packed | None:
        if "self_attn" not in name and "mlp" not in name:
            return None
        codes, scales, zeros = affine(weight, bits)
        if symmetric:
            zeros = np.full_like(zeros, 2 ** (bits - 1))
        parts = {
            ".weight_packed": pack(codes, bits),
            ".weight_scale": scales,
            ".weight_shape": np.array(weight.shape, np.int64),
        }
        if not symmetric:
            parts[".weight_zero_point"] = pack(np.ascontiguousarray(zeros.T), bits).T
        return restore(codes, scales, zeros), parts

    return packer


def mlx(bits_of: Callable[[str], tuple[int, int] | None]) -> Packer:
    """Quantised by MLX itself; as mlx-lm does, embedding and head included."""

    def packer(name: str, weight: np.ndarray) -> Packed | None:
        chosen = bits_of(name)
        if chosen is None:
            return None
        bits, group = chosen
        words, scales, biases = mx.quantize(mx.array(weight), group_size=group, bits=bits)
        result = mx.dequantize(words, scales, biases, group_size=group, bits=bits)
        return np.array(result), {
            ".weight": np.array(words),
            ".scales": np.array(scales),
            ".biases": np.array(biases),
        }

    return packer


def fp8(name: str, weight: np.ndarray) -> Packed | None:
    """DeepSeek's: e4m3 with a scale for each block of 128 x 128."""
    if "self_attn" not in name and "mlp" not in name:
        return None
    rows, columns = weight.shape
    scale = np.empty((-(-rows // 128), -(-columns // 128)), np.float32)
    stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    result = np.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
            scale[i, j] = np.abs(weight[block]).max() / 448
            stored[block] = torch.from_numpy(weight[block] / scale[i, j]).to(stored.dtype)
            result[block] = stored[block].float().numpy() * scale[i, j]
    return result, {".weight": stored.view(torch.uint8).numpy(), ".weight_scale_inv": scale}


def mixed(name: str) -> tuple[int, int] | None:
    if "embed_tokens" in name or "v_proj" in name:
        return 8, 32
    return None if "o_proj" in name else (4, 64)


MIXED = {
    "group_size": 64,
    "bits": 4,
    "model.embed_tokens": {"group_size": 32, "bits": 8},
    **{f"model.layers.{i}.self_attn.v_proj": {"group_size": 32, "bits": 8} for i in range(3)},
    **{f"model.layers.{i}.self_attn.o_proj": False for i in range(3)},
}


def gptq_config(bits: int, **more: Any) -> dict[str, Any]:
    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": False}
    return {"quantization_config": settings | more}


def compressed_config(bits: int) -> dict[str, Any]:
    group = {"weights": {"num_bits": bits, "type": "int", "group_size": GROUP}}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": group},
        }
    }


FORMATS: dict[str, tuple[Packer, dict[str, Any], str]] = {
    "gptq-4": (gptq(4, 1, False), gptq_config(4), "gptq-4bit"),
    "gptq-4-v2": (gptq(4, 2, False), gptq_config(4, checkpoint_format="gptq_v2"), "gptq-4bit"),
    "gptq-4-act-order": (gptq(4, 1, True), gptq_config(4, desc_act=True), "gptq-4bit"),
    "gptq-8": (gptq(8, 1, False), gptq_config(8), "gptq-8bit"),
    "awq-4": (
        awq,
        {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemm"}},
        "awq-4bit",
    ),
    "mlx-4": (mlx(lambda _: (4, 64)), {"quantization": {"group_size": 64, "bits": 4}}, "mlx-4bit"),
    "mlx-8": (mlx(lambda _: (8, 32)), {"quantization": {"group_size": 32, "bits": 8}}, "mlx-8bit"),
    "mlx-3": (mlx(lambda _: (3, 64)), {"quantization": {"group_size": 64, "bits": 3}}, "mlx-3bit"),
    "mlx-6": (
        mlx(lambda _: (6, 128)),
        {"quantization": {"group_size": 128, "bits": 6}},
        "mlx-6bit",
    ),
    "mlx-mixed": (mlx(mixed), {"quantization": MIXED}, "mlx-4bit-mixed"),
    "compressed-tensors-4": (
        compressed(4, False),
        compressed_config(4),
        "compressed-tensors-4bit",
    ),
    "compressed-tensors-8": (compressed(8, True), compressed_config(8), "compressed-tensors-8bit"),
    "fp8": (
        fp8,
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        "fp8",
    ),
}


def write(reference: Any, path: Path, packer: Packer, settings: dict[str, Any]) -> None:
    """Save the model packed, and put the dequantised weights into ``reference``."""
    path.mkdir()
    config = reference.config.to_dict() | settings
    (path / "config.json").write_text(json.dumps(config))
    tensors, state = {}, reference.state_dict()
    for name, tensor in list(state.items()):
        module = name.removesuffix(".weight")
        done = packer(module, tensor.numpy().copy()) if tensor.ndim == 2 else None
        if done is None:
            tensors[name] = tensor.clone()
            continue
        result, parts = done
        state[name] = torch.from_numpy(np.array(result, np.float32))
        for suffix, part in parts.items():
            tensors[module + suffix] = torch.from_numpy(np.ascontiguousarray(part))
            if ".weight_scale_inv" in parts and suffix == ".weight":
                tensors[module + suffix] = tensors[module + suffix].view(torch.float8_e4m3fn)
    reference.load_state_dict(state)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_those_of_the_dequantised_weights(name: str, tmp_path: Path):
    packer, settings, label = FORMATS[name]
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
    reference = make_reference("llama", {**sizes, "initializer_range": 0.1})
    before = reference.model.layers[1].mlp.down_proj.weight.clone()
    path = tmp_path / "m"
    write(reference, path, packer, settings)
    files = resolve(str(path), home=tmp_path)
    assert open_checkpoint(files).quantization == label
    config = Config(model=ModelConfig(model=str(path), device="cpu", dtype="float32"))
    driver = Driver(load(config, files), num_blocks=64)
    driver.add(0, TOKENS)
    actual = driver.run([{0: 30}, {0: 1}, {0: len(TOKENS) - 31}])[0]
    assert (actual - reference_logits(reference, TOKENS)).abs().max() < 1e-3
    # What was compared is a quantised model, near to the first one.
    after = reference.model.layers[1].mlp.down_proj.weight
    error = (after - before).abs().mean() / before.abs().mean()
    if name != "compressed-tensors-8":  # Its zero points were moved: another model altogether.
        assert 0 < error < (0.3 if name == "mlx-3" else 0.15)


def test_gpt_oss_as_the_hub_has_it(tmp_path: Path):
    """Experts as MXFP4 blocks and scales; transformers' own conversion is the oracle."""
    kind, changes = MODELS["gpt_oss"]
    reference = make_reference(kind, {**changes, "hidden_size": 64, "intermediate_size": 32})
    path = tmp_path / "m"
    path.mkdir()
    settings = {"quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(reference.config.to_dict() | settings))
    generator = torch.Generator().manual_seed(0)
    tensors, state = {}, reference.state_dict()
    for name, tensor in list(state.items()):
        if not name.endswith((".gate_up_proj", ".down_proj")):
            tensors[name] = tensor.clone()
            continue
        experts, width, out = tensor.shape
        shape = (experts, out, width // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        state[name] = convert_moe_packed_tensors(blocks, scales).float()
    reference.load_state_dict(state)
    save_file(tensors, path / "model.safetensors")
    config = Config(model=ModelConfig(model=str(path), device="cpu", dtype="float32"))
    driver = Driver(load(config, resolve(str(path), home=tmp_path)), num_blocks=64)
    driver.add(0, TOKENS)
    actual = driver.run([{0: 30}, {0: len(TOKENS) - 30}])[0]
    expected = reference_logits(reference, TOKENS)
    assert (actual - expected).abs().max() < 1e-3 * expected.abs().max().clamp(min=1)
