"""GGUF's block types as group-wise affine weights.

Layouts: ggml's ``ggml-common.h`` and ``ggml-quants.c``. Scales and biases are products of at most a
float16 and an 8-bit integer, so float32 holds them exactly; the tests compare each type with the
gguf library's own dequantisation. Types that are not affine in small groups (the IQ grids, TQ) are
dequantised by that library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from pippin.errors import UnsupportedModel
from pippin.models.gguf_file import GgufTensor
from pippin.models.quant import QuantizedTensor, Tensor
from pippin.models.tensor import DenseDType, DenseTensor, FloatArray

Bytes = NDArray[np.uint8]
TWO, FOUR, LOW = np.uint8(2), np.uint8(4), np.uint8(0x0F)
Affine = tuple[Bytes, FloatArray, FloatArray]
"""Codes [blocks, values of a block], scales and biases [blocks, groups of a block]."""

_DENSE: dict[GGMLQuantizationType, tuple[DenseDType, str]] = {
    GGMLQuantizationType.F32: ("float32", "<f4"),
    GGMLQuantizationType.F16: ("float16", "<f2"),
    GGMLQuantizationType.BF16: ("bfloat16", "<u2"),
    GGMLQuantizationType.F64: ("float64", "<f8"),
    GGMLQuantizationType.I8: ("int8", "<i1"),
    GGMLQuantizationType.I16: ("int16", "<i2"),
    GGMLQuantizationType.I32: ("int32", "<i4"),
    GGMLQuantizationType.I64: ("int64", "<i8"),
}


def read(
    tensor: GgufTensor,
    index: int | None = None,
    rows: slice | None = None,
    columns: slice | None = None,
) -> Tensor:
    """A tensor of a GGUF file; of a stacked one (experts), part ``index`` of its first axis.

    Of a matrix, only ``rows`` and ``columns`` are read if given; these must fit ``in_blocks``.
    """
    raw, shape = tensor.raw(), tensor.shape
    if index is not None:
        raw, shape = raw[index], shape[1:]
    if rows is not None:
        raw = raw[rows]
        shape = (raw.shape[0], *shape[1:])
    if columns is not None:
        block, size = GGML_QUANT_SIZES[tensor.kind]
        raw = raw[:, columns.start // block * size : columns.stop // block * size]
        raw = np.ascontiguousarray(raw)
        shape = (shape[0], columns.stop - columns.start)
    if tensor.kind in _DENSE:
        dtype, layout = _DENSE[tensor.kind]
        return DenseTensor(raw.reshape(-1).view(layout).reshape(shape), dtype)
    if len(shape) == 2 and tensor.kind in AFFINE:
        return _affine(raw, tensor.kind)
    try:
        values = dequantize(raw, tensor.kind)
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"{tensor.file.path}: tensor {tensor.name!r} has type {tensor.kind.name}, which the"
            " gguf library cannot dequantise",
            hint="choose a file with another quantisation, such as Q4_K_M",
        ) from error
    return DenseTensor(values.reshape(shape), "float32")


def in_blocks(tensor: GgufTensor, columns: slice) -> bool:
    """Whether columns begin and end where blocks do."""
    block, _ = GGML_QUANT_SIZES[tensor.kind]
    return bool(columns.start % block == 0 and columns.stop % block == 0)


def read_float32(tensor: GgufTensor, index: int | None = None) -> FloatArray:
    """As ``read``, dequantised."""
    part = read(tensor, index)
    return part.dequantize() if isinstance(part, QuantizedTensor) else part.to_float32()


def _affine(raw: Bytes, kind: GGMLQuantizationType) -> QuantizedTensor:
    bits, group, unpack = AFFINE[kind]
    _, size = GGML_QUANT_SIZES[kind]
    rows = raw.shape[0]
    codes, scales, biases = unpack(np.ascontiguousarray(raw).reshape(-1, size))
    return QuantizedTensor(
        codes.reshape(rows, -1),
        scales.reshape(rows, -1),
        biases.reshape(rows, -1),
        bits=bits,
        group_size=group,
    )


def _half(blocks: Bytes, at: int) -> FloatArray:
    """The float16 at byte ``at`` of each block, [blocks, 1]."""
    column = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")
    return np.asarray(column, dtype=np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[blocks, n] bytes to [blocks, 2 n] codes: all low halves, then all high halves."""
    return np.concatenate([packed & LOW, packed >> FOUR], axis=1)


def _crumbs(packed: Bytes) -> Bytes:
    """[..., n] bytes to [..., 4 n] two-bit codes: the lowest pair of all bytes first."""
    return np.concatenate(
        [(packed >> np.uint8(shift)) & np.uint8(3) for shift in (0, 2, 4, 6)], axis=-1
    )


