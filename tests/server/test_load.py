"""Many requests over HTTP: each ends, nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import re

import httpx
import pytest

pytestmark = pytest.mark.model


def metric(text: str, name: str) -> float:
    """Sum of a metric's samples."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    assert found, f"/metrics has no {name}"
    return sum(map(float, found))


async def idle(client: httpx.AsyncClient) -> str:
    """/metrics once nothing runs or waits. The test's own time limit is the deadline."""
    while True:
        text = (await client.get("/metrics")).text
        busy = metric(text, "vllm:num_requests_running") + metric(text, "vllm:num_requests_waiting")
        if not busy:
            return text
        await asyncio.sleep(0.1)


async def complete(client: httpx.AsyncClient, rng: random.Random, longest: int) -> int:
    """A request of random lengths; returns the tokens it was answered with."""
    wanted = rng.randint(1, longest)
    answer = await client.post(
        "/v1/completions",
        json={
            "model": "demo",
            "prompt": [rng.randrange(100, 40_000) for _ in range(rng.randint(1, 4 * longest))],
            "max_tokens": wanted,
            "ignore_eos": True,
        },
    )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == wanted
    return wanted


async def hang_up(client: httpx.AsyncClient, rng: random.Random) -> None:
    """A stream that its reader leaves after a few chunks."""
    body = {
        "model": "demo",
        "prompt": [rng.randrange(100, 40_000) for _ in range(rng.randint(1, 300))],
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        chunks = rng.randint(1, 4)
        async for line in answer.aiter_lines():
            chunks -= line.startswith("data:")
            if not chunks:
                return


async def check(live: str, count: int, cancelled: int, longest: int) -> None:
    rng = random.Random(count)
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=live, timeout=600, limits=limits) as client:
        before = await idle(client)
        kinds = [False] * (count - cancelled) + [True] * cancelled
        rng.shuffle(kinds)
        await asyncio.gather(
            *(hang_up(client, rng) if kind else complete(client, rng, longest) for kind in kinds)
        )
        after = await idle(client)
    assert metric(after, "vllm:kv_cache_usage_perc") == 0.0
    ended = "vllm:request_success_total"
    assert metric(after, ended) - metric(before, ended) == count, "each request has one ending"


def test_sixty_four_at_once_some_cancelled(live: str):
    asyncio.run(check(live, count=64, cancelled=16, longest=48))


def test_nothing_is_left_after_a_thousand_requests(live: str):
    asyncio.run(check(live, count=1000, cancelled=50, longest=4))
