"""Pools of KV pages in MLX arrays."""

from __future__ import annotations

import mlx.core as mx


class Pool:
    """The pages of one layer: ``slots`` [heads, num_blocks * block_size, width].

    With separate keys and values, the first half of the heads are keys and the second values; a
    latent pool has one head that is both. Heads come first, so that what one head reads lies row
    behind row: MLX copies operands of attention that do not.

    MLX writes into an array in place only while nothing else holds it, so the pool is one array a
    layer, never shared between layers, and reads of it must be evaluated before the next write.
    """

    def __init__(
        self, heads: int, num_blocks: int, block_size: int, width: int, dtype: mx.Dtype
    ) -> None:
        # Zeros: padding of a gathered batch is read (and masked), so it must be finite.
        self.slots = mx.zeros((heads, num_blocks * block_size, width), dtype=dtype)
        self.block_size = block_size
        self.gathered_bytes = 0
        """Bytes copied by ``gather`` since the start."""

    def write(self, rows: mx.array, slots: mx.array | None, run: int | None) -> None:
        """Store ``rows`` [heads, T, width] at ``slots`` [T], or from slot ``run`` on."""
        if run is not None:
            self.slots[:, run : run + rows.shape[1]] = rows
        else:
            assert slots is not None
            self.slots[:, slots] = rows

    def view(self, start: int, length: int) -> mx.array:
        """[1, heads, length, width] from slot ``start`` on, without a copy."""
        return self.slots[:, start : start + length][None]

    def gather(self, pages: mx.array) -> mx.array:
        """``pages`` [count, heads, n] of the pool as one list of pages, head by head:
        [count, heads, n * block_size, width], copied in that order."""
        width = self.slots.shape[2]
        count, heads, number = pages.shape
        found = self.slots.reshape(-1, self.block_size, width)[pages]
        self.gathered_bytes += found.nbytes
        return found.reshape(count, heads, number * self.block_size, width)
