"""Quantised weights: every packed layout against an oracle that does not share our code."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st

from pippin.models import gguf_blocks, packed
from pippin.models.quant import QuantizedTensor
from pippin.models.tensor import DenseTensor, bfloat16_bits

TYPE = GGMLQuantizationType
HALF_AT = {
    TYPE.Q4_0: (0,),
    TYPE.Q4_1: (0, 2),
    TYPE.Q5_0: (0,),
    TYPE.Q5_1: (0, 2),
    TYPE.Q8_0: (0,),
    TYPE.Q2_K: (80, 82),
    TYPE.Q3_K: (108,),
    TYPE.Q4_K: (0, 2),
    TYPE.Q5_K: (0, 2),
    TYPE.Q6_K: (208,),
    TYPE.IQ4_NL: (0,),
    TYPE.IQ4_XS: (0,),
}
"""Where the float16 fields of a block lie: random bits there would be infinities."""


def random_blocks(kind: GGMLQuantizationType, rows: int, blocks: int) -> np.ndarray:
    rng = np.random.default_rng(int(kind))
    size = GGML_QUANT_SIZES[kind][1]
    raw = rng.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    for at in HALF_AT.get(kind, ()):
        raw[:, at : at + 2] = rng.normal(size=(len(raw), 1)).astype("<f2").view(np.uint8)
    if kind is TYPE.MXFP4:
        raw[:, 0] = rng.integers(100, 150, len(raw))
    return raw.reshape(rows, blocks * size)


@pytest.mark.parametrize("kind", list(gguf_blocks.AFFINE), ids=lambda kind: kind.name)
def test_gguf_blocks_are_exactly_what_the_gguf_library_says(kind: GGMLQuantizationType):
    raw = random_blocks(kind, rows=6, blocks=3)
    ours = gguf_blocks._affine(raw, kind)
    assert ours.codes.max() < 1 << ours.bits
    assert ours.group_size == gguf_blocks.AFFINE[kind][1]
    np.testing.assert_array_equal(ours.dequantize(), dequantize(raw, kind))


# -- The common form ------------------------------------------------------------------------------


def quantized(out=6, width=64, bits=4, group=32, seed=0, columns=None) -> QuantizedTensor:
    rng = np.random.default_rng(seed)
    return QuantizedTensor(
        rng.integers(0, 1 << bits, (out, width)).astype(np.uint8),
        rng.normal(size=(out, width // group)).astype(np.float32),
        rng.normal(size=(out, width // group)).astype(np.float32),
        bits,
        group,
        columns,
    )


def reference(tensor: QuantizedTensor) -> np.ndarray:
    """The definition, element by element."""
    out, width = tensor.shape
    weight = np.zeros((out, width), np.float32)
    for o in range(out):
        for i in range(width):
            g = i // tensor.group_size
            value = tensor.scales[o, g] * np.float32(tensor.codes[o, i]) + tensor.biases[o, g]
            weight[o, i if tensor.columns is None else tensor.columns[i]] = value
    return weight


@given(st.integers(1, 8), st.sampled_from([16, 32, 64]), st.booleans())
def test_dequantize_is_the_definition(bits: int, group: int, permuted: bool):
    columns = np.random.default_rng(1).permutation(64).astype(np.int32) if permuted else None
    tensor = quantized(bits=bits, group=group, columns=columns)
    np.testing.assert_allclose(tensor.dequantize(), reference(tensor), rtol=1e-6, atol=1e-6)


def test_permuted_columns_are_those_of_the_input():
    columns = np.random.default_rng(2).permutation(64).astype(np.int32)
    tensor = quantized(columns=columns)
    x = np.random.default_rng(3).normal(size=64).astype(np.float32)
    stored = QuantizedTensor(tensor.codes, tensor.scales, tensor.biases, 4, 32).dequantize()
    np.testing.assert_allclose(tensor.dequantize() @ x, stored @ x[columns], rtol=1e-4, atol=1e-4)


def test_rows_and_take_rows():
    tensor = quantized()
    whole = tensor.dequantize()
    np.testing.assert_array_equal(tensor.rows(2, 5).dequantize(), whole[2:5])
    order = np.array([5, 0, 3])
    np.testing.assert_array_equal(tensor.take_rows(order).dequantize(), whole[order])


def test_concat_of_mixed_bits_and_groups_is_lossless():
    parts = [quantized(bits=4, group=32), quantized(bits=6, group=16, seed=1), quantized(seed=2)]
    joined = parts[0].concat(parts[1:])
    assert (joined.bits, joined.group_size, joined.shape) == (6, 16, (18, 64))
    np.testing.assert_array_equal(
        joined.dequantize(), np.concatenate([part.dequantize() for part in parts])
    )


def test_concat_refuses_different_column_orders():
    columns = np.random.default_rng(4).permutation(64).astype(np.int32)
    plain, permuted = quantized(), quantized(columns=columns)
    assert not plain.can_concat(permuted)
    assert permuted.can_concat(quantized(columns=columns.copy()))
    with pytest.raises(ValueError, match="column order"):
        plain.concat([permuted])
    with pytest.raises(ValueError, match="width"):
        plain.concat([quantized(width=128)])


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="whole groups"):
        quantized(width=48, group=32)
    with pytest.raises(ValueError, match="scales"):
        QuantizedTensor(np.zeros((2, 64), np.uint8), np.zeros((2, 1)), np.zeros((2, 2)), 4, 32)


# -- Bit streams ----------------------------------------------------------------------------------


def pack_stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, n] to uint32 words, by Python integers: code i at bit i * bits of its row."""
    rows = []
    for row in codes:
        number = sum(int(code) << (i * bits) for i, code in enumerate(row))
        raw = number.to_bytes(len(row) * bits // 8, "little")
        rows.append(np.frombuffer(raw, "<u4"))
    return np.stack(rows)


@given(st.sampled_from([1, 2, 3, 4, 5, 6, 8]), st.integers(1, 3), st.integers(0, 2**31))
def test_unpack_inverts_packing(bits: int, blocks: int, seed: int):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (3, 32 * blocks)).astype(np.uint8)
    np.testing.assert_array_equal(packed.unpack(pack_stream(codes, bits), bits), codes)


