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


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What travels from one stage to the next: plain bytes, since stages may differ in backend."""

    dtype: str
    """``float32``, ``bfloat16`` or ``float16``."""
    shape: tuple[int, int]
    """[T, hidden_size], rows in the order of the plan's tokens."""
    data: memoryview
    """C-contiguous, little endian, T * hidden_size * itemsize bytes. Read only to the receiver."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The processes that share each layer of one stage (tensor parallel)."""

    rank: int
    size: int
    backend: str
    """``gloo`` or ``nccl`` (torch), ``ring`` or ``jaccl`` (MLX)."""
    addresses: tuple[str, ...]
    """``host:port`` of each rank; torch uses the first one's as its meeting point."""
    devices: tuple[tuple[str | None, ...], ...] = ()
    """JACCL: the RDMA device of each rank towards each other one, None towards itself."""


class StageRunner(Protocol):
    """Layers [a, b) of a model on one device.

    A backend's module ``runner`` makes one with
    ``load(config, files, *, first_layer=0, last_layer=None, group=None)``. In a group every rank
    executes the same plans and hidden states; only rank 0's result is used.
    """

    info: ModelInfo
    """Its ``kv_groups`` are the whole model's, in the same order on every stage, with the layers
    and the ``bytes_per_token`` of this stage (0 where it has no layer of that group)."""
    sampler: Sampler
    device: str
    """In words, for the start-up summary: ``cpu (2 threads, AVX2)``, ``cuda:0 (NVIDIA H200)``."""
    reason: str
    """Why this device, dtype and weight format."""
    runs_ahead: bool
    """``execute`` returns before its step is done, and the next one may be handed over meanwhile;
    ``synchronize`` waits for it."""
    splits_layers: bool
    """It has all layers, and runs chunks a few of them at a time (``Chunk.layers``)."""

    def available_kv_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """Bytes left for KV after weights and the largest step, found by a profiling pass."""
        ...

    def allocate_kv(self, num_blocks: tuple[int, ...], block_size: int) -> None:
        """Allocate the pools, one array of blocks a layer. Block numbers are in [0, num_blocks)."""
        ...

    def execute(self, plan: StepPlan, hidden: HiddenStates | None = None) -> Any:
        """Run a step. A stage behind the first takes what the one before it returned.

        The last stage returns logits of shape [rows, vocab_size], rows in the order of the plan's
        chunks (``num_logits`` each, ascending positions), or None when no chunk wants any; others
        return ``HiddenStates``. A plan without chunks only forgets the sequences in ``freed`` and
        gives None. Ranks above 0 of a group may return None.
        """
        ...

    def synchronize(self) -> None:
        """Wait until the device has done what ``execute`` started."""
        ...

    def close(self) -> None: ...
