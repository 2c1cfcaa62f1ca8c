"""Times steps of the torch backend by themselves: no scheduler, sampler or server.

    python benchmarks/torch_steps.py demo --threads 2
    python benchmarks/torch_steps.py DIRECTORY_WITH_ONLY_config.json --random --device cuda

Prints, per number of sequences, the best and the median time of a decode step behind prompts of
``--prompt`` tokens, and of a step that prefills those prompts together. With one thread, times are
the thread's CPU time, which holds on a busy machine. ``--sections`` adds where a decode step's time
goes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pippin.backends.torch import attention, batch, kv, layers, linear, rope
from pippin.backends.torch.native import ops
from pippin.backends.torch.native.linear import NativeLinear
from pippin.backends.torch.runner import TorchRunner, load, load_checkpoint
from pippin.config import Config, ModelConfig, ParallelConfig, environment
from pippin.models.checkpoint import DenseTensor
from pippin.models.files import resolve
from pippin.types.step import Chunk, StepPlan

BLOCK = 16


class RandomCheckpoint:
    """Weights of the right shapes for a configuration."""

    quantization = None

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._noise = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32) * 0.02

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def tensor(self, name: str) -> DenseTensor:
        shape = self._shapes[name]
        values = np.ones(shape, np.float32) if len(shape) == 1 else np.resize(self._noise, shape)
        return DenseTensor(values, "float32")


class Steps:
    def __init__(self, runner: TorchRunner, num_blocks: int, clock: Callable[[], float]) -> None:
        self.runner = runner
        self.clock = clock
        self.step = 0
        self.live: tuple[int, ...] = ()
        self.groups = len(runner.info.kv_groups)
        runner.allocate_kv((num_blocks,) * self.groups, BLOCK)

    def prefill(self, sequences: int, tokens: int, room: int) -> float:
        source = random.Random(0)
        vocabulary = self.runner.info.vocab_size
        each = -(-(tokens + room) // BLOCK)
        chunks = [
            Chunk(
                seq,
                0,
                [source.randrange(vocabulary) for _ in range(tokens)],
                (tuple(range(seq * each, (seq + 1) * each)),) * self.groups,
                1,
            )
            for seq in range(sequences)
        ]
        return self.run(chunks, self.live)

    def decode(self, sequences: int, position: int) -> float:
        chunks = [Chunk(seq, position, [5], ((),) * self.groups, 1) for seq in range(sequences)]
        return self.run(chunks)

    def run(self, chunks: list[Chunk], freed: tuple[int, ...] = ()) -> float:
        self.step += 1
        plan = StepPlan(self.step, tuple(chunks), freed)
        self.live = tuple(chunk.seq for chunk in chunks)
        self.runner.synchronize()
        started = self.clock()
        self.runner.execute(plan)
        self.runner.synchronize()
        return self.clock() - started


def watch(clock: Callable[[], float]) -> Counter[str]:
    """Wrap the backend's parts; returns the seconds that they take, kept up to date."""
    seconds: Counter[str] = Counter()

    def wrap(owner: Any, name: str, label: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = clock()
            result = inner(*args, **kwargs)
            seconds[label] += clock() - started
            return result

        setattr(owner, name, timed)

    for kind in (linear.OneDnnLinear, linear.DenseLinear, NativeLinear):
        wrap(kind, "__call__", "linears")
        wrap(kind, "add", "linears")
    wrap(layers.RMSNorm, "__call__", "norms")
    wrap(layers, "attend", "attention, all")
    wrap(attention, "_decode", "attention, decode")
    wrap(kv.Pool, "gather", "attention, gather")
    wrap(kv.Pool, "write", "pool writes")
    wrap(layers.GatedMLP, "hidden", "gate, up and activation")
    wrap(batch.BatchBuilder, "build", "batch")
    wrap(rope.Rotation, "__call__", "rope")
    wrap(ops.MixCall, "__call__", "norms of heads, rope, pool writes")
    wrap(ops.AttendCall, "__call__", "attention, compiled")
    wrap(ops.Kernels, "gated", "activation")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--sections", action="store_true")
    args = parser.parse_args()
    config = Config(
        model=ModelConfig(model=args.model, device=args.device, dtype=args.dtype),
        parallel=ParallelConfig(cpus_per_rank=args.threads),
    )
    if args.random:
        described = json.loads((Path(args.model) / "config.json").read_text())
        checkpoint = RandomCheckpoint(described)
        runner = load_checkpoint(config, checkpoint, name="random", fingerprint="")
    else:
        runner = load(config, resolve(args.model, home=environment().home))
    print(f"{runner.info.architecture} on {runner.device}; {runner.reason}")
    clock = time.thread_time if args.threads == 1 and args.device == "cpu" else time.perf_counter
    sections = watch(clock) if args.sections else None
    room = args.repeat + 2
    most = max(args.sequences) * -(-(args.prompt + room) // BLOCK)
    for count in args.sequences:
        steps = Steps(runner, most, clock)
        prefills = [steps.prefill(count, args.prompt, room) for _ in range(2)]
        if sections is not None:
            sections.clear()
        decodes = [steps.decode(count, args.prompt + i) for i in range(args.repeat)]
        best, prompt = min(decodes), min(prefills)
        print(
            f"{count:4} sequences: decode {best * 1e3:7.1f} ms (median"
            f" {statistics.median(decodes) * 1e3:.1f}), {count / best:7.0f} tok/s;"
            f" prefill {count * args.prompt / prompt:6.0f} tok/s"
        )
        if sections is not None:
            parts = {k: f"{v / args.repeat * 1e3:.1f}" for k, v in sections.most_common()}
            print("      mean ms:", ", ".join(f"{k} {v}" for k, v in parts.items()))


if __name__ == "__main__":
    main()
