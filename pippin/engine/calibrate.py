"""Measures a machine before the first request: which steps to run (pure but for the callback)."""

from __future__ import annotations

from collections.abc import Callable

from pippin.engine.budget import StepBudget, StepWork, attention_pairs
from pippin.types.step import Chunk, StepPlan

#: A position far enough from the start for what attention costs to show.
FAR = 2048
#: Prompt tokens of the steps without decodes, and the position of the first.
PROMPTS = (
    (16, 0),
    (64, 0),
    (64, FAR),
    (64, 0),
    (256, 0),
    (128, FAR),
    (256, 0),
    (128, FAR),
    (1024, 0),
)
#: The first ones warm up and are not counted.
_WARMUPS = 3
#: Sequences of the steps that only decode, and the position they are at.
DECODES = ((1, 0), (1, 0), (1, FAR), (4, 0), (1, FAR), (4, 0), (16, 0), (16, 0))
#: Prompt tokens of the steps with a decode beside them.
MIXED = (32, 64, 128, 64)

#: Seconds after which no larger step is tried.
LIMIT_SECONDS = 2.0


def calibrate(
    budget: StepBudget,
    execute: Callable[[StepPlan], float],
    *,
    num_blocks: tuple[int, ...],
    block_size: int,
    max_num_seqs: int,
    limit_seconds: float = LIMIT_SECONDS,
) -> list[tuple[StepWork, float]]:
    """Run small steps and let ``budget`` learn from them. Returns what was measured.

    ``execute`` runs a plan to its end and returns the seconds it took. Each plan stands for itself
    (its slots are in the next one's ``freed``); the last has no chunks. Step numbers are negative,
    since a scheduler's start at 0. Steps that the KV blocks (per group), ``max_num_seqs`` or the
    budget's ``max_tokens`` forbid are left out, and so are prompts after ``limit_seconds`` and
    those that would take as long by themselves.
    """
    bench = _Bench(execute, min(num_blocks), len(num_blocks), block_size)
    measured: list[tuple[StepWork, float]] = []
    most = min(budget.max_tokens, bench.num_blocks * block_size)
    room = bench.num_blocks * block_size
    for index, (count, start) in enumerate(PROMPTS):
        if count > most or start + count > room or not bench.allows(count, limit_seconds):
            continue
        work = StepWork(prefill_tokens=count, attention=attention_pairs(start, count))
        seconds = bench.run(0, count, start)
        if index == _WARMUPS:
            measured.clear()
        elif index < _WARMUPS:
            # Compiling and clearing memory count for nothing, unless it is the machine's own pace.
            bench.spent = min(bench.spent, seconds)
        measured.append((work, seconds))
    most = min(max_num_seqs, budget.max_tokens, bench.num_blocks)
    for count, start in DECODES:
        if count <= most and start < room:
            measured.append((StepWork(count, count + start), bench.run(count, 0, start)))
    most = min(budget.max_tokens, bench.num_blocks * block_size) - block_size
    for count in MIXED:
        if max_num_seqs > 1 and count <= most and bench.allows(count, 2 * limit_seconds):
            work = StepWork(1, 1, count, attention_pairs(0, count))
            measured.append((work, bench.run(1, count)))
    bench.close()
    budget.calibrate(measured)
    return measured


class _Bench:
    def __init__(
        self,
        execute: Callable[[StepPlan], float],
        num_blocks: int,
        num_groups: int,
        block_size: int,
    ) -> None:
        self.num_blocks = num_blocks
        self.spent = 0.0
        self.per_token = 0.0
        """Of the last step, in seconds."""
        self._execute = execute
        self._num_groups = num_groups
        self._block_size = block_size
        self._step = -1000
        self._live: tuple[int, ...] = ()

    def allows(self, prompt: int, limit: float) -> bool:
        """Whether there is time for one more step, with so many prompt tokens."""
        return self.spent < limit and self.per_token * prompt < limit

    def run(self, decodes: int, prompt: int, start: int = 0) -> float:
        """Run a step of one-token sequences and a prompt; returns its seconds.

        What stands before ``start`` was never computed: it takes no less time to read. A single
        sequence may start there.
        """
        chunks: list[Chunk] = []
        used = 0
        for slot in range(decodes + (prompt > 0)):
            tokens = [0] * (prompt if slot == decodes else 1)
            blocks = -(-(start + len(tokens)) // self._block_size)
            table = tuple(range(used, used + blocks))
            chunks.append(Chunk(slot, start, tokens, (table,) * self._num_groups, 1))
            used += blocks
        seconds = self._send(tuple(chunks))
        self.spent += seconds
        self.per_token = seconds / (decodes + prompt)
        return seconds

    def close(self) -> None:
        self._send(())

    def _send(self, chunks: tuple[Chunk, ...]) -> float:
        seconds = self._execute(StepPlan(self._step, chunks, self._live))
        self._step += 1
        self._live = tuple(chunk.seq for chunk in chunks)
        return seconds
