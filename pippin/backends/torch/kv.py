"""Pools of KV pages."""

from __future__ import annotations

import errno
import math
import mmap

import torch

_MADV_POPULATE_WRITE = 23
"""Linux 5.14; the mmap module does not name it."""


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
        self.data = _zeros((heads, num_blocks, block_size, width), dtype, device)
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


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As ``torch.zeros``; on the CPU under Linux in huge pages, all made at once.

    Faster to make, and no step has to wait for the system to clear memory later. Source:
    madvise(2), MADV_HUGEPAGE and MADV_POPULATE_WRITE.
    Raises ``RuntimeError`` where memory does not suffice, as torch does.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"{size} bytes: {error}") from error
    for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
        try:
            memory.madvise(advice)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise RuntimeError(f"{size} bytes: {error}") from error
            # An older kernel: small pages, made when first written.
    return torch.frombuffer(memory, dtype=dtype).view(shape)
