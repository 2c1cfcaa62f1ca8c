"""A stage cut among ranks against one process on the same cores: steps alone, no scheduler.

    python benchmarks/tensor_parallel.py                     the shape of Llama-3.2-1B, random
    python benchmarks/tensor_parallel.py demo --size 3
    python benchmarks/tensor_parallel.py demo --device cuda --greedy 64 --dtype float32

Each round runs one process with all the threads, then ``--size`` pinned ranks that share them out,
each in fresh processes. Printed: the median decode step of each, and the ratio of their speeds.
``--greedy`` also compares the likeliest tokens: the ranks decode the one process's own tokens, and
the first position where they would have chosen another is named. On CUDA each rank has a GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

LLAMA_1B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128_256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SECONDS = 900
PROMPT = [1, 504, 3575, 282, 4649, 314]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="default: random weights of Llama-3.2-1B's shape")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--repeat", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--greedy", type=int, default=0, help="tokens to compare")
    parser.add_argument("--gloo", action="store_true", help="no compiled kernels, no shared memory")
    parser.add_argument("--profile", action="store_true", help="where rank 0's time goes")
    args = parser.parse_args()
    ratios: dict[int, list[float]] = {count: [] for count in args.sequences}
    for _ in range(args.rounds):
        one = run(args, 1)
        parts = run(args, args.size, one["tokens"])
        print(f"one process: {one['reason']}\n{args.size} ranks: {parts['reason']}")
        for count in args.sequences:
            ratios[count].append(one["decode"][count] / parts["decode"][count])
            print(
                f"{count:4} sequences: one process {one['decode'][count] * 1e3:6.1f} ms,"
                f" {args.size} ranks {parts['decode'][count] * 1e3:6.1f} ms,"
                f" speed {ratios[count][-1]:.2f}; prefill {one['prefill'][count]:.2f} s,"
                f" {parts['prefill'][count]:.2f} s",
                flush=True,
            )
        if args.greedy:
            print("greedy tokens:", compare(one["tokens"], parts["tokens"]))
    for count, found in ratios.items():
        print(f"{count:4} sequences: speed against one process {statistics.median(found):.2f}")


def compare(wanted: list[int], found: list[int]) -> str:
    pairs = zip(wanted, found, strict=True)
    different = [i for i, (a, b) in enumerate(pairs) if a != b]
    if not different:
        return f"all {len(wanted)} equal"
    return f"{len(different)} of {len(wanted)} differ, first at {different[0]}"


def run(args: argparse.Namespace, size: int, teacher: list[int] | None = None) -> dict[str, Any]:
    """Rank 0's figures."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    port = free_port()
    ranks = [
        context.Process(target=rank_main, args=(args, rank, size, port, teacher, answers))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(SECONDS)
    if any(process.exitcode for process in ranks) or answers.empty():
        raise SystemExit(f"ranks ended with {[process.exitcode for process in ranks]}")
    result: dict[str, Any] = answers.get()
    return result


def rank_main(
    args: argparse.Namespace,
    rank: int,
    size: int,
    port: int,
    teacher: list[int] | None,
    answers: Any,
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if args.device == "cpu":
        share = max(1, len(cores) // size)
        cores = [cores[(rank * share + i) % len(cores)] for i in range(share)]
        os.sched_setaffinity(0, cores)
    # After that: torch makes its threads by what it sees.
    import time

    from torch_steps import Steps, watch

    runner = load(args, rank, size, port, len(cores))
    sections = watch(time.perf_counter) if args.profile else None
    if sections is not None:
        watch_sums(sections)
    result: dict[str, Any] = {"reason": runner.reason, "decode": {}, "prefill": {}, "tokens": []}
    room = args.repeat + 2
    most = max(args.sequences, default=1) * -(-(args.prompt + room) // 16)
    for count in args.sequences:
        steps = Steps(runner, most, time.perf_counter)
        result["prefill"][count] = min(steps.prefill(count, args.prompt, room) for _ in range(2))
        if sections is not None:
            sections.clear()
        began, used = time.perf_counter(), time.thread_time()
        times = [steps.decode(count, args.prompt + i) for i in range(args.repeat)]
        result["decode"][count] = statistics.median(times)
        share = (time.thread_time() - used) / (time.perf_counter() - began)
        if share < 0.97 and args.device == "cpu":
            print(f"rank {rank} of {size} had its core for {share:.0%} of the time", flush=True)
        if sections is not None and rank == 0:
            parts = {k: f"{v / args.repeat * 1e3:.2f}" for k, v in sections.most_common()}
            print(f"{size} ranks, {count} sequences, mean ms:", parts, flush=True)
    if args.greedy:
        result["tokens"] = greedy(runner, args.greedy, teacher)
    if rank == 0:
        answers.put(result)
    runner.close()


def load(args: argparse.Namespace, rank: int, size: int, port: int, threads: int) -> Any:
    from pippin.backends.base import GroupSpec
    from pippin.backends.torch.runner import load_checkpoint
    from pippin.config import Config, ModelConfig, ParallelConfig, environment
    from pippin.models.checkpoint import open_checkpoint
    from pippin.models.files import resolve

    config = Config(
        model=ModelConfig(model=args.model or "", device=args.device, dtype=args.dtype),
        parallel=ParallelConfig(cpus_per_rank=threads),
    )
    backend = "gloo" if args.device == "cpu" else "nccl"
    group = GroupSpec(rank, size, backend, (f"127.0.0.1:{port}",) * size) if size > 1 else None
    if args.model:
        checkpoint: Any = open_checkpoint(resolve(args.model, home=environment().home))
    else:
        checkpoint = random_checkpoint()
    return load_checkpoint(
        config, checkpoint, name="model", fingerprint="", group=group, native=not args.gloo
    )


def random_checkpoint() -> Any:
    """bfloat16, as the model's own are."""
    import numpy as np
    from torch_steps import RandomCheckpoint

    from pippin.models.tensor import DenseTensor, bfloat16_bits

    class Bfloat16(RandomCheckpoint):
        def __init__(self) -> None:
            super().__init__(LLAMA_1B)
            self._bits = bfloat16_bits(self._noise)

        def names(self) -> frozenset[str]:
            return super().names() - {"lm_head.weight"}

        def tensor(self, name: str) -> DenseTensor:
            shape = self._shapes[name]
            if len(shape) == 1:
                return DenseTensor(bfloat16_bits(np.ones(shape, np.float32)), "bfloat16")
            return DenseTensor(np.resize(self._bits, shape), "bfloat16")

    return Bfloat16()


def greedy(runner: Any, count: int, teacher: list[int] | None) -> list[int]:
    """The likeliest tokens behind a prompt; with ``teacher``, behind its tokens."""
    from pippin.types.step import Chunk, StepPlan

    blocks = tuple(range(-(-(len(PROMPT) + count) // 16)))
    groups = len(runner.info.kv_groups)
    runner.allocate_kv((len(blocks),) * groups, 16)
    found: list[int] = []
    given = PROMPT
    start = 0
    for step in range(count):
        new = ((blocks if step == 0 else ()),) * groups
        logits = runner.execute(StepPlan(step, (Chunk(0, start, list(given), new, 1),)))
        found.append(-1 if logits is None else int(logits[0].argmax()))
        start += len(given)
        given = [teacher[step] if teacher else found[-1]]
    return found


def watch_sums(sections: Any) -> None:
    """Time in sums over the group, waiting for others included."""
    import time

    from pippin.backends.torch.collectives import GlooGroup
    from pippin.backends.torch.shared_memory import SharedMemoryGroup

    def wrap(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*given: Any) -> Any:
            started = time.perf_counter()
            result = inner(*given)
            sections[f"group: {name}"] += time.perf_counter() - started
            return result

        setattr(owner, name, timed)

    for kind in (GlooGroup, SharedMemoryGroup):
        for name in ("add", "sum", "gather"):
            wrap(kind, name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
