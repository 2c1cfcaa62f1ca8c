"""Steps that measure a machine before the first request (pure)."""

from __future__ import annotations

from pippin.engine.budget import StepWork, attention_pairs
from pippin.types.step import Chunk, StepPlan

#: Prompt tokens of the measured steps, each behind the one before; the first two warm up.
CHUNKS = (16, 64, 16, 64, 256, 512)
#: Sequences that are decoded together.
DECODES = (1, 4, 16)
#: Prompt tokens that run beside one decode.
MIXED = 64


def calibration_plans(
    num_blocks: tuple[int, ...], block_size: int, max_num_seqs: int, max_tokens: int
) -> list[tuple[StepPlan, StepWork | None]]:
    """Plans to execute in order, and what each computes; those with None are not to be timed.

    Prompts of growing length, decodes, both mixed, each twice; as far as blocks (per KV group in
    ``num_blocks``), ``max_num_seqs`` and ``max_tokens`` a step allow. Step numbers are negative,
    since a scheduler's start at 0, and the last plan frees all slots used.
    """
    steps = _Steps(num_blocks, block_size)
    for index, count in enumerate(CHUNKS):
        if count <= max_tokens:
            steps.prompt(count, timed=index > 1)
    for count in DECODES:
        if count <= min(max_num_seqs, max_tokens):
            for _ in range(2):
                steps.decodes(count)
    if max_num_seqs > 1 and max_tokens > MIXED:
        for _ in range(2):
            steps.mixed(MIXED)
    return steps.numbered()


class _Steps:
    """Slot 0 holds a prompt, the others one token each, which is computed again and again."""

    def __init__(self, num_blocks: tuple[int, ...], block_size: int) -> None:
        self._blocks_left = min(num_blocks)
        self._num_blocks = min(num_blocks)
        self._num_groups = len(num_blocks)
        self._block_size = block_size
        self._length = 0
        self._slots: set[int] = set()
        self._steps: list[tuple[tuple[Chunk, ...], StepWork | None]] = []

    def _take(self, count: int) -> tuple[tuple[int, ...], ...] | None:
        """``count`` blocks in every group, ascending."""
        if count > self._blocks_left:
            return None
        first = self._num_blocks - self._blocks_left
        self._blocks_left -= count
        return (tuple(range(first, first + count)),) * self._num_groups

    def _prompt_chunk(self, count: int) -> Chunk | None:
        end = self._length + count
        blocks = self._take(-(-end // self._block_size) - -(-self._length // self._block_size))
        if blocks is None:
            return None
        chunk = Chunk(0, self._length, [0] * count, blocks, 1)
        self._length = end
        self._slots.add(0)
        return chunk

    def _decode_chunk(self, slot: int) -> Chunk | None:
        blocks = ((),) * self._num_groups if slot in self._slots else self._take(1)
        if blocks is None:
            return None
        self._slots.add(slot)
        return Chunk(slot, 0, [0], blocks, 1)

    def prompt(self, count: int, *, timed: bool) -> None:
        start = self._length
        chunk = self._prompt_chunk(count)
        if chunk is not None:
            work = StepWork(prefill_tokens=count, attention=attention_pairs(start, count))
            self._steps.append(((chunk,), work if timed else None))

    def decodes(self, count: int) -> None:
        chunks = [self._decode_chunk(1 + index) for index in range(count)]
        done = tuple(chunk for chunk in chunks if chunk is not None)
        if done:
            self._steps.append((done, StepWork(decodes=len(done), context=len(done))))

    def mixed(self, count: int) -> None:
        start = self._length
        decode = self._decode_chunk(1)
        prompt = self._prompt_chunk(count)
        if decode is not None and prompt is not None:
            pairs = attention_pairs(start, count)
            self._steps.append(((decode, prompt), StepWork(1, 1, count, pairs)))

    def numbered(self) -> list[tuple[StepPlan, StepWork | None]]:
        last = StepPlan(-1, (), tuple(sorted(self._slots)))
        first = -1 - len(self._steps)
        return [
            *(
                (StepPlan(first + index, chunks), work)
                for index, (chunks, work) in enumerate(self._steps)
            ),
            (last, None),
        ]
