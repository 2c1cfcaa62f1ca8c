"""A group whose ranks run on one host: sums through memory that they share.

A sum of a few KiB takes microseconds, where gloo over loopback takes a hundred or more
(benchmarks/notes_torch.md); a decode step has two a layer.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pippin.backends.meeting import INIT_SECONDS, LOAD_SECONDS, Meeting, lost
from pippin.backends.torch.group import STEP_SECONDS
from pippin.backends.torch.native.exchange import MOST_RANKS, Exchange, region_bytes
from pippin.backends.torch.native.ops import Kernels

logger = logging.getLogger(__name__)

_FOLDER = Path("/dev/shm")
#: Bytes that go through memory at once: they are read from the cache.
_CAPACITY = 256 << 10
#: ns of waiting between looks whether the others are alive.
_PATIENCE = 50_000_000
_NAME_BYTES = 16


class SharedMemoryGroup:
    """See ``group.Group``. Made by ``share_memory``."""

    def __init__(self, meeting: Meeting, kernels: Kernels, file: int) -> None:
        """``file``: descriptor of the region, with this rank's byte locked."""
        self.rank, self.size = meeting.rank, meeting.size
        self.description = "shared memory"
        self._meeting = meeting
        self._file = file
        self._memory = mmap.mmap(file, region_bytes(self.size, _CAPACITY))
        # The view keeps the mapping in place until the group is given up.
        self._view = (ctypes.c_char * len(self._memory)).from_buffer(self._memory)
        shared = ctypes.addressof(self._view)
        self._exchange = Exchange(kernels.library, self.rank, self.size, _CAPACITY, shared)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if not self._exchange.takes(x.dtype):
            return self.sum(x.float()).to(x.dtype)
        self._run(lambda: self._exchange.reduce(x, None, x, _PATIENCE))
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if not (self._exchange.takes(x.dtype) and residual.is_contiguous()):
            return residual + self.sum(x)
        x = x.contiguous()
        self._run(lambda: self._exchange.reduce(x, residual, x, _PATIENCE))
        return x

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        x = x.contiguous()
        nbytes = (ctypes.c_int64 * self.size)(*(width * x.itemsize for width in widths))
        out = x.new_empty(x.shape[0], sum(widths)) if self.rank == 0 else None
        self._run(lambda: self._exchange.gather(x, nbytes, out, _PATIENCE))
        return out

    def share(self, key: str, value: str, seconds: float = LOAD_SECONDS) -> list[str]:
        return self._meeting.share(key, value, seconds)

    def finish(self) -> None:
        """Nothing runs on."""

    def close(self) -> None:
        """The others notice at once, where they still wait for this rank."""
        self._meeting.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _run(self, call: Callable[[], int]) -> None:
        missing = call()
        if missing < 0:
            return
        deadline = time.monotonic() + STEP_SECONDS
        while missing >= 0:
            self._check(missing)
            if time.monotonic() > deadline:
                raise lost(missing, f"it has stood still for {STEP_SECONDS:.0f} s")
            missing = call()

    def _check(self, rank: int) -> None:
        """Raises ``PeerLost`` if a rank's process is gone: the system gave its lock back."""
        if rank == self.rank:
            return
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return
        raise lost(rank, "its process ended")


def share_memory(meeting: Meeting, kernels: Kernels | None) -> SharedMemoryGroup | None:
    """A group over shared memory, or None where a rank has no kernels or does not see the memory
    (which is how ranks of other hosts show)."""
    able = kernels is not None and meeting.size <= MOST_RANKS and _FOLDER.is_dir()
    file = path = None
    if meeting.rank == 0 and able:
        path = _FOLDER / f"pippin-{secrets.token_hex(_NAME_BYTES)}"
        file = _create(path, region_bytes(meeting.size, _CAPACITY))
    named = "" if file is None else str(path)
    try:
        name = meeting.share("region", named, INIT_SECONDS)[0]
        if meeting.rank and able and name:
            file = _open(Path(name))
        everyone = meeting.share("opened", "" if file is None else "yes", INIT_SECONDS)
    finally:
        if path is not None:
            # Whoever has it open keeps it; nothing is left when they end, however they do.
            path.unlink(missing_ok=True)
    if file is None or kernels is None or not all(everyone):
        if file is not None:
            os.close(file)
        return None
    # Not inherited by children, and given back by the system when this process ends.
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, meeting.rank)
    group = SharedMemoryGroup(meeting, kernels, file)
    meeting.share("locked", "", INIT_SECONDS)
    return group


def _create(path: Path, nbytes: int) -> int | None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Taken now: running out later would be a signal, not an error.
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        logger.warning("no shared memory for the tensor-parallel group: %s", error)
        os.close(file)
        path.unlink()
        return None
    return file


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
