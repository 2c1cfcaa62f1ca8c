"""Group-wise affine weights in the layout of MLX's quantised kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pippin.models.quant import QuantizedTensor

#: Widths and group sizes that ``mx.quantized_matmul`` has for affine weights.
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One matrix, or a stack of them, as MLX multiplies it."""

    words: mx.array
    """uint32 [..., out, in * bits / 32]"""
    scales: mx.array
    biases: mx.array | None
    bits: int
    group_size: int
    mode: str = "affine"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight itself."""
        *rest, width = self.words.shape
        return (*rest, width * 32 // self.bits)

    @property
    def nbytes(self) -> int:
        return sum(
            part.nbytes for part in (self.words, self.scales, self.biases) if part is not None
        )


def group_size_of(tensor: QuantizedTensor) -> int | None:
    """The largest group size of MLX that the tensor's groups are whole multiples of.

    None where there is none, or where the columns are permuted: MLX has no kernel for these.
    """
    if tensor.columns is not None or tensor.bits > 8:
        return None
    return next((size for size in GROUP_SIZES if tensor.group_size % size == 0), None)


def pack(tensor: QuantizedTensor, dtype: mx.Dtype) -> PackedWeight:
    """Repack without loss, but for rounding scales and biases to ``dtype``.

    ``group_size_of(tensor)`` must not be None.
    """
    group_size = group_size_of(tensor)
    assert group_size is not None
    tensor = tensor.regroup(group_size)
    bits = next(bits for bits in BITS if bits >= tensor.bits)
    return PackedWeight(
        words=mx.array(pack_codes(tensor.codes, bits)),
        scales=mx.array(tensor.scales).astype(dtype),
        biases=mx.array(tensor.biases).astype(dtype),
        bits=bits,
        group_size=group_size,
    )


def stack(parts: list[PackedWeight]) -> PackedWeight | None:
    """Experts' weights in one; None where they differ in kind."""
    first = parts[0]
    kinds = {(part.bits, part.group_size, part.mode, part.words.shape) for part in parts}
    if len(kinds) > 1 or first.biases is None:
        return None
    return PackedWeight(
        words=mx.stack([part.words for part in parts]),
        scales=mx.stack([part.scales for part in parts]),
        biases=mx.stack([part.biases for part in parts if part.biases is not None]),
        bits=first.bits,
        group_size=first.group_size,
    )


def pack_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Codes below ``2**bits`` as one little-endian bit stream a row: the inverse of
    ``models.packed.unpack``. [..., n] to [..., n * bits / 32]."""
    rows: NDArray[Any]
    if bits == 8:
        rows = np.ascontiguousarray(codes)
    elif bits in (2, 4):
        many = 8 // bits
        parts = codes.reshape(*codes.shape[:-1], -1, many)
        rows = np.zeros(parts.shape[:-1], dtype=np.uint8)
        for place in range(many):
            rows |= parts[..., place] << np.uint8(place * bits)
    else:
        # Eight codes fill ``bits`` bytes.
        parts = codes.reshape(*codes.shape[:-1], -1, 8)
        gathered = np.zeros(parts.shape[:-1], dtype="<u8")
        for place in range(8):
            gathered |= parts[..., place].astype(np.uint64) << np.uint64(place * bits)
        octets = gathered[..., None].view(np.uint8)[..., :bits]
        rows = np.ascontiguousarray(octets).reshape(*codes.shape[:-1], -1)
    words: NDArray[np.uint32] = rows.view(np.uint32)
    return words
