"""The ranks of one replica on this machine (``mp``): who they are, which cores they get, and their
processes.

The leader is rank 0 of the last stage. It runs in the process that calls ``start`` and owns the
others: they end with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

import msgspec

from pippin.backends.base import GroupSpec
from pippin.config import Config
from pippin.engine.launcher import failure_to_error
from pippin.engine.spec import StageLoss, StageSpec
from pippin.errors import ConfigError, LinkError, PeerLost, PippinError
from pippin.types.message import Failed

#: Seconds that processes get to end by themselves.
_GRACE_S = 2.0

_GPUS = Path("/proc/driver/nvidia/gpus")


def cores(ranks: int, per_rank: int | None, available: Sequence[int]) -> list[tuple[int, ...]]:
    """Cores of each rank (pure). Ranks share cores only where there are more ranks than cores.

    Raises ``ConfigError`` for more cores a rank than there are.
    """
    count = len(available)
    if per_rank is not None and per_rank * ranks > count and per_rank > max(1, count // ranks):
        raise ConfigError(
            f"{ranks} ranks of {per_rank} cores need {per_rank * ranks}; this process may use"
            f" {count}",
            hint=f"--cpus-per-rank {max(1, count // ranks)}, or leave it out",
        )
    each = per_rank or max(1, count // ranks)
    return [
        tuple(sorted({available[(rank * each + i) % count] for i in range(each)}))
        for rank in range(ranks)
    ]


def specs(
    config: Config, backend: str, layers: Sequence[tuple[int, int]], directory: str
) -> list[StageSpec]:
    """All ranks on this machine, stage by stage, ranks of a group together.

    ``directory``: a private one for the links' sockets. Raises ``ConfigError``.
    """
    size = config.parallel.tensor_parallel_size
    stages = len(layers)
    total = stages * size
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pinned = cores(total, config.parallel.cpus_per_rank, available) if available else [()] * total
    gpus = len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0
    on_gpu = gpus > 0 and backend == "torch" and config.model.device in ("auto", "cuda")

    def inbox(stage: int, rank: int) -> str:
        return f"ipc://{directory}/{stage}-{rank}"

    made = []
    for stage in range(stages):
        addresses = _free_addresses(size) if size > 1 else ()
        for rank in range(size):
            number = stage * size + rank
            group = None
            if size > 1:
                collectives = "ring" if backend == "mlx" else "nccl" if on_gpu else "gloo"
                group = GroupSpec(rank, size, collectives, addresses)
            alone = total == size  # one stage: nobody sends to its rank 0
            made.append(
                StageSpec(
                    config=_of_rank(config, number, total, gpus if on_gpu else 0),
                    backend=backend,
                    stage=stage,
                    num_stages=stages,
                    layers=layers[stage],
                    group=group,
                    cpus=pinned[number],
                    inbox=None if alone and rank == 0 else inbox(stage, rank),
                    next=None if alone or rank else inbox((stage + 1) % stages, 0),
                    followers=tuple(inbox(stage, r) for r in range(1, size)) if not rank else (),
                )
            )
    return made


def _of_rank(config: Config, rank: int, ranks: int, gpus: int) -> Config:
    """The configuration as one of several ranks on this machine should load it."""
    model, cache = config.model, config.cache
    sharing = ranks
    if gpus:
        model = msgspec.structs.replace(model, device=f"cuda:{rank % gpus}")
        sharing = -(-ranks // gpus)
    # All of them look at the same free memory, before the others have taken theirs.
    share = cache.gpu_memory_utilization / sharing
    cache = msgspec.structs.replace(cache, gpu_memory_utilization=share)
    parallel = msgspec.structs.replace(config.parallel, cpus_per_rank=None)
    return msgspec.structs.replace(config, model=model, cache=cache, parallel=parallel)


def _free_addresses(count: int) -> tuple[str, ...]:
    """Loopback addresses with ports that nobody listened at just now."""
    with contextlib.ExitStack() as stack:
        bound = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in bound:
            one.bind(("127.0.0.1", 0))
        return tuple("{}:{}".format(*one.getsockname()) for one in bound)


class _Process:
    """A worker, and what it says on standard output: at most one line, the reason it failed."""

    def __init__(self, spec: StageSpec) -> None:
        self.spec = spec
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pippin.engine.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        self.said: Failed | None = None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: poll tells
            self.process.stdin.write(msgspec.json.encode(spec) + b"\n")
            self.process.stdin.flush()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        stream: IO[bytes] | None = self.process.stdout
        assert stream is not None
        for line in stream:
            with contextlib.suppress(msgspec.DecodeError):
                self.said = msgspec.json.decode(line, type=Failed)

    def failure(self) -> PippinError | None:
        """Why it ended, None while it runs."""
        status = self.process.poll()
        if status is None:
            return None
        self._reader.join(1.0)
        if self.said is not None:
            return failure_to_error(self.said)
        return None

    def close(self) -> None:
        self.process.wait()
        self._reader.join(1.0)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Others(Protocol):
    """How the ranks besides the leader come to be, and what becomes of them, as it sees it."""

    leader: StageSpec

    def start(self) -> None: ...

    def failure(self) -> PippinError | None:
        """What one of them failed with while loading, as far as is known."""

    def explain(self, error: LinkError) -> PippinError:
        """The same error, or a better one where more is known."""

    def stop(self) -> None:
        """End them. Safe to repeat."""


class Elsewhere:
    """Ranks that somebody else has started, maybe on other machines, and ends again."""

    def __init__(self, leader: StageSpec, peers: Mapping[str, str]) -> None:
        """``peers``: whose links end at an address."""
        self.leader = leader
        self._peers = dict(peers)

    def start(self) -> None:
        pass

    def failure(self) -> PippinError | None:
        return None

    def explain(self, error: LinkError) -> PippinError:
        for address, name in self._peers.items():
            if address in error.message:
                better = type(error)(f"lost {name}: {error.message}", hint=error.hint)
                return better if isinstance(error, PeerLost) else error
        return error

    def stop(self) -> None:
        pass


class Ranks:
    """The processes of all ranks but the leader's, and their sockets' directory."""

    def __init__(self, config: Config, backend: str, layers: Sequence[tuple[int, int]]) -> None:
        """Starts nothing. Raises ``ConfigError``."""
        # A private directory (mode 0700) keeps other users of the machine off the sockets.
        self._directory = tempfile.mkdtemp(prefix="pippin-ring-")
        self._processes: list[_Process] = []
        try:
            everybody = specs(config, backend, layers, self._directory)
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        size = config.parallel.tensor_parallel_size
        self.leader = everybody[-size]
        self._others = [spec for spec in everybody if spec is not self.leader]

    def start(self) -> None:
        self._processes = [_Process(spec) for spec in self._others]

    def failure(self) -> PippinError | None:
        """What a process failed with, if one has ended; the first that could say why."""
        lost = None
        for process in self._processes:
            error = process.failure()
            if error is not None:
                return error
            lost = lost or self._loss(process)
        return None if lost is None else lost_error(lost)

    def explain(self, error: LinkError) -> PippinError:
        loss = self.loss()
        return error if loss is None else lost_error(loss)

    def loss(self, wait_s: float = 0.2) -> StageLoss | None:
        """Which process ended, those killed first. Waits a moment for one that is about to."""
        deadline = time.monotonic() + wait_s
        while True:
            found = [loss for process in self._processes if (loss := self._loss(process))]
            if found or time.monotonic() > deadline:
                return min(found, key=lambda loss: loss.status, default=None)
            time.sleep(0.01)

    @staticmethod
    def _loss(process: _Process) -> StageLoss | None:
        status = process.process.poll()
        if status is None:
            return None
        return StageLoss(process.spec.name, process.process.pid, status)

    def stop(self) -> None:
        """End all processes, by force where they do not, and clean up. Safe to repeat."""
        running = [p.process for p in self._processes if p.process.poll() is None]
        deadline = time.monotonic() + _GRACE_S
        for process in running:
            process.terminate()
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in running:
            if process.poll() is None:
                process.kill()
        for each in self._processes:
            each.close()
        self._processes = []
        shutil.rmtree(self._directory, ignore_errors=True)


def lost_error(loss: StageLoss) -> PeerLost:
    return PeerLost(str(loss), hint="its own messages stand above; start again")
