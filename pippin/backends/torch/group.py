"""The ranks that share the layers of one stage: how they meet, and what they do together.

    shared memory   ranks of one host, on CPUs with compiled kernels
    gloo            other CPU ranks
    nccl            CUDA

Every wait has a deadline: a rank that is gone or stands still ends the others' calls in
``PeerLost``, after which the group is of no use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from pippin.backends.base import GroupSpec
from pippin.backends.meeting import LOAD_SECONDS, Meeting, split_address
from pippin.backends.torch.native.ops import Kernels
from pippin.errors import ConfigError

#: Seconds that ranks wait for each other in a step.
STEP_SECONDS = 8.0


class Group(Protocol):
    """What ranks do together. Each call is made by all ranks, in the same order, with tensors of
    the same shape and dtype. All may raise ``PeerLost``."""

    rank: int
    size: int
    description: str

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``, the same bits on all; ``x`` may be overwritten."""
        ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``residual + self.sum(x)``; both may be overwritten. Ranks have the same ``residual``."""
        ...

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """All ranks' ``x`` [rows, widths[rank]] side by side on rank 0, None on the others."""
        ...

    def share(self, key: str, value: str, seconds: float = LOAD_SECONDS) -> list[str]:
        """Every rank's ``value``, for what is settled before steps run. ``key``: used once."""
        ...

    def finish(self) -> None:
        """Wait, no longer than a step may take, for what the device still does."""
        ...

    def close(self) -> None: ...


def connect(spec: GroupSpec, device: torch.device, kernels: Kernels | None) -> Group:
    """Meet the other ranks. Raises ``ConfigError``, ``PortInUse`` or ``PeerLost``."""
    _check(spec, device)
    # Imported here: they need what is above.
    from pippin.backends.torch.collectives import GlooGroup, NcclGroup
    from pippin.backends.torch.shared_memory import share_memory

    meeting = Meeting(spec)
    if spec.backend == "nccl":
        return NcclGroup(meeting, device)
    shared = share_memory(meeting, kernels)
    if shared is not None:
        return shared
    return GlooGroup(meeting, split_address(spec.addresses[spec.rank])[0])


def _check(spec: GroupSpec, device: torch.device) -> None:
    if not 0 <= spec.rank < spec.size or len(spec.addresses) != spec.size:
        raise ConfigError(
            f"rank {spec.rank} of {spec.size} with {len(spec.addresses)} addresses is no group"
        )
    wanted = "nccl" if device.type == "cuda" else "gloo"
    if spec.backend != wanted or device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"a tensor-parallel group on {device.type} cannot use {spec.backend!r}",
            hint="gloo for --device cpu, nccl for --device cuda",
        )
    if spec.backend == "nccl" and not dist.is_nccl_available():
        raise ConfigError(
            "this torch has no NCCL",
            hint="install a CUDA build of torch, or --device cpu",
        )
