"""Columns of weights, as ranks of a tensor-parallel group take them, lose nothing."""

from __future__ import annotations

import numpy as np
import pytest

from pippin.models.quant import QuantizedTensor
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
