"""Ranks as processes of their own, kept from test to test: importing torch takes seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_tiny import Driver

from pippin.backends import meeting
from pippin.backends.base import GroupSpec, HiddenStates
from pippin.backends.torch import collectives, runner, shared_memory
from pippin.config import Config, ModelConfig, ParallelConfig
from pippin.errors import PippinError
from pippin.models.checkpoint import open_checkpoint
from pippin.models.files import ModelFiles
from pippin.types.step import Chunk, StepPlan

SECONDS = 200.0
#: What must outlive a call.
_HELD: list[Any] = []
CORES = sorted(os.sched_getaffinity(0))


class Ranks:
    """Processes that each run the function they are told to, with their rank and group first."""

    def __init__(self, count: int) -> None:
        # Compiled here, and not by ranks that others wait for.
        runner._kernels()
        self._ends: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(count):
            end, process = self._spawn(rank)
            self._ends.append(end)
            self.processes.append(process)

    def _spawn(self, rank: int) -> tuple[Connection, Any]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def replace(self, rank: int) -> None:
        """Start a rank anew that was killed."""
        self.processes[rank].join()
        self._ends[rank], self.processes[rank] = self._spawn(rank)

    def start(self, size: int, function: Callable[..., Any], *args: Any) -> None:
        """Have the first ``size`` processes call ``function(spec, *args)``."""
        addresses = (f"127.0.0.1:{free_port()}",) * size
        for rank in range(size):
            spec = GroupSpec(rank, size, "gloo", addresses)
            self._ends[rank].send((function, (spec, *args)))

    def result(self, rank: int) -> Any:
        """What a started call returned; a ``PippinError`` comes as such."""
        end = self._ends[rank]
        assert wait([end], SECONDS), f"rank {rank} does not answer"
        done, value = end.recv()
        assert done, value
        return value

    def call(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        self.start(size, function, *args)
        return [self.result(rank) for rank in range(size)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(end: Connection, rank: int) -> None:
    os.sched_setaffinity(0, {CORES[rank % len(CORES)]})
    torch.set_num_threads(1)
    while True:
        function, args = end.recv()
        try:
            answer = True, function(*args)
        except PippinError as error:
            answer = True, error
        except Exception:  # noqa: BLE001  the test shows it
            answer = False, traceback.format_exc()
        end.send(answer)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class _Quiet:
    """A runner whose missing logits (ranks behind the first have none) are zeros."""

    def __init__(self, inner: runner.TorchRunner) -> None:
        self.inner = inner
        self.info = inner.info
        self.allocate_kv = inner.allocate_kv

    def execute(self, plan: Any) -> Any:
        logits = self.inner.execute(plan)
        rows = sum(chunk.num_logits for chunk in plan.chunks)
        return torch.zeros(rows, 1) if logits is None else logits


def load(
    spec: GroupSpec,
    files: ModelFiles,
    *,
    dtype: str = "float32",
    native: bool = True,
    **layers: int,
) -> runner.TorchRunner:
    config = Config(
        model=ModelConfig(device="cpu", dtype=dtype), parallel=ParallelConfig(cpus_per_rank=1)
    )
    return runner.load_checkpoint(
        config,
        open_checkpoint(files),
        name="tiny",
        fingerprint=files.fingerprint,
        group=spec,
        native=native,
        **layers,
    )


def logits(
    spec: GroupSpec,
    files: ModelFiles,
    tokens: dict[int, list[int]],
    steps: Sequence[dict[int, int]],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Run the sequences' tokens in the steps' chunks. ``logits`` [T, vocab] are rank 0's."""
    loaded = load(spec, files, **options)
    driver = Driver(_Quiet(loaded), num_blocks=96)  # type: ignore[arg-type]
    for seq, ids in tokens.items():
        driver.add(seq, ids)
    found = driver.run(list(steps))
    loaded.close()
    return {
        "logits": {seq: np.array(rows.float()) for seq, rows in found.items()}
        if spec.rank == 0
        else None,
        "kv_bytes": [group.bytes_per_token for group in loaded.info.kv_groups],
        "weights_bytes": loaded.info.weights_bytes,
        "reason": loaded.reason,
    }


def in_pieces_of_the_embedding(spec: GroupSpec, *args: Any) -> dict[str, Any]:
    """As ``logits``, with an embedding that is cut though it is small."""
    from pippin.backends import shard

    kept = shard._WHOLE_EMBEDDING
    shard._WHOLE_EMBEDDING = 0
    try:
        return logits(spec, *args)
    finally:
        shard._WHOLE_EMBEDDING = kept


