"""Longrope through the engine: a sequence turns by its own length, also when that grows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from torch_tiny import LONGROPE, make_reference
from torch_tiny import reference_logits as forward

from pippin import config
from pippin.engine.core import EngineCore, load
from pippin.types.request import Request, SamplingParams

ORIGINAL = LONGROPE["original_max_position_embeddings"]
NEW_TOKENS = 12


def greedy(prompt: list[int]) -> list[int]:
    """By whole forwards of a model that has seen nothing else."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        logits = forward(make_reference("phi3", LONGROPE), tokens)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


def run(engine: EngineCore, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    for name, prompt in prompts.items():
        engine.add(
            Request(
                request_id=name,
                prompt_token_ids=prompt,
                params=SamplingParams(temperature=0, ignore_eos=True),
                seed=0,
                max_tokens=NEW_TOKENS,
            )
        )
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_unfinished():
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            assert output.error is None
    return tokens


@pytest.mark.parametrize("max_num_batched_tokens", [8, 256])
def test_tokens_equal_whole_forwards(max_num_batched_tokens: int, tmp_path: Path) -> None:
    make_reference("phi3", LONGROPE).save_pretrained(tmp_path)
    engine = load(
        config.build(
            {
                "model": {"model": str(tmp_path), "device": "cpu", "dtype": "float32"},
                "cache": {"block_size": 4, "kv_cache_bytes": 4 << 20},
                "scheduler": {"max_num_batched_tokens": max_num_batched_tokens},
            }
        )
    )
    rng = random.Random(0)
    longest = [rng.randrange(3, 151) for _ in range(2 * ORIGINAL)]
    lengths = (5, ORIGINAL - 9, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, ORIGINAL + 20)
    # All share their beginning: what one cached must not serve one that turns otherwise.
    prompts = {str(length): longest[:length] for length in lengths}
    wanted = {name: greedy(prompt) for name, prompt in prompts.items()}
    assert run(engine, prompts) == wanted
    assert run(engine, dict(reversed(prompts.items()))) == wanted  # now from a warm cache
    assert engine.stats().prefix_cache_hits > 0
    engine.close()
