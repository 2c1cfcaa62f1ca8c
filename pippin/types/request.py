"""What a client asks for and what it gets back, in token ids.

The engine knows only these types. Text (templates, stop strings, detokenising) belongs to the
server, wire formats to ``server.openai``.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import msgspec

from pippin.errors import InvalidRequest

#: Largest ``logprobs`` / ``top_logprobs`` a request may ask for (vLLM's ``--max-logprobs``).
MAX_LOGPROBS = 20

#: Largest ``n``, so that one request cannot fill the queue by itself.
MAX_CHOICES = 128


class FinishReason(StrEnum):
    """Why a sequence ended; the values are the OpenAI API's ``finish_reason``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen. Names, defaults and meanings are vLLM's ``SamplingParams``.

    Raises ``InvalidRequest`` (naming the field) when a value is outside its range.

    Source: https://docs.vllm.ai/en/latest/api/vllm/sampling_params/
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: as many as the context length leaves."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of most likely tokens to report at each position, besides the sampled one."""
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            self._make_tuple(name)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            if not math.isfinite(getattr(self, name)):
                raise InvalidRequest(f"{name} must be a finite number.", param=name)
        _within("n", self.n, 1, MAX_CHOICES)
        _within("temperature", self.temperature, 0.0, math.inf)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p must be in (0, 1], got {self.top_p}.", param="top_p")
        _within("top_k", self.top_k, -1, 2**31 - 1)
        _within("min_p", self.min_p, 0.0, 1.0)
        if not self.repetition_penalty > 0.0:
            raise InvalidRequest(
                f"repetition_penalty must be above 0, got {self.repetition_penalty}.",
                param="repetition_penalty",
            )
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidRequest(
                f"max_tokens must be at least 0, got {self.max_tokens}.", param="max_tokens"
            )
        _within("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).",
                param="min_tokens",
            )
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _within(name, count, 0, MAX_LOGPROBS)
        for name, words in (("stop", self.stop), ("bad_words", self.bad_words)):
            if any(not word for word in words):
                raise InvalidRequest(f"{name} must not contain an empty string.", param=name)
        for token, bias in (self.logit_bias or {}).items():
            if not math.isfinite(bias) or not -100.0 <= bias <= 100.0:
                raise InvalidRequest(
                    f"logit_bias of token {token} must be in [-100, 100], got {bias}.",
                    param="logit_bias",
                )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty.", param="allowed_token_ids")

    def _make_tuple(self, name: str) -> None:
        """Python callers may give a list, one string, or None for nothing, as in vLLM."""
        value: Any = getattr(self, name)
        if isinstance(value, tuple) or (value is None and name == "allowed_token_ids"):
            return
        items = (value,) if isinstance(value, str) else tuple(value or ())
        if any(isinstance(item, str) != (name in ("stop", "bad_words")) for item in items):
            raise InvalidRequest(f"{name} holds a value of the wrong type.", param=name)
        msgspec.structs.force_setattr(self, name, items)

    @property
    def greedy(self) -> bool:
        """Temperatures under 1e-5 are greedy, as in vLLM."""
        return self.temperature < 1e-5

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``InvalidRequest`` if a token id named here is outside ``[0, vocab_size)``."""
        named: tuple[tuple[str, Any], ...] = (
            ("logit_bias", self.logit_bias or ()),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
        )
        for name, tokens in named:
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise InvalidRequest(
                        f"{name} holds token id {token}, outside the vocabulary of"
                        f" {vocab_size} tokens.",
                        param=name,
                    )


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        bound = f"at least {low}" if high == math.inf else f"in [{low}, {high}]"
        raise InvalidRequest(f"{name} must be {bound}, got {value}.", param=name)


class Request(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One sequence to generate: a request with ``n`` choices is ``n`` of these.

    ``output_token_ids`` is empty for a new request; a request that moves to another replica
    carries what was already generated, and the new leader replays it (penalties, min_tokens,
    grammar) and goes on from there.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """Set at admission, also for unseeded requests (DESIGN 1.6)."""
    choice: int = 0
    max_tokens: int
    """Resolved against the context length: prompt + max_tokens <= max_model_len."""
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    """Lower runs first under the ``priority`` policy, as in vLLM."""
    arrival_time: float = 0.0
    """Seconds since the epoch."""
    deadline: float | None = None
    """Seconds since the epoch after which the request ends with an error."""
    cache_salt: str = ""
    """Mixed into the prefix hash, so that tenants do not share cached blocks."""
    output_token_ids: list[int] = []


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position, of the model's own distribution: before masks, bias,
    penalties and temperature (vLLM's default, ``raw_logprobs``). All finite, at least -9999.

    ``token_ids[0]`` is the sampled (or prompt) token; the ``k`` most likely follow, best first.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the sampled token, 1 being the most likely."""


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one step added to one sequence. ``finish_reason`` appears exactly once."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    """All prompt positions at once (the first is None), with the first output."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token id that ended the sequence (None for end-of-sequence)."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; sent with the first output."""
    queue_seconds: float = 0.0
    """Waiting time before the first step; sent with the first output."""
    error: str | None = None
    """The message behind ``FinishReason.ERROR``."""
