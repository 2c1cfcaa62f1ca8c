"""A long prompt arrives while somebody's stream runs: what does each notice of the other?

    python benchmarks/long_prompt.py [--model demo] [--prompt-tokens 6000] [--rounds 3]

Starts `pippin serve` with default settings. In each round: (1) the long prompt alone, for its time
to first token; (2) a stream, and once it has run for a while, another long prompt beside it.
Prints the stream's largest gap over the median gap it had before (goal: under 4), and the prompt's
time to first token over what it took alone (goal: at most 1.5). Prompts are random token ids, so
the prefix cache helps nobody.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import httpx

PORT = 18110
BEFORE = 40
"""Gaps of the stream before the prompt arrives."""


async def stream(
    client: httpx.AsyncClient,
    prompt: list[int] | str,
    max_tokens: int,
    on_token: Callable[[float], bool] = lambda now: False,
) -> list[float]:
    """Arrival times of tokens; ``on_token`` returning True hangs up."""
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    times: list[float] = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit((await answer.aread()).decode())
        async for line in answer.aiter_lines():
            if line.startswith("data:") and not line.endswith("[DONE]"):
                if json.loads(line[5:])["choices"]:
                    times.append(time.perf_counter())
                if on_token(time.perf_counter()):
                    break
    return times


async def one_round(tokens: int, rng: random.Random) -> tuple[float, float, float, float]:
    """Median gap before, largest gap during, and the prompt's time to first token alone, beside."""

    def prompt() -> list[int]:
        return [rng.randrange(1000, 40_000) for _ in range(tokens)]

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=600) as client:
        started = time.perf_counter()
        alone = (await stream(client, prompt(), 1))[0] - started
        ready, done = asyncio.Event(), asyncio.Event()
        seen: list[float] = []

        def watch(now: float) -> bool:
            seen.append(now)
            if len(seen) > BEFORE:
                ready.set()
            return done.is_set()

        background = asyncio.create_task(stream(client, "Once upon a time", 4000, watch))
        await ready.wait()
        arrived = time.perf_counter()
        first = (await stream(client, prompt(), 1))[0]
        done.set()
        await background
    gaps = [(b, b - a) for a, b in itertools.pairwise(seen)]
    before = statistics.median(gap for end, gap in gaps if end < arrived)
    during = max(gap for end, gap in gaps if arrived <= end and end - gap <= first)
    return before, during, alone, first - arrived


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompt-tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pippin",
            "serve",
            given.model,
            "--port",
            str(PORT),
            "--served-model-name",
            "demo",
        ]
    )
    try:
        while True:
            if server.poll() is not None:
                raise SystemExit("the server ended; see its messages above")
            try:
                if httpx.get(f"http://127.0.0.1:{PORT}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        rng = random.Random(0)
        for number in range(given.rounds):
            before, during, alone, beside = asyncio.run(one_round(given.prompt_tokens, rng))
            print(
                f"round {number + 1}: median gap {before * 1e3:.1f} ms, largest beside the prompt"
                f" {during * 1e3:.1f} ms = {during / before:.2f} times;"
                f" time to first token alone {alone:.2f} s, beside {beside:.2f} s"
                f" = {beside / alone:.2f} times",
                flush=True,
            )
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main()
