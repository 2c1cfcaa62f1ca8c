"""The ranks that share the layers of one stage, over MLX's own collectives.

    ring     TCP, each rank with its neighbours; tested on Linux
    jaccl    RDMA over Thunderbolt 5 (macOS 26.2); written on MLX's documentation, not yet run

MLX's set-up blocks without a limit and keeps Python from running meanwhile, and its waits never
end. So a group is made in a process of its own only (the engine's or a worker's), after the ranks
have met without it, and a watch cuts the ring's sockets when a step is overdue.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import stat
import sys
import tempfile
import threading
import time
from pathlib import Path

import mlx.core as mx

from pippin.backends.base import GroupSpec
from pippin.backends.meeting import Meeting
from pippin.errors import ConfigError, PeerLost

#: Seconds for all ranks to meet, after which the process ends.
MEET_SECONDS = 60.0

#: Seconds that a step may take: so many, and so many for each of its tokens.
STEP_SECONDS = 20.0
TOKEN_SECONDS = 0.25

_LOOK_SECONDS = 0.25

#: This process's group and its sockets: MLX makes one, and gives it back to whoever asks again.
_MADE: list[tuple[GroupSpec, list[int]]] = []


class Group:
    """One rank's end of a stage's group."""

    def __init__(self, spec: GroupSpec, group: mx.distributed.Group, sockets: list[int]) -> None:
        self.rank = spec.rank
        self.size = spec.size
        self.description = f"rank {spec.rank} of {spec.size} ({spec.backend})"
        self.lost = False
        self._group = group
        self._sockets = sockets
        self._until: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="ring watch", daemon=True).start()

    def sum(self, x: mx.array) -> mx.array:
        """The sum of all ranks' ``x``; not evaluated yet."""
        return mx.distributed.all_sum(x, group=self._group)

    def gather(self, x: mx.array, widths: tuple[int, ...]) -> mx.array:
        """All ranks' ``x`` [rows, widths[rank]] side by side, on all of them."""
        rows, most = x.shape[0], max(widths)
        padded = mx.pad(x, [(0, 0), (0, most - x.shape[1])])
        parts = mx.distributed.all_gather(padded, group=self._group).reshape(-1, rows, most)
        return mx.concatenate([parts[r, :, :width] for r, width in enumerate(widths)], axis=1)

    def evaluate(self, arrays: list[mx.array], tokens: int) -> None:
        """Evaluate a step of so many tokens. Raises ``PeerLost`` where another rank is gone or does
        not answer; the group is of no use then."""
        if self.lost:
            raise PeerLost("another rank of the tensor-parallel group is gone")
        self._until = time.monotonic() + STEP_SECONDS + tokens * TOKEN_SECONDS
        try:
            mx.eval(arrays)
        except RuntimeError as error:
            self.lost = True
            raise PeerLost(f"another rank of the tensor-parallel group is gone: {error}") from error
        finally:
            self._until = None

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            until = self._until
            if until is not None and time.monotonic() > until:
                self._until = None
                self._cut()

    def _cut(self) -> None:
        """End the ring's pending operations, here and at the neighbours."""
        for number in self._sockets:
            with socket.socket(fileno=os.dup(number)) as connection:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # gone already


def connect(spec: GroupSpec) -> Group:
    """Meet the other ranks. Raises ``ConfigError``, ``PortInUse`` or ``PeerLost``; ends the process
    where MLX's own set-up takes longer than ``MEET_SECONDS``."""
    if not 0 <= spec.rank < spec.size or len(spec.addresses) != spec.size:
        raise ConfigError(
            f"rank {spec.rank} of {spec.size} with {len(spec.addresses)} addresses is no group"
        )
    if spec.backend not in ("ring", "jaccl"):
        raise ConfigError(
            f"a tensor-parallel group on MLX cannot use {spec.backend!r}", hint="ring or jaccl"
        )
    if _MADE and _MADE[0][0] != spec:
        raise ConfigError(
            "this process was in another tensor-parallel group, and MLX makes only one a process",
            hint="start a new process for another engine",
        )
    if not mx.distributed.is_available(spec.backend):
        raise ConfigError(f"this MLX was built without {spec.backend}", hint="--transport ring")
    # The ranks meet in Python first: MLX's set-up, which stops all threads, then takes
    # milliseconds, however much later than the others a rank was started.
    Meeting(spec, MEET_SECONDS).close()
    with tempfile.TemporaryDirectory(prefix="pippin-group-") as directory:
        # MLX takes these from the environment only.
        os.environ.update(_environment(spec, Path(directory)))
        before = _open_sockets()
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(MEET_SECONDS, exit=True, file=sys.__stderr__)
        try:
            group = mx.distributed.init(strict=True, backend=spec.backend)
        except RuntimeError as error:
            raise PeerLost(
                f"rank {spec.rank} of the tensor-parallel group did not meet the others: {error}"
            ) from error
        finally:
            faulthandler.cancel_dump_traceback_later()
    if not _MADE:
        _MADE.append((spec, sorted(_open_sockets() - before)))
    return Group(spec, group, _MADE[0][1])


def _environment(spec: GroupSpec, directory: Path) -> dict[str, str]:
    path = directory / "group.json"
    variables = {"MLX_RANK": str(spec.rank)}
    if spec.backend == "ring":
        path.write_text(json.dumps([[address] for address in spec.addresses]))
        return variables | {"MLX_HOSTFILE": str(path)}
    if len(spec.devices) != spec.size:
        raise ConfigError(
            "a JACCL group needs the RDMA device of each rank towards each other one",
            hint="pippin links shows them; --transport ring needs none",
        )
    path.write_text(json.dumps(spec.devices))
    return variables | {
        "MLX_IBV_DEVICES": str(path),
        "MLX_JACCL_COORDINATOR": spec.addresses[0],
    }


def _open_sockets() -> set[int]:
    found = set()
    for entry in os.listdir("/dev/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                found.add(int(entry))
        except OSError:
            continue  # the listing's own
    return found
