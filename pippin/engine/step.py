"""A step's plan and what the engine needs beside it (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from pippin.backends.base import SampleRow
from pippin.engine.budget import StepWork, attention_pairs
from pippin.engine.sequence import Part, Sequence
from pippin.types.step import Chunk, StepPlan


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of logits that score prompt tokens."""

    seq: int
    first_row: int
    """Row of the step's logits; ``targets[i]`` is scored by row ``first_row + i``."""
    targets: tuple[int, ...]
    top: int
    """Number of most likely tokens to report beside each target."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step's plan and what goes with it."""

    plan: StepPlan
    entered: tuple[Sequence, ...]
    """Sequences that the sampler must take in (``slot``, ``sampling_state()``) before it samples,
    and after it removed those of ``plan.freed``."""
    rows: tuple[SampleRow, ...]
    """Rows to sample, in the plan's order."""
    prompt_rows: tuple[PromptRows, ...]
    sequences: tuple[Sequence, ...]
    """Of the plan's chunks, in their order."""
    work: StepWork


class StepBuilder:
    """A plan in the making."""

    def __init__(self, tokens_left: int) -> None:
        self.tokens_left = tokens_left
        self.seconds = 0.0
        """Prefill time that is left."""
        self.mixed = False
        """Sequences decode beside the prefill."""
        self.preempted = False
        self.num_rows = 0
        self.num_prompt_rows = 0
        self.prefill_tokens = 0
        self._attention = 0
        self._share = 1.0
        self._decodes = 0
        self._context = 0
        self._chunks: list[Chunk] = []
        self._sequences: list[Sequence] = []
        self._entered: list[Sequence] = []
        self._rows: list[SampleRow] = []
        self._prompt_rows: list[PromptRows] = []

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def add_decode(self, seq: Sequence, new_blocks: tuple[tuple[int, ...], ...]) -> None:
        """Take the newest token of a running sequence."""
        start = seq.num_scheduled
        end = start + 1
        self._chunks.append(Chunk(seq.slot, start, seq.tokens[start:], new_blocks, 1))
        self._rows.append(SampleRow(self.num_rows, seq.slot, end))
        self._sequences.append(seq)
        self.num_rows += 1
        self._decodes += 1
        self._context += end
        self.tokens_left -= 1
        seq.num_scheduled = end
        seq.in_flight += 1

    def add_prefill(
        self, seq: Sequence, count: int, new_blocks: tuple[tuple[int, ...], ...]
    ) -> None:
        """Take the next ``count`` tokens of a sequence."""
        start = seq.num_scheduled
        seq.num_scheduled = start + count
        self._add_chunk(seq, start, count, new_blocks)

    def add_part(
        self,
        seq: Sequence,
        part: Part,
        layers: int,
        new_blocks: tuple[tuple[int, ...], ...],
        num_layers: int,
    ) -> None:
        """Take some more ``layers`` of ``part``; the step must have no other prefill."""
        assert not self.prefill_tokens
        start, last = seq.num_scheduled, part.layers + layers
        self._share = layers / num_layers
        if last == num_layers:
            seq.num_scheduled = start + part.count
            seq.part = None
        else:
            seq.part = Part(part.count, last)
        self._add_chunk(seq, start, part.count, new_blocks, (part.layers, last))

    def _add_chunk(
        self,
        seq: Sequence,
        start: int,
        count: int,
        new_blocks: tuple[tuple[int, ...], ...],
        layers: tuple[int, int] | None = None,
    ) -> None:
        end = start + count
        num_logits = 0
        if seq.num_scheduled == end:
            num_logits = self._score_prompt(seq, start, end)
            if end == len(seq.tokens) and seq.wants_token:
                num_logits = max(num_logits, 1)
                self._rows.append(SampleRow(self.num_rows + num_logits - 1, seq.slot, end))
        tokens = seq.tokens[start:end]
        known = len(seq.tokens)
        self._chunks.append(Chunk(seq.slot, start, tokens, new_blocks, num_logits, layers, known))
        self._sequences.append(seq)
        if not seq.entered:
            seq.entered = True
            self._entered.append(seq)
        self.num_rows += num_logits
        self.prefill_tokens += count
        self._attention += attention_pairs(start, count)
        self.tokens_left -= count
        seq.in_flight += 1

    def _score_prompt(self, seq: Sequence, start: int, end: int) -> int:
        """Ask for the logits of prompt positions that are not scored yet; rows wanted.

        The row of position ``p`` scores token ``p + 1``, so the last prompt position scores none.
        After a preemption, positions that were scored before are not asked for again.
        """
        if seq.prompt_logprobs is None:
            return 0
        first, last = max(start, len(seq.prompt_logprobs) - 1), min(end, seq.num_prompt - 1)
        if first >= last:
            return 0
        top = seq.request.params.prompt_logprobs
        assert top is not None
        targets = tuple(seq.tokens[first + 1 : last + 1])
        self._prompt_rows.append(PromptRows(seq.slot, self.num_rows, targets, top))
        self.num_prompt_rows += end - first
        return end - first

    def build(self, step: int, freed: tuple[int, ...]) -> Scheduled:
        return Scheduled(
            plan=StepPlan(step, tuple(self._chunks), freed),
            entered=tuple(self._entered),
            rows=tuple(self._rows),
            prompt_rows=tuple(self._prompt_rows),
            sequences=tuple(self._sequences),
            work=StepWork(
                self._decodes, self._context, self.prefill_tokens, self._attention, self._share
            ),
        )
