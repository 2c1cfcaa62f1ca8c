"""The whole engine with the demo model against the model library's own ``generate``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pippin import config
from pippin.config import environment
from pippin.engine.core import EngineCore, load
from pippin.models.files import resolve
from pippin.types.request import Request, SamplingParams

pytestmark = pytest.mark.model

#: Prompt lengths in tokens.
LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 100, 128, 200, 257, 400, 640, 1000, 1500)
NEW_TOKENS = 8

Make = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def make() -> Iterator[Make]:
    engines: list[EngineCore] = []

    def make(**sections: dict[str, Any]) -> EngineCore:
        sections.setdefault("cache", {"kv_cache_bytes": 512 << 20})
        values = {"model": {"model": "demo", "dtype": "float32"}, **sections}
        engines.append(load(config.build(values)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(100, 40_000) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations by transformers, one prompt at a time, in float32."""
    path = resolve("demo", home=environment().home).path
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


def run(
    engine: EngineCore,
    prompts: list[list[int]],
    params: SamplingParams | None = None,
    *,
    seeds: list[int] | None = None,
) -> list[list[int]]:
    """Token ids of each prompt's answer, all prompts at once."""
    params = params or SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        answers[str(index)] = []
        engine.add(
            Request(
                request_id=str(index),
                prompt_token_ids=prompt,
                params=params,
                seed=seeds[index] if seeds else 0,
                max_tokens=params.max_tokens or 0,
            )
        )
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None
            answers[output.request_id] += output.token_ids
    assert engine.stats().kv_cache_usage == 0.0
    return list(answers.values())


def test_greedy_equals_generate_chunked_batched_and_cached(
    make: Make, prompts: list[list[int]], expected: list[list[int]]
):
    engine = make(scheduler={"max_num_batched_tokens": 64, "max_num_seqs": 16})
    assert run(engine, prompts) == expected
    hits = engine.stats().prefix_cache_hits
    assert run(engine, prompts) == expected, "with a warm prefix cache"
    assert engine.stats().prefix_cache_hits - hits > sum(LENGTHS) / 2


def test_greedy_equals_generate_alone_and_unchunked(
    make: Make, prompts: list[list[int]], expected: list[list[int]]
):
    engine = make(cache={"kv_cache_bytes": 512 << 20, "enable_prefix_caching": False})
    alone = [run(engine, [prompt])[0] for prompt in prompts]
    assert alone == expected
    assert engine.stats().prefix_cache_hits == 0


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(make: Make):
    rng = random.Random(2)
    prompts = [[rng.randrange(100, 40_000) for _ in range(20 + i)] for i in range(16)]
    seeds = [1000 + i for i in range(16)]
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=40, ignore_eos=True)
    roomy = make()
    alone = [
        run(roomy, [prompt], params, seeds=[seed])[0]
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert run(roomy, prompts, params, seeds=seeds) == alone
    # 22 blocks of 16 tokens cannot hold 16 sequences of up to 75: some give theirs back.
    per_token = roomy.ready.kv_bytes // (roomy.ready.num_blocks[0] * 16)
    tight = make(
        model={"model": "demo", "dtype": "float32", "max_model_len": 128},
        cache={"kv_cache_bytes": 22 * 16 * per_token},
    )
    assert run(tight, prompts, params, seeds=seeds) == alone
    assert tight.stats().num_preemptions > 0
