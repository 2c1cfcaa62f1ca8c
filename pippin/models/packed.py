"""Packed integer weights of safetensors checkpoints: GPTQ, AWQ and MLX's affine quantisation.

All three are streams of codes in 32-bit words, lowest bits first; they differ in the direction of
packing and in how zero points are kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.models.quant import QuantizedTensor
from pippin.models.tensor import FloatArray, bfloat16_bits

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of a group of eight in each nibble of a word, lowest nibble first (AutoAWQ, "gemm")."""

FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The values of e2m1, by code."""


def unpack(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Codes of ``bits`` bits from 32-bit words: [..., n] to [..., 32 n / bits].

    The words of a row are one little-endian bit stream: with 3, 5 and 6 bits codes cross words.
    """
    stream = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return stream
    if bits in (1, 2, 4):
        mask = np.uint8((1 << bits) - 1)
        parts = [(stream >> np.uint8(shift)) & mask for shift in range(0, 8, bits)]
        return np.stack(parts, axis=-1).reshape(*stream.shape[:-1], -1)
    # Eight codes fill ``bits`` bytes: gather these in one integer, then shift each code out.
    octets = stream.reshape(-1, bits)
    gathered = np.zeros(len(octets), np.uint64)
    for byte in range(bits):
        gathered |= octets[:, byte].astype(np.uint64) << np.uint64(8 * byte)
    codes = np.empty((len(octets), 8), np.uint8)
    for code in range(8):
        codes[:, code] = (gathered >> np.uint64(code * bits)) & np.uint64((1 << bits) - 1)
    return codes.reshape(*stream.shape[:-1], -1)


def mlx(
    words: NDArray[Any], scales: FloatArray, biases: FloatArray, group_size: int
) -> QuantizedTensor:
    """``words``: uint32 [out, in * bits / 32]; scales and biases [out, in / group_size].

    Source: mlx ``quantize``. ``bits`` follows from the shapes. Raises ``ValueError`` if none fits.
    """
    width = scales.shape[-1] * group_size
    bits, rest = divmod(words.shape[-1] * 32, width)
    if rest or not 1 <= bits <= 8:
        raise ValueError(f"{words.shape[-1]} words for {width} columns in groups of {group_size}")
    return QuantizedTensor(unpack(words, bits), scales, biases, bits, group_size)


def gptq(
    qweight: NDArray[np.int32],
    qzeros: NDArray[np.int32],
    scales: FloatArray,
    g_idx: NDArray[np.int32] | None,
    *,
    zero_offset: int,
) -> QuantizedTensor:
    """``qweight`` [in * bits / 32, out], ``qzeros`` [groups, out * bits / 32], scales [groups, out]

    ``zero_offset``: 1 where stored zero points are one too low (format "gptq"), 0 for "gptq_v2".
    ``g_idx`` [in]: group of each input column; with act-order it is not sorted. Source: AutoGPTQ's
    ``qlinear``. Raises ``ValueError`` for shapes that do not belong together.
    """
    groups, out = scales.shape
    bits, rest = divmod(qzeros.shape[1] * 32, out)
    if rest or bits not in (2, 3, 4, 8) or qzeros.shape[0] != groups:
        raise ValueError(f"qzeros {qzeros.shape} and scales {scales.shape} do not fit")
    codes = unpack(qweight.T, bits)
    zeros = unpack(qzeros, bits).astype(np.float32) + zero_offset
    if zero_offset:
        # v1 kernels mask after adding one: a stored "all ones" is the zero point 0.
        zeros %= 1 << bits
    scale = np.ascontiguousarray(scales.T)
    bias = np.ascontiguousarray(-(zeros * scales).T)
    return _with_groups(codes, scale, bias, bits, g_idx)