# -- GPTQ -----------------------------------------------------------------------------------------


def pack_gptq(codes, zeros, scales, bits, version):
    """AutoGPTQ's layout, written from its description. codes [in, out], zeros [groups, out]."""
    stored = zeros - (1 if version == 1 else 0)
    qweight = pack_stream(codes.T, bits).T.view(np.int32)
    qzeros = pack_stream(stored % (1 << bits), bits).view(np.int32)
    return np.ascontiguousarray(qweight), qzeros, scales.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("order", ["none", "sorted", "act-order"])
def test_gptq(bits: int, version: int, order: str):
    rng = np.random.default_rng(bits)
    width, out, group = 128, 64, 32
    codes = rng.integers(0, 1 << bits, (width, out))
    zeros = rng.integers(1, 1 << bits, (width // group, out))
    scales = rng.normal(size=(width // group, out))
    g_idx = np.arange(width) // group
    if order == "act-order":
        g_idx = rng.permutation(g_idx)
    qweight, qzeros, scales = pack_gptq(codes, zeros, scales, bits, version)
    tensor = packed.gptq(
        qweight,
        qzeros,
        scales,
        None if order == "none" else g_idx.astype(np.int32),
        zero_offset=1 if version == 1 else 0,
    )
    expected = (scales[g_idx] * (codes - zeros[g_idx])).T
    assert (tensor.bits, tensor.group_size, tensor.shape) == (bits, group, (out, width))
    assert (tensor.columns is None) == (order != "act-order")
    np.testing.assert_allclose(tensor.dequantize(), expected, rtol=1e-5, atol=1e-5)


def test_gptq_v1_zero_point_zero_wraps():
    """Packers of format 1 store zero - 1 modulo 2**bits; the kernels add 1 and mask."""
    codes, zeros = np.full((32, 8), 5), np.zeros((1, 8), np.int64)
    qweight, qzeros, scales = pack_gptq(codes, zeros, np.ones((1, 8)), 4, version=1)
    assert packed.gptq(qweight, qzeros, scales, None, zero_offset=1).dequantize()[0, 0] == 5


def test_gptq_that_does_not_fit_is_refused():
    qweight, qzeros, scales = pack_gptq(
        np.zeros((64, 16), int), np.ones((2, 16), int), np.ones((2, 16)), 4, 1
    )
    with pytest.raises(ValueError, match="do not fit"):
        packed.gptq(qweight, qzeros[:1], scales, None, zero_offset=1)
    with pytest.raises(ValueError, match="same number"):
        packed.gptq(qweight, qzeros, scales, np.zeros(64, np.int32), zero_offset=1)


# -- AWQ ------------------------------------------------------------------------------------------


def pack_awq(values: np.ndarray) -> np.ndarray:
    """AutoAWQ's gemm layout [rows, n] to int32 [rows, n / 8], from its packing loop."""
    order_map = [0, 2, 4, 6, 1, 3, 5, 7]
    words = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
    for column in range(words.shape[1]):
        for i in range(8):
            words[:, column] |= values[:, column * 8 + order_map[i]].astype(np.uint32) << (i * 4)
    return words.view(np.int32)


def test_awq():
    rng = np.random.default_rng(0)
    width, out, group = 128, 48, 64
    codes, zeros = rng.integers(0, 16, (width, out)), rng.integers(0, 16, (width // group, out))
    scales = rng.normal(size=(width // group, out)).astype(np.float16).astype(np.float32)
    tensor = packed.awq(pack_awq(codes), pack_awq(zeros), scales)
    g = np.arange(width) // group
    assert (tensor.bits, tensor.group_size) == (4, group)
    expected = ((codes - zeros[g]) * scales[g]).T
    np.testing.assert_allclose(tensor.dequantize(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="do not fit"):
        packed.awq(pack_awq(codes), pack_awq(zeros), scales[:, :-8])


# -- MLX ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_mlx_layout(bits: int, group: int):
    expected = quantized(out=5, width=256, bits=bits, group=group)
    tensor = packed.mlx(pack_stream(expected.codes, bits), expected.scales, expected.biases, group)
    assert (tensor.bits, tensor.group_size) == (bits, group)
    np.testing.assert_array_equal(tensor.codes, expected.codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_mlx_agrees_with_mlx(bits: int, group: int):
    weight = mx.random.normal((16, 256), key=mx.random.key(bits))
    words, scales, biases = mx.quantize(weight, group_size=group, bits=bits)
    expected = mx.dequantize(words, scales, biases, group_size=group, bits=bits)
    tensor = packed.mlx(np.array(words), np.array(scales), np.array(biases), group)
    assert tensor.bits == bits
    np.testing.assert_allclose(tensor.dequantize(), np.array(expected), rtol=1e-6, atol=1e-6)


def test_mlx_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="words"):
        packed.mlx(np.zeros((2, 7), np.uint32), np.zeros((2, 1)), np.zeros((2, 1)), 64)


# -- Small floats ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e5m2"])
def test_fp8_values_are_torchs(dtype: str):
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    kind = {"float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}[dtype]
    expected = torch.from_numpy(codes).view(kind).float().numpy()
    np.testing.assert_array_equal(DenseTensor(codes, dtype).to_float32(), expected)


def test_bfloat16_rounds_as_torch():
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    values[:6] = [np.inf, -np.inf, np.nan, 0.0, -0.0, 3.3e38]
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    bits = bfloat16_bits(values)
    nan = np.isnan(values)
    np.testing.assert_array_equal(bits[~nan], expected[~nan])
    back = DenseTensor(bits, "bfloat16").to_float32()
    assert np.isnan(back[nan]).all()
    np.testing.assert_array_equal(
        back[~nan], torch.from_numpy(values).bfloat16().float().numpy()[~nan]
    )


@pytest.mark.parametrize("shape", [(256, 384), (200, 300)])
def test_block_scales(shape: tuple[int, int]):
    rng = np.random.default_rng(0)
    weight = rng.normal(size=shape).astype(np.float32)
    grid = (-(-shape[0] // 128), -(-shape[1] // 128))
    scale = rng.normal(size=grid).astype(np.float32)
    result = packed.dequantize_fp8(weight, scale, (128, 128))
    for row, column in ((0, 0), (shape[0] - 1, shape[1] - 1), (127, 128), (128, 127)):
        expected = weight[row, column] * scale[row // 128, column // 128]
        assert result[row, column] == expected
    with pytest.raises(ValueError, match="blocks"):
        packed.dequantize_fp8(weight, scale[:1], (128, 128))
    per_row = rng.normal(size=(shape[0], 1)).astype(np.float32)
    np.testing.assert_array_equal(
        packed.dequantize_fp8(weight, per_row, (128, 128)), weight * per_row
    )