def _high_bits(packed: Bytes) -> Bytes:
    """[blocks, 4] bytes to [blocks, 32] bits, lowest first."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _q4_0(blocks: Bytes) -> Affine:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scale, -8 * scale


def _q4_1(blocks: Bytes) -> Affine:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Affine:
    scale = _half(blocks, 0)
    codes = _nibbles(blocks[:, 6:]) | (_high_bits(blocks[:, 2:6]) << FOUR)
    return codes, scale, -16 * scale


def _q5_1(blocks: Bytes) -> Affine:
    codes = _nibbles(blocks[:, 8:]) | (_high_bits(blocks[:, 4:8]) << FOUR)
    return codes, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Affine:
    scale = _half(blocks, 0)
    # int8 + 128 as uint8 is the same bits with the top one flipped.
    return blocks[:, 2:] ^ np.uint8(0x80), scale, -128 * scale


def _six_bit_scales(packed: Bytes) -> tuple[FloatArray, FloatArray]:
    """Eight 6-bit scales and eight 6-bit mins in 12 bytes, as in Q4_K and Q5_K."""
    low_scale, low_min, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate([low_scale & 0x3F, (high & LOW) | (low_scale >> 2) & 0x30], axis=1)
    minimum = np.concatenate([low_min & 0x3F, (high >> FOUR) | (low_min >> 2) & 0x30], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _pair_nibbles(packed: Bytes) -> Bytes:
    """[blocks, 128] bytes to [blocks, 256]: each 32 bytes hold 32 low, then 32 high codes."""
    quads = packed.reshape(-1, 4, 32)
    return np.stack([quads & LOW, quads >> FOUR], axis=2).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Affine:
    scale, minimum = _six_bit_scales(blocks[:, 4:16])
    codes = _pair_nibbles(blocks[:, 16:144])
    return codes, _half(blocks, 0) * scale, -_half(blocks, 2) * minimum


def _q5_k(blocks: Bytes) -> Affine:
    scale, minimum = _six_bit_scales(blocks[:, 4:16])
    # Bit j of byte i of ``qh`` is the fifth bit of value i in group j.
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    codes = _pair_nibbles(blocks[:, 48:176]) | (high.reshape(-1, 256) << FOUR)
    return codes, _half(blocks, 0) * scale, -_half(blocks, 2) * minimum


def _q2_k(blocks: Bytes) -> Affine:
    packed = blocks[:, 0:16]
    codes = _crumbs(blocks[:, 16:80].reshape(-1, 2, 32)).reshape(-1, 256)
    scales: FloatArray = _half(blocks, 80) * (packed & LOW).astype(np.float32)
    return codes, scales, -_half(blocks, 82) * (packed >> FOUR).astype(np.float32)


def _q3_k(blocks: Bytes) -> Affine:
    # ``hmask`` bit j of byte i: third bit of value i in eighth j (32 values each).
    high = (blocks[:, None, 0:32] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    low = _crumbs(blocks[:, 32:96].reshape(-1, 2, 32)).reshape(-1, 256)
    codes = low | (high.reshape(-1, 256) << TWO)
    packed = blocks[:, 96:108]
    low_scale = np.concatenate([packed[:, :8] & LOW, packed[:, :8] >> FOUR], axis=1)
    high_scale = _crumbs(packed[:, 8:12])
    integer = (low_scale | (high_scale << FOUR)).astype(np.float32) - 32
    scales: FloatArray = _half(blocks, 108) * integer
    return codes, scales, -4 * scales


def _q6_k(blocks: Bytes) -> Affine:
    low = blocks[:, 0:128].reshape(-1, 2, 64)
    low = np.concatenate([low & LOW, low >> FOUR], axis=2)
    high = _crumbs(blocks[:, 128:192].reshape(-1, 2, 32))
    codes = (low | (high << FOUR)).reshape(-1, 256)
    integer = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    scales: FloatArray = _half(blocks, 208) * integer.astype(np.float32)
    return codes, scales, -32 * scales


FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of e2m1, by code (OCP Microscaling Formats 1.0)."""
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_CODES = np.array([value + 12 for value in FP4_DOUBLED], np.uint8)
_IQ4_CODES = np.array([value + 127 for value in _IQ4_VALUES], np.uint8)
"""Tables of few integers, shifted to start at 0: wider codes, but affine ones."""


def _mxfp4(blocks: Bytes) -> Affine:
    # An e8m0 exponent of value 2**(e - 127), halved because the integers are doubled.
    scale = np.exp2(blocks[:, 0:1].astype(np.float32) - 128)
    return _FP4_CODES[_nibbles(blocks[:, 1:])], scale, -12 * scale


def _iq4_nl(blocks: Bytes) -> Affine:
    scale = _half(blocks, 0)
    return _IQ4_CODES[_nibbles(blocks[:, 2:])], scale, -127 * scale


def _iq4_xs(blocks: Bytes) -> Affine:
    low = np.stack([blocks[:, 4:8] & LOW, blocks[:, 4:8] >> FOUR], axis=2).reshape(-1, 8)
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    integer = (low | ((high.astype(np.uint8) & np.uint8(3)) << FOUR)).astype(np.float32) - 32
    scales: FloatArray = _half(blocks, 0) * integer
    codes = _nibbles(blocks[:, 8:136].reshape(-1, 16)).reshape(-1, 256)
    return _IQ4_CODES[codes], scales, -127 * scales


AFFINE: dict[GGMLQuantizationType, tuple[int, int, Callable[[Any], Affine]]] = {
    GGMLQuantizationType.Q4_0: (4, 32, _q4_0),
    GGMLQuantizationType.Q4_1: (4, 32, _q4_1),
    GGMLQuantizationType.Q5_0: (5, 32, _q5_0),
    GGMLQuantizationType.Q5_1: (5, 32, _q5_1),
    GGMLQuantizationType.Q8_0: (8, 32, _q8_0),
    GGMLQuantizationType.Q2_K: (2, 16, _q2_k),
    GGMLQuantizationType.Q3_K: (3, 16, _q3_k),
    GGMLQuantizationType.Q4_K: (4, 32, _q4_k),
    GGMLQuantizationType.Q5_K: (5, 32, _q5_k),
    GGMLQuantizationType.Q6_K: (6, 16, _q6_k),
    GGMLQuantizationType.MXFP4: (5, 32, _mxfp4),
    GGMLQuantizationType.IQ4_NL: (8, 32, _iq4_nl),
    GGMLQuantizationType.IQ4_XS: (8, 32, _iq4_xs),
}
"""Bits, group size and unpacking of each type that is affine in groups."""
