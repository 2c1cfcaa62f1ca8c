"""What the sampler's tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pippin.backends.base import SampledToken, SampleRow, SamplingState
from pippin.backends.torch.sampler import TorchSampler
from pippin.types.request import SamplingParams

VOCAB = 500

DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append("cuda")
if torch.backends.mps.is_available():
    DEVICES.append("mps")

VARIED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 20},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.0},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"min_p": 0.05, "temperature": 1.5},
    {"top_p": 0.95, "logit_bias": {4: 3.0, 9: -100.0}},
    {"allowed_token_ids": tuple(range(0, 500, 3))},
    {"min_tokens": 5, "stops": (0, 7), "bad_words": ((3,), (5, 6))},
    {"top_p": 0.95, "logprobs": 3},
]


def state(
    seed: int = 0,
    choice: int = 0,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    stops: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> SamplingState:
    return SamplingState(
        params=SamplingParams(max_tokens=None, **params),
        seed=seed,
        choice=choice,
        prompt_token_ids=prompt,
        output_token_ids=output,
        stop_token_ids=frozenset(stops),
        bad_words_token_ids=bad_words,
    )


def logits(rows: int = 1, seed: int = 0, scale: float = 2.0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.from_numpy(
        np.random.default_rng(seed).normal(0, scale, (rows, vocab)).astype(np.float32)
    )


def sample_one(
    device: torch.device, state: SamplingState, line: torch.Tensor, position: int | None = None
) -> SampledToken:
    sampler = TorchSampler(line.shape[-1], device)
    sampler.add(0, state)
    if position is None:
        position = len(state.prompt_token_ids) + len(state.output_token_ids)
    [token] = sampler.sample(line.reshape(1, -1).clone().to(device), [SampleRow(0, 0, position)])
    return token
