"""Pools of KV pages in MLX arrays."""

from __future__ import annotations

import mlx.core as mx


class Pool:
    """The pages of one layer: ``slots`` [num_blocks * block_size, heads, width].

    With separate keys and values, the first half of the heads are keys and the second values; a
    latent pool has one head that is both.

    MLX writes into an array in place only while nothing else holds it, so the pool is one array a
    layer, never shared between layers, and reads of it must be evaluated before the next write.
    """

    def __init__(
        self, heads: int, num_blocks: int, block_size: int, width: int, dtype: mx.Dtype
    ) -> None:
        # Zeros: padding of a gathered batch is read (and masked), so it must be finite.
        self.slots = mx.zeros((num_blocks * block_size, heads, width), dtype=dtype)
        self.block_size = block_size
        self.gathered_bytes = 0
        """Bytes copied by ``gather`` since the start."""

    def write(self, rows: mx.array, slots: mx.array | None, run: int | None) -> None:
        """Store ``rows`` [T, heads, width] at ``slots`` [T], or from slot ``run`` on."""
        if run is not None:
            self.slots[run : run + rows.shape[0]] = rows
        else:
            assert slots is not None
            self.slots[slots] = rows

    def view(self, start: int, length: int) -> mx.array:
        """[1, heads, length, width] from slot ``start`` on, without a copy."""
        return self.slots[start : start + length].transpose(1, 0, 2)[None]

    def gather(self, blocks: mx.array) -> mx.array:
        """``blocks`` [count, n]: [count, heads, n * block_size, width], copied in that order."""
        count, number = blocks.shape
        _, heads, width = self.slots.shape
        pages = self.slots.reshape(-1, self.block_size, heads, width)[blocks]
        self.gathered_bytes += pages.nbytes
        return pages.reshape(count, number * self.block_size, heads, width).transpose(0, 2, 1, 3)
