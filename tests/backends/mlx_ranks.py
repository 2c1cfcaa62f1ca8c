"""Ranks of an MLX group as processes: MLX makes one group a process, and its waits block Python."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_tiny import Driver

from pippin.backends.base import GroupSpec
from pippin.backends.mlx.runner import MlxRunner, load
from pippin.config import CacheConfig, Config, ModelConfig, ParallelConfig
from pippin.errors import PippinError
from pippin.models.files import local_directory
from pippin.types.request import Request, SamplingParams

SECONDS = 200.0


class Ranks:
    """``size`` processes; each calls ``function(spec, *args)`` and may be asked once."""

    def __init__(self, size: int, function: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(size))
        self.processes: list[Any] = []
        self._ends = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            spec = GroupSpec(rank, size, "ring", addresses)
            process = context.Process(target=_serve, args=(theirs, function, spec, args))
            process.start()
            theirs.close()
            self.processes.append(process)
            self._ends.append(ours)

    def result(self, rank: int) -> Any:
        """What the function returned, or said before (by a generator)."""
        assert wait([self._ends[rank]], SECONDS), f"rank {rank} does not answer"
        good, value = self._ends[rank].recv()
        assert good, value
        return value

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(end: Any, function: Callable[..., Any], spec: GroupSpec, args: Sequence[Any]) -> None:
    try:
        for value in function(spec, *args):
            end.send((True, value))
    except PippinError as error:
        end.send((True, error))
    except Exception:  # noqa: BLE001  the test shows it
        end.send((False, traceback.format_exc()))


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class _Quiet:
    """A runner whose missing logits (ranks above 0 have none) are zeros."""

    def __init__(self, runner: MlxRunner) -> None:
        self.runner = runner
        self.info = runner.info
        self.allocate_kv = runner.allocate_kv

    def execute(self, plan: Any) -> Any:
        logits = self.runner.execute(plan)
        if logits is None:
            return torch.zeros(sum(chunk.num_logits for chunk in plan.chunks), 1)
        return torch.from_numpy(np.array(logits))


def open_rank(spec: GroupSpec, path: Path) -> MlxRunner:
    config = Config(model=ModelConfig(model=str(path), device="cpu", dtype="float32"))
    return load(config, local_directory("tiny", path), group=spec)


def logits_of_all(
    spec: GroupSpec, paths: dict[str, Path], tokens: dict[int, list[int]], steps: Any
) -> Any:
    """For each model: rank 0's logits of all positions, bytes of weights, bytes a token of KV."""
    for name, path in paths.items():
        runner = open_rank(spec, path)
        driver = Driver(_Quiet(runner), num_blocks=64)  # type: ignore[arg-type]
        for seq, ids in tokens.items():
            driver.add(seq, ids)
        found = driver.run(steps)
        info = runner.info
        logits = {seq: np.array(rows) for seq, rows in found.items()} if spec.rank == 0 else None
        yield name, logits, info.weights_bytes, [group.bytes_per_token for group in info.kv_groups]
        runner.close()


def refusal(spec: GroupSpec, path: Path) -> Any:
    yield str(open_rank(spec, path))


def engine_tokens(_: GroupSpec, path: Path, parallel: dict[str, int]) -> Any:
    """Greedy and seeded tokens of a whole engine, which starts its other ranks itself."""
    from pippin.engine import core

    settings = ModelConfig(model=str(path), backend="mlx", device="cpu", dtype="float32")
    engine = core.load(
        Config(
            model=settings,
            cache=CacheConfig(kv_cache_bytes=1 << 20),
            parallel=ParallelConfig(**parallel),
        )
    )
    for i in range(4):
        params = SamplingParams(temperature=float(i % 2), max_tokens=16, ignore_eos=True)
        engine.add(
            Request(
                request_id=str(i),
                prompt_token_ids=[3 + i, 50, 60] * (1 + 3 * i),
                params=params,
                seed=i,
                max_tokens=16,
            )
        )
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    engine.close()
    yield tokens


def two_groups(spec: GroupSpec, path: Path) -> Any:
    """The answer to a second group in a process."""
    open_rank(spec, path).close()
    other = GroupSpec(spec.rank, spec.size, "ring", tuple(reversed(spec.addresses)))
    yield str(open_rank(other, path))


def wait_for_other(spec: GroupSpec, path: Path, patience: float) -> Any:
    """Steps without end; rank 0 says how its last one ended."""
    from pippin.backends.mlx import group
    from pippin.types.step import Chunk, StepPlan

    group.STEP_SECONDS, group.TOKEN_SECONDS = patience, 0.0
    runner = open_rank(spec, path)
    runner.allocate_kv((8,), 16)
    plan = StepPlan(0, (Chunk(0, 0, [5], ((0,),), 1),), (0,))
    runner.execute(plan)
    yield "started"
    try:
        while True:
            runner.execute(plan)
    except PippinError as error:
        yield f"{type(error).__name__}: {error}"
    try:
        runner.execute(plan)
    except PippinError as error:
        yield f"{type(error).__name__}: {error}"