def greedy(spec: GroupSpec, files: ModelFiles, token_ids: list[int], prompt: int) -> list[int]:
    """The likeliest token behind each position from ``prompt - 1`` on, decoded one by one."""
    loaded = load(spec, files)
    driver = Driver(_Quiet(loaded), num_blocks=8, block_size=16)  # type: ignore[arg-type]
    driver.add(0, token_ids)
    rows = [driver.step({0: prompt}, num_logits=1)[0]]
    rows += [driver.step({0: 1})[0] for _ in range(len(token_ids) - prompt)]
    loaded.close()
    return [int(row.argmax()) for row in rows]


def two_stages(
    spec: GroupSpec, files: ModelFiles, token_ids: list[int], first: int, between: str
) -> dict[str, Any]:
    """A stage of layers [0, first) and one of the others, both cut; between them, what the first
    rank of the one gives goes to all ranks of the other, as a link would bring it (here by way of
    the address ``between``)."""
    hop = meeting.Meeting(GroupSpec(spec.rank, spec.size, "gloo", (between,) * spec.size))
    front = load(spec, files, last_layer=first)
    back = load(spec, files, first_layer=first)
    groups = len(front.info.kv_groups)
    rows = []
    for number, (start, stop) in enumerate(((0, 9), (9, 10), (10, len(token_ids)))):
        table = tuple(range(-(-start // 4), -(-stop // 4)))
        chunk = Chunk(0, start, token_ids[start:stop], (table,) * groups, stop - start)
        if not number:
            front.allocate_kv((16,) * groups, 4)
            back.allocate_kv((16,) * groups, 4)
        plan = StepPlan(number, (chunk,))
        hidden = front.execute(plan)
        if spec.rank:
            assert hidden is None
        sent = bytes(hidden.data).hex() if isinstance(hidden, HiddenStates) else ""
        data = memoryview(bytes.fromhex(hop.share(f"hidden/{number}", sent)[0]))
        shape = (stop - start, front.info.hidden_size)
        out = back.execute(plan, HiddenStates("float32", shape, data))
        if isinstance(out, torch.Tensor):
            rows.append(out.clone())
    layers = [[group.layers for group in each.info.kv_groups] for each in (front, back)]
    for each in (front, back, hop):
        each.close()
    return {"logits": {0: torch.cat(rows).numpy()} if rows else None, "layers": layers}


def peak_memory(spec: GroupSpec, files: ModelFiles) -> tuple[int, int]:
    """Bytes of this process's memory that loading adds at most, and the weights' bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    loaded = load(spec, files)
    peak = _status("VmHWM") - before
    loaded.close()
    return peak, loaded.info.weights_bytes


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def wait_for_others(
    spec: GroupSpec, patient: int, seconds: float, native: bool, files: ModelFiles
) -> str:
    """Rank ``patient`` sums for ever, and returns the error in which that ends; others stop after
    one sum, still holding their end."""
    kept = shared_memory.STEP_SECONDS, collectives.STEP_SECONDS
    shared_memory.STEP_SECONDS = collectives.STEP_SECONDS = seconds
    try:
        loaded = load(spec, files, native=native)
    finally:
        if spec.rank != patient:
            shared_memory.STEP_SECONDS, collectives.STEP_SECONDS = kept
    assert loaded._group is not None
    loaded._group.sum(torch.ones(3))
    if spec.rank != patient:
        _HELD[:] = [loaded]
        return "summed once"
    try:
        while True:
            loaded._group.sum(torch.ones(3))
    except PippinError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        loaded.close()
        shared_memory.STEP_SECONDS, collectives.STEP_SECONDS = kept


def with_own_options(spec: GroupSpec, files: ModelFiles, options: Sequence[dict[str, Any]]) -> None:
    load(spec, files, **options[spec.rank]).close()


def meet_alone(spec: GroupSpec, address: str, seconds: float) -> str:
    return _meet(spec.rank, address, seconds) if spec.rank else "stayed away"


def meet_as_first_of_two(spec: GroupSpec, address: str, seconds: float) -> str:
    return _meet(0, address, seconds)


def _meet(rank: int, address: str, seconds: float) -> str:
    try:
        meeting.Meeting(GroupSpec(rank, 2, "gloo", (address, address)), seconds)
    except PippinError as error:
        return f"{type(error).__name__}: {error}"
    return "met"


@contextlib.contextmanager
def listening() -> Iterator[str]:
    """An address whose port is taken."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        yield f"127.0.0.1:{busy.getsockname()[1]}"