def awq(
    qweight: NDArray[np.int32], qzeros: NDArray[np.int32], scales: FloatArray
) -> QuantizedTensor:
    """``qweight`` [in, out / 8], ``qzeros`` [groups, out / 8], scales [groups, out]; 4 bits.

    Source: AutoAWQ, version "gemm". Raises ``ValueError`` for shapes that do not belong together.
    """
    groups, out = scales.shape
    if qweight.shape[1] * 8 != out or qzeros.shape != (groups, out // 8):
        raise ValueError(
            f"qweight {qweight.shape}, qzeros {qzeros.shape} and scales {scales.shape} do not fit"
        )
    codes = np.ascontiguousarray(_awq_columns(qweight).T)
    zeros = _awq_columns(qzeros).astype(np.float32)
    scale = np.ascontiguousarray(scales.T)
    bias = np.ascontiguousarray(-(zeros * scales).T)
    return _with_groups(codes, scale, bias, 4, None)


def compressed_tensors(
    weight_packed: NDArray[np.int32],
    scale: FloatArray,
    zero_point: NDArray[np.int32] | None,
    g_idx: NDArray[np.int32] | None,
    width: int,
) -> QuantizedTensor:
    """``weight_packed`` [out, in * bits / 32] (padded to words), ``scale`` [out, groups],
    ``zero_point`` [out * bits / 32, groups] or None (symmetric), ``g_idx`` [in] or None.

    ``width`` is "in". Source: compressed-tensors ``pack_quantized``, which shifts signed codes and
    zero points by half the range. Raises ``ValueError`` for shapes that do not belong together.
    """
    words = -(-width * 4 // 32), -(-width * 8 // 32)
    if weight_packed.shape[1] not in words:
        raise ValueError(f"{weight_packed.shape[1]} words for {width} columns")
    bits = 4 if weight_packed.shape[1] == words[0] else 8
    codes = np.ascontiguousarray(unpack(weight_packed, bits)[:, :width])
    if zero_point is None:
        bias = scale * np.float32(-(1 << (bits - 1)))
    else:
        zeros = unpack(zero_point.T, bits)[:, : scale.shape[0]].T
        bias = -(zeros.astype(np.float32) * scale)
    if g_idx is not None and g_idx.min() < 0:
        g_idx = None  # Written as -1 where groups are in order.
    return _with_groups(codes, scale, np.ascontiguousarray(bias), bits, g_idx)


def _awq_columns(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    nibbles = unpack(words, 4).reshape(words.shape[0], -1, 8)
    columns = np.empty_like(nibbles)
    columns[:, :, AWQ_ORDER] = nibbles
    return columns.reshape(words.shape[0], -1)


def _with_groups(
    codes: NDArray[np.uint8],
    scale: FloatArray,
    bias: FloatArray,
    bits: int,
    g_idx: NDArray[np.int32] | None,
) -> QuantizedTensor:
    width, groups = codes.shape[1], scale.shape[1]
    if width % groups:
        raise ValueError(f"{width} columns in {groups} groups")
    group_size = width // groups
    columns = None
    if g_idx is not None and not np.array_equal(g_idx, np.arange(width) // group_size):
        columns = np.argsort(g_idx, kind="stable").astype(np.int32)
        if not np.array_equal(g_idx[columns], np.arange(width) // group_size):
            raise ValueError("g_idx does not give every group the same number of columns")
        codes = np.take(codes, columns, axis=1)
    return QuantizedTensor(np.ascontiguousarray(codes), scale, bias, bits, group_size, columns)


def dequantize_mxfp4(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """GPT-OSS's experts: ``blocks`` [experts, out, in / 32, 16] with two codes a byte (low half
    first), ``scales`` [experts, out, in / 32] (e8m0). Returns bfloat16 bits [experts, in, out],
    which hold the values exactly. Source: OCP Microscaling Formats 1.0.
    """
    if scales.shape != blocks.shape[:-1] or blocks.shape[-1] != 16:
        raise ValueError(f"blocks {blocks.shape} and scales {scales.shape} do not fit")
    experts, out, groups, _ = blocks.shape
    result = np.empty((experts, groups * 32, out), np.uint16)
    # One expert at a time: as float32 all of them may not fit in memory.
    for expert in range(experts):
        codes = np.stack([blocks[expert] & np.uint8(15), blocks[expert] >> np.uint8(4)], axis=-1)
        values = FP4_VALUES[codes].reshape(out, groups, 32)
        values = np.ldexp(values, scales[expert].astype(np.int32)[:, :, None] - 127)
        result[expert] = bfloat16_bits(values.reshape(out, -1)).T
    return result


def dequantize_fp8(weight: FloatArray, scale: FloatArray, block: tuple[int, int]) -> FloatArray:
    """``weight`` [out, in] times its blocks' scales [ceil(out / b0), ceil(in / b1)].

    Source: DeepSeek-V3's ``weight_dequant``. A scale of one number, or one a row, fits as well.
    """
    rows, columns = weight.shape
    if scale.shape == (-(-rows // block[0]), -(-columns // block[1])):
        full = np.repeat(np.repeat(scale, block[0], axis=0), block[1], axis=1)
        return weight * full[:rows, :columns]
    if scale.size in (1, rows):
        return weight * scale.reshape(-1, 1)
    raise ValueError(f"scales {scale.shape} for {weight.shape} in blocks of {block}")
