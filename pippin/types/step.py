"""One step of the engine, as the stages see it."""

from __future__ import annotations

import msgspec


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one sequence that run in one step.

    A decode is a chunk of one token; a prefill chunk has more. The first chunk of a sequence
    starts behind its cached prefix and brings the whole block table so far.
    """

    seq: int
    """Slot number, unique among live sequences; reused only after it was in ``StepPlan.freed``."""
    start: int
    """Absolute position of the first token."""
    token_ids: list[int]
    new_blocks: tuple[tuple[int, ...], ...]
    """Per KV group: blocks appended to the sequence's table since its last chunk. Entry ``i`` of a
    table holds positions ``[i * block_size, (i + 1) * block_size)``; -1 stands for a block behind
    the window of a window group, which is never read."""
    num_logits: int
    """Rows of logits wanted, counted from the chunk's last token backwards: 0 inside a prompt,
    1 when a token is sampled, more for prompt logprobs."""
    layers: tuple[int, int] | None = None
    """Layers [first, last) only; None for all. A chunk that runs a few layers at a time stands in
    consecutive plans, the last of its chunks, with the same tokens, until its last layer: the stage
    keeps its hidden states in between. Block tables grow in the first of these plans."""
    num_known: int = 0
    """Tokens of the sequence that are known, if more than ``end``: rope variants depend on the
    length of the whole prompt, not of the chunks so far."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def length(self) -> int:
        """Of the sequence."""
        return max(self.end, self.num_known)


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """A flat batch of tokens. Plans are diffs and must be executed in order of ``step``."""

    step: int
    chunks: tuple[Chunk, ...]
    freed: tuple[int, ...] = ()
    """Sequences that ended or were preempted before this step: stages forget their tables."""

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


class SchedulerStats(msgspec.Struct, frozen=True, array_like=True):
    """State after a step, for metrics and the router."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    """Fraction of blocks held by live sequences, 0 to 1 (cached but unreferenced ones are free)."""
    num_preemptions: int
    """Since the start."""
    prefix_cache_queries: int
    """Prompt tokens looked up since the start."""
    prefix_cache_hits: int
    """Prompt tokens found since the start."""
    num_tokens: int
    """Tokens in the last step."""
    step_seconds: float
    """Time of the last step, in the slowest stage."""
    busy: tuple[float, ...] = ()
    """Per stage: time computing over time passed, of the last seconds."""
