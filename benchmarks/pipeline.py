"""Pipeline scaling on one machine: offline ``LLM``, one core a stage, all in one run.

    python benchmarks/pipeline.py --output results/pipeline.json

Measures output tokens per second of one core at 1, 16 and 32 sequences and of two stages at the
same, and the time to the first token of one long prompt. Each setting runs in a process of its
own; the settings take turns, several rounds of them, so that a machine that gets slower or faster
with time does so for all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

PROMPT = 32
OUTPUT = 128
LONG = 4000


def one(stages: int, options: dict[str, Any]) -> dict[str, Any]:
    """One setting, in this process: numbers by name."""
    # One stage on one core; two stages have a core each.
    cores = sorted(os.sched_getaffinity(0))[:stages]
    os.sched_setaffinity(0, cores)
    from pippin import LLM, SamplingParams

    rng = random.Random(0)
    found: dict[str, Any] = {}
    with LLM(
        options.pop("model"),
        pipeline_parallel_size=stages,
        max_num_seqs=64,
        max_model_len=4608,
        enable_prefix_caching=False,
        kv_cache_memory_bytes="1G",
        **options,
    ) as model:
        found["layers"] = [list(stage.layers) for stage in model._live().ready.stages]

        def run(sequences: int, prompt: int, output: int) -> float:
            prompts = [
                {"prompt_token_ids": [rng.randrange(100, 40_000) for _ in range(prompt)]}
                for _ in range(sequences)
            ]
            params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
            started = time.perf_counter()
            model.generate(prompts, params)
            return time.perf_counter() - started

        run(16, PROMPT, 16)
        for sequences in (1, 16, 32):
            seconds = run(sequences, PROMPT, OUTPUT)
            found[f"tok_s_{sequences}"] = sequences * OUTPUT / seconds
            found[f"busy_{sequences}"] = list(model._live().busy())
        found["ttft_s"] = run(1, LONG, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--split", help="as --pipeline-split")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    options: dict[str, Any] = {"model": args.model, "dtype": args.dtype}
    if args.one:
        if args.split and args.one > 1:
            options["pipeline_split"] = args.split
        print(json.dumps(one(args.one, options)))
        return
    runs: dict[int, list[dict[str, Any]]] = {1: [], args.stages: []}
    for _ in range(args.rounds):
        for stages, results in runs.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--one", str(stages)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(stages, results[-1], flush=True)

    def middle(stages: int, name: str) -> float:
        return float(median(result[name] for result in runs[stages]))

    two = args.stages
    ratios = {
        "32 sequences against one core's 16": middle(two, "tok_s_32") / middle(1, "tok_s_16"),
        "32 sequences against one core's 32": middle(two, "tok_s_32") / middle(1, "tok_s_32"),
        "16 sequences against one core's 16": middle(two, "tok_s_16") / middle(1, "tok_s_16"),
        "1 sequence": middle(two, "tok_s_1") / middle(1, "tok_s_1"),
        "time to first token": middle(two, "ttft_s") / middle(1, "ttft_s"),
    }
    for name, ratio in ratios.items():
        print(f"{name:<40}{ratio:.2f}")
    if args.output is not None:
        args.output.write_text(json.dumps({"runs": runs, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
