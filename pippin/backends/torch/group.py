"""The ranks that share the layers of one stage: how they meet, and what they do together.

    shared memory   ranks of one host, on CPUs with compiled kernels
    gloo            other CPU ranks
    nccl            CUDA

Every wait has a deadline: a rank that is gone or stands still ends the others' calls in
``PeerLost``, after which the group is of no use.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from pippin.backends.base import GroupSpec
from pippin.backends.torch.native.ops import Kernels
from pippin.errors import ConfigError, PeerLost, PortInUse

logger = logging.getLogger(__name__)

#: Seconds that ranks wait for each other: to appear,
INIT_SECONDS = 60.0
#: ... to have read their weights,
LOAD_SECONDS = 900.0
#: ... and to come to the same place of a step.
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


class Meeting:
    """The store at the first rank's address, where ranks find each other."""

    def __init__(self, spec: GroupSpec, seconds: float = INIT_SECONDS) -> None:
        """Raises ``PortInUse``, ``ConfigError`` or ``PeerLost``."""
        self.rank, self.size = spec.rank, spec.size
        self.address = spec.addresses[0]
        host, port = split_address(self.address)
        listener = _listen(host, port) if spec.rank == 0 else None
        try:
            self.store = dist.TCPStore(  # type: ignore[attr-defined]
                host,
                port,
                spec.size,
                is_master=listener is not None,
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
                # It takes the descriptor over.
                master_listen_fd=None if listener is None else listener.detach(),
            )
        except RuntimeError as error:
            raise PeerLost(
                f"rank {spec.rank} does not reach rank 0 of its tensor-parallel group at"
                f" {self.address}: {error}",
                hint="is it running, and is the address reachable from here?",
            ) from error
        self.share("met", "", seconds)

    def share(
        self, key: str, value: str, seconds: float, check: Callable[[int], None] | None = None
    ) -> list[str]:
        """See ``Group.share``. ``check``: asked about once a second whether a rank still lives."""
        deadline = time.monotonic() + seconds
        try:
            self.store.set(f"{key}/{self.rank}", value)
            return [self._get(f"{key}/{rank}", rank, deadline, check) for rank in range(self.size)]
        except RuntimeError as error:
            raise PeerLost(
                f"the meeting point of the tensor-parallel group ({self.address}) is gone: {error}",
                hint="the first rank ended; its log says why",
            ) from error

    def _get(
        self, key: str, rank: int, deadline: float, check: Callable[[int], None] | None
    ) -> str:
        while not self.store.check([key]):
            if check is not None:
                check(rank)
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerLost(
                    f"rank {rank} of the tensor-parallel group at {self.address} did not come",
                    hint="its log says whether it started, and what it is doing",
                )
            try:
                self.store.wait([key], timedelta(seconds=min(1.0, left)))
            except dist.DistStoreError:
                continue
        value: bytes = self.store.get(key)
        return value.decode()


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


def lost(rank: int | str, why: str) -> PeerLost:
    return PeerLost(
        f"rank {rank} of the tensor-parallel group is lost: {why}",
        hint="its own log says why; the stage has to be started again",
    )


def split_address(address: str) -> tuple[str, int]:
    """``host:port``. Raises ``ConfigError``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{address!r} is no address of a rank", hint="host:port")
    return host.strip("[]"), int(port)


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


def _listen(host: str, port: int) -> socket.socket:
    """A socket on the address that the plan names, and on no other."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"{host} is no address of this machine: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise PortInUse(
            f"rank 0 of the tensor-parallel group cannot listen on {host}:{port}: {error.strerror}",
            hint="another process uses the port, or the address is not this machine's",
        ) from error
    return listener
