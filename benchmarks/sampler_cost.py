"""What sampling costs a step: milliseconds for one call of the torch sampler.

    python benchmarks/sampler_cost.py [--rows 32] [--threads 2] [--logits FILE] [--device cpu]

``--logits``: a torch file with a float32 tensor [positions, vocab_size] of a real model. Without it
rows are drawn from normal distributions of several widths, which gives nuclei (top_p 0.95) from a
few tokens to thousands, as real rows have. With ``--threads 1`` the time is CPU time of this
process, which holds on a busy machine; else wall-clock time. The fastest of ``--repeat`` calls
counts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from pippin.backends.base import SampleRow, SamplingState
from pippin.backends.torch.sampler import TorchSampler
from pippin.types.request import SamplingParams

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 1, top_p 0.95": {"top_p": 0.95},
    "temperature 0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "temperature 1, top_p 0.3": {"top_p": 0.3},
    "temperature 1.5, min_p 0.1": {"temperature": 1.5, "min_p": 0.1},
    "top_k 50": {"top_k": 50},
    "temperature 0.7, top_k 50, top_p 0.95": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
    "top_p 0.95, penalties": {
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
    },
    "top_p 0.95, logprobs 5": {"top_p": 0.95, "logprobs": 5},
}


def made_up(positions: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    widths = torch.linspace(1.5, 5.0, positions)[torch.randperm(positions, generator=generator)]
    return torch.randn(positions, vocab_size, generator=generator) * widths[:, None]


def measure(
    params: dict[str, Any], logits: torch.Tensor, rows: int, repeat: int, cpu_time: bool
) -> float:
    """Milliseconds of the fastest call."""
    device = logits.device
    sampler = TorchSampler(logits.shape[1], device)
    for seq in range(rows):
        state = SamplingState(
            params=SamplingParams(**params),
            seed=seq,
            choice=0,
            prompt_token_ids=range(1000, 1128),
            output_token_ids=range(100),
            stop_token_ids=frozenset({2}),
        )
        sampler.add(seq, state)
    clock = time.process_time if cpu_time else time.perf_counter
    times = []
    for step in range(repeat):
        start = step * 17 % (len(logits) - rows + 1)
        lines = logits[start : start + rows].clone()
        plan = [SampleRow(row, row, 228 + step) for row in range(rows)]
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = clock()
        sampler.sample(lines, plan)
        times.append(clock() - begin)
    return min(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--logits")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logits = (
        torch.load(options.logits)
        if options.logits
        else made_up(max(128, options.rows), options.vocab_size)
    ).to(options.device)
    for name, params in SETTINGS.items():
        milliseconds = measure(params, logits, options.rows, options.repeat, options.threads == 1)
        print(f"{name:40} {milliseconds:8.2f} ms")


if __name__ == "__main__":
    main()
