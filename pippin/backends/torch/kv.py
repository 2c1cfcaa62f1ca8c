"""Pools of KV pages."""

from __future__ import annotations

import torch


class Scratch:
    """One buffer that the layers of a stage gather pages into, one after the other.

    A fresh buffer each time would be fresh memory from the system each time, which costs more than
    the copy.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def like(self, data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A contiguous tensor of ``shape``, with the contents of before."""
        size = 1
        for each in shape:
            size *= each
        buffer = self._buffer
        if buffer is None or buffer.numel() < size or buffer.dtype != data.dtype:
            # Zeros: what is never written must be finite, since masks only weigh it with 0.
            buffer = self._buffer = torch.zeros(
                size + size // 4, dtype=data.dtype, device=data.device
            )
        return buffer[:size].view(shape)


class Pool:
    """The pages of one layer: ``data`` [heads, num_blocks, block_size, width].

    Heads come first, so that a run of neighbouring blocks is one strided matrix per head. With
    separate keys and values, the first half of the heads are keys and the second values; a latent
    pool has one head that is both.
    """

    def __init__(
        self,
        heads: int,
        num_blocks: int,
        block_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        scratch: Scratch,
    ) -> None:
        # Zeros: padding of a gathered batch is read (and masked), so it must be finite.
        self.data = torch.zeros(heads, num_blocks, block_size, width, dtype=dtype, device=device)
        self.slots = self.data.view(heads, num_blocks * block_size, width)
        self.block_size = block_size
        self._scratch = scratch

    def write(self, rows: torch.Tensor, slots: torch.Tensor | None, run: int | None) -> None:
        """Store ``rows`` [T, heads, width] at ``slots`` [T], or from slot ``run`` on."""
        if run is not None:
            self.slots.narrow(1, run, rows.shape[0]).copy_(rows.transpose(0, 1))
        else:
            assert slots is not None
            self.slots.index_copy_(1, slots, rows.transpose(0, 1))

    def view(self, start: int, length: int) -> torch.Tensor:
        """[heads, length, width] from slot ``start`` on, without a copy."""
        return self.slots.narrow(1, start, length)

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """[heads, len(blocks) * block_size, width], copied in the order of ``blocks``.

        The result holds until the next call on any pool with the same scratch.
        """
        heads, _, size, width = self.data.shape
        out = self._scratch.like(self.data, (heads, len(blocks), size, width))
        torch.index_select(self.data, 1, blocks, out=out)
        return out.view(heads, -1, width)
