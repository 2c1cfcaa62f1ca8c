"""What the engine asks of a backend.

A backend is used from one thread. Arrays stay inside it: plans, rows and tokens cross the border.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pippin.types.model import ModelInfo
from pippin.types.request import Logprobs, SamplingParams
from pippin.types.step import StepPlan


@dataclass(frozen=True, slots=True)
class SamplingState:
    """Everything the sampler must know of a sequence when it enters (or enters again)."""

    params: SamplingParams
    seed: int
    choice: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """Tokens generated so far; not empty after preemption or when a request was moved here."""
    stop_token_ids: frozenset[int]
    """End-of-sequence and stop ids that must not appear before ``min_tokens`` tokens."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row to sample."""

    row: int
    """Row of the step's logits."""
    seq: int
    position: int
    """Absolute position of the token that is sampled (prompt length + tokens generated so far)."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: Logprobs | None = None
    """Only if the request asked for them."""


class Sampler(Protocol):
    """Chooses tokens; keeps penalties' counts a sequence. Deterministic: see ``backends.noise``."""

    def add(self, seq: int, state: SamplingState) -> None:
        """Take a sequence in. Replays ``output_token_ids`` into its counts."""
        ...

    def remove(self, seq: int) -> None: ...

    def sample(self, logits: Any, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """Choose a token for every row and count it as output of its sequence.

        ``logits``: the backend's array, float of shape [rows, vocab_size]; it may be overwritten.
        """
        ...

    def prompt_logprobs(
        self, logits: Any, first_row: int, targets: Sequence[int], top: int
    ) -> list[Logprobs]:
        """Log probabilities of ``targets[i]`` in row ``first_row + i``, and the ``top`` best."""
        ...


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """Sizes that fit in memory."""

    num_blocks: tuple[int, ...]
    """Per KV group."""
    kv_bytes: int


class StageRunner(Protocol):
    """Layers [a, b) of a model on one device."""

    info: ModelInfo
    sampler: Sampler
    device: str
    """In words, for the start-up summary: ``cpu (2 threads, AVX2)``, ``cuda:0 (NVIDIA H200)``."""
    reason: str
    """Why this device, dtype and weight format."""

    def available_kv_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """Bytes left for KV after weights and the largest step, found by a profiling pass."""
        ...

    def allocate_kv(self, num_blocks: tuple[int, ...], block_size: int) -> None:
        """Allocate the pools, one array of blocks a layer. Block numbers are in [0, num_blocks)."""
        ...

    def execute(self, plan: StepPlan) -> Any:
        """Run a step. Returns logits of shape [rows, vocab_size], rows in the order of the plan's
        chunks (``num_logits`` each, ascending positions), or None when no chunk wants any. A plan
        without chunks only forgets the sequences in ``freed``."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done what ``execute`` started."""
        ...

    def close(self) -> None: ...
