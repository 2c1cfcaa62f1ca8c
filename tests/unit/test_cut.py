"""Columns of weights, as ranks of a tensor-parallel group take them, lose nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pippin.config import environment
from pippin.models.checkpoint import InParts, open_checkpoint
from pippin.models.files import resolve
from pippin.models.quant import QuantizedTensor
from pippin.models.safetensors_dir import SafetensorsCheckpoint
from pippin.models.tensor import DenseTensor


def quantized(group: int, columns: np.ndarray | None = None) -> QuantizedTensor:
    random = np.random.default_rng(group)
    out, width = 6, 384
    return QuantizedTensor(
        codes=random.integers(0, 16, (out, width), dtype=np.uint8),
        scales=random.normal(size=(out, width // group)).astype(np.float32),
        biases=random.normal(size=(out, width // group)).astype(np.float32),
        bits=4,
        group_size=group,
        columns=columns,
    )


@pytest.mark.parametrize(
    ("group", "start", "stop", "left"),
    [
        (32, 0, 384, 32),
        (32, 64, 192, 32),
        (128, 128, 256, 128),
        (128, 0, 192, 64),
        (128, 192, 384, 64),
        (64, 96, 160, 32),
    ],
)
def test_groups_become_as_small_as_they_must(group: int, start: int, stop: int, left: int) -> None:
    weight = quantized(group)
    part = weight.cut(start, stop)
    assert isinstance(part, QuantizedTensor)
    assert part.group_size == left
    assert part.codes.flags.c_contiguous
    np.testing.assert_array_equal(part.dequantize(), weight.dequantize()[:, start:stop])


def test_permuted_columns_come_dense_in_the_weights_own_order() -> None:
    order = np.random.default_rng(0).permutation(384).astype(np.int32)
    weight = quantized(64, order)
    part = weight.cut(128, 256)
    assert isinstance(part, DenseTensor)
    np.testing.assert_array_equal(part.to_float32(), weight.dequantize()[:, 128:256])


def test_dense_columns_are_views_of_the_file() -> None:
    data = np.arange(60, dtype=np.uint16).reshape(3, 4, 5)
    part = DenseTensor(data, "bfloat16").cut(1, 3)
    assert part.shape == (3, 4, 2)
    assert part.dtype == "bfloat16"
    assert np.shares_memory(part.data, data)
    np.testing.assert_array_equal(part.data, data[..., 1:3])


@pytest.mark.model
def test_parts_of_a_gguf_file_are_read_alone() -> None:
    checkpoint = open_checkpoint(resolve("demo", home=environment().home))
    assert isinstance(checkpoint, InParts)
    read = 0
    for name in sorted(checkpoint.names()):
        weight = checkpoint.tensor(name)
        if ".layers.0." not in name or len(weight.shape) < 2:
            continue
        rows, columns = slice(64, 128), slice(64, 192)
        for some_rows, some_columns in ((rows, None), (None, columns), (rows, columns)):
            part = checkpoint.part(name, some_rows, some_columns)
            if part is None:
                # Queries and keys are turned from GGUF's order of rows.
                assert "q_proj" in name or "k_proj" in name
                continue
            read += 1
            assert isinstance(part, QuantizedTensor)
            assert isinstance(weight, QuantizedTensor)
            wanted = weight.dequantize()[some_rows or slice(None), some_columns or slice(None)]
            np.testing.assert_array_equal(part.dequantize(), wanted)
    assert read == 3 * 5
    assert checkpoint.part("model.layers.0.input_layernorm.weight", rows, None) is None
    assert checkpoint.part("model.layers.0.mlp.down_proj.weight", None, slice(16, 48)) is None


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (3, 64), (6, 32), (8, 128)])
def test_parts_of_mlx_weights_are_read_alone(bits: int, group: int, tmp_path: Path) -> None:
    random = np.random.default_rng(bits)
    words = random.integers(0, 1 << 32, (64, 512 * bits // 32), dtype=np.uint32)
    floats = random.normal(size=(2, 64, 512 // group)).astype(np.float32)
    names = ("model.layers.0.mlp.up_proj", "model.embed_tokens")
    save_file(
        {
            f"{name}{suffix}": array
            for name in names
            for suffix, array in zip(
                (".weight", ".scales", ".biases"), (words, *floats), strict=True
            )
        },
        tmp_path / "model.safetensors",
    )
    settings = {"group_size": group, "bits": bits}
    config = {"model_type": "llama", "num_hidden_layers": 1, "quantization": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    weight = checkpoint.tensor(f"{names[0]}.weight")
    assert isinstance(weight, QuantizedTensor)
    for rows, columns in (
        (slice(8, 40), None),
        (None, slice(128, 384)),
        (slice(0, 3), slice(0, 128)),
    ):
        part = checkpoint.part(f"{names[0]}.weight", rows, columns)
        assert isinstance(part, QuantizedTensor)
        wanted = weight.dequantize()[rows or slice(None), columns or slice(None)]
        np.testing.assert_array_equal(part.dequantize(), wanted)
    assert checkpoint.part(f"{names[0]}.weight", None, slice(16, 512)) is None
