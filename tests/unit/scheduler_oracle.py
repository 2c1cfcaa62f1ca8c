"""A stage made of plain dictionaries that checks every plan it executes.

``FakeEngine`` drives a real ``Scheduler``. Its KV memory stores, for each slot of each block, which
prefix (salt and tokens up to that position) was written there; a chunk may only read what its own
prefix says. The fake model's next token is a function of the prefix, so preemption, batching and
prefix sharing must not change any output.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from pippin.backends.base import SampledToken
from pippin.config import SchedulerConfig
from pippin.engine.blocks import KVCacheManager
from pippin.engine.budget import StepBudget
from pippin.engine.scheduler import Scheduled, Scheduler
from pippin.types.model import KVGroup, KVKind
from pippin.types.request import FinishReason, Logprobs, Request, SamplingParams, SequenceOutput
from pippin.types.step import Chunk

EOS = 0
VOCABULARY = 12
FULL = KVGroup(KVKind.FULL, (0,), 4)


def window(size: int) -> KVGroup:
    return KVGroup(KVKind.WINDOW, (1,), 4, window=size)


def request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 4,
    *,
    salt: str = "",
    priority: int = 0,
    arrival_time: float = 0.0,
    deadline: float | None = None,
    output: Sequence[int] = (),
    **params: object,
) -> Request:
    params.setdefault("ignore_eos", True)
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        seed=1,
        max_tokens=max_tokens,
        eos_token_ids=(EOS,),
        cache_salt=salt,
        priority=priority,
        arrival_time=arrival_time,
        deadline=deadline,
        output_token_ids=list(output),
    )


def fake_token(tokens: Sequence[int]) -> int:
    digest = hashlib.blake2b(array("I", tokens).tobytes(), digest_size=2).digest()
    return int.from_bytes(digest, "big") % VOCABULARY


def expected(r: Request, max_model_len: int) -> tuple[list[int], FinishReason, int | None]:
    """Output, finish reason and stop reason of a request that runs alone."""
    tokens = [*r.prompt_token_ids, *r.output_token_ids]
    new: list[int] = []
    count = len(r.output_token_ids)
    while count < r.max_tokens:
        token = fake_token(tokens)
        tokens.append(token)
        new.append(token)
        count += 1
        if count >= r.params.min_tokens:
            if token == EOS and not r.params.ignore_eos:
                return new, FinishReason.STOP, None
            if token in r.params.stop_token_ids:
                return new, FinishReason.STOP, token
        if len(tokens) >= max_model_len:
            break
    return new, FinishReason.LENGTH, None


class FakeEngine:
    """Scheduler, stage and client in one; every step is checked."""

    def __init__(
        self,
        *,
        groups: tuple[KVGroup, ...] = (FULL,),
        num_blocks: tuple[int, ...] = (64,),
        block_size: int = 4,
        max_model_len: int = 256,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int | None = None,
        step_time_ms: float | None = None,
        policy: str = "fcfs",
        caching: bool = True,
        check: bool = True,
        split_layers: int = 0,
        seconds: Callable[[Scheduled], float] = lambda scheduled: 0.01,
    ) -> None:
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            step_time_ms=step_time_ms,
            policy=policy,  # type: ignore[arg-type]
        )
        self.kv = KVCacheManager(
            groups, num_blocks, block_size, fingerprint="m", enable_prefix_caching=caching
        )
        self.budget = StepBudget(self.config, block_size, splits_layers=split_layers > 0)
        self.scheduler = Scheduler(
            self.config, self.kv, self.budget, max_model_len, split_layers=split_layers
        )
        self.split_layers = split_layers
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.seconds = seconds
        self._check = self.scheduler.check if check else lambda: None
        self.now = 1000.0
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[SequenceOutput]] = {}
        self.in_flight: deque[tuple[Scheduled, set[tuple[int, int]]]] = deque()
        self.entered: list[str] = []
        self.max_held = [0] * len(groups)
        self.num_steps = 0
        self._memory: list[dict[int, list[bytes | None]]] = [{} for _ in groups]
        self._tables: dict[int, list[list[int]]] = {}
        self._sampler: dict[int, list[int]] = {}
        self._parts: dict[int, Chunk] = {}
        """Chunks of which some layers were run, as they were last."""
        self.num_parts = 0
        self._next_step = 0
        self._known_prefixes: dict[str, list[bytes]] = {}

    # The client's side

    def add(self, r: Request) -> None:
        self.scheduler.add(r)
        self.requests[r.request_id] = r
        self.outputs[r.request_id] = []

    def abort(self, request_id: str) -> None:
        output = self.scheduler.abort(request_id)
        assert (output is None) == self.ended(request_id)
        if output is not None:
            self._deliver([output])

    def expire(self) -> None:
        self._deliver(self.scheduler.expire(self.now))

    def ended(self, request_id: str) -> bool:
        outputs = self.outputs[request_id]
        return bool(outputs) and outputs[-1].finish_reason is not None

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            assert not self.ended(output.request_id), "an output behind the ending"
            self.outputs[output.request_id].append(output)

    # The engine's side

    def schedule(self) -> Scheduled | None:
        scheduled = self.scheduler.schedule(self.now)
        self._check()
        if scheduled is not None:
            self.in_flight.append((scheduled, self._execute(scheduled)))
            self.num_steps += 1
        return scheduled

    def commit(self) -> None:
        scheduled, _ = self.in_flight[0]
        tokens = {}
        by_slot = {
            c.seq: s for c, s in zip(scheduled.plan.chunks, scheduled.sequences, strict=True)
        }
        for row in scheduled.rows:
            seq = by_slot[row.seq]
            assert row.position == len(seq.tokens)
            tokens[row.seq] = SampledToken(fake_token(seq.tokens))
        scores = {
            rows.seq: [Logprobs([target], [0.0], 1) for target in rows.targets]
            for rows in scheduled.prompt_rows
        }
        outputs = self.scheduler.commit(scheduled, tokens, scores, self.seconds(scheduled))
        self.in_flight.popleft()
        self._deliver(outputs)
        self._check()

    def step(self) -> Scheduled | None:
        scheduled = self.schedule()
        if scheduled is not None:
            self.commit()
        return scheduled

    def run(self, depth: int = 1, most: int = 5000) -> None:
        """Run to the end of all requests with ``depth`` plans in flight."""
        for _ in range(most):
            while len(self.in_flight) < depth and self.schedule() is not None:
                pass
            if not self.in_flight:
                assert not self.scheduler.has_unfinished(), "stuck"
                return
            self.commit()
        raise AssertionError("no end")

    def check_results(self) -> None:
        """Every request ended once, as if it had run alone; nothing is held any more."""
        assert not self.scheduler.has_unfinished()
        assert not self.in_flight
        self.scheduler.check()
        assert self.kv.usage == 0
        for pool in self.kv.pools:
            assert pool.num_available == pool.num_blocks
        for request_id, r in self.requests.items():
            outputs = self.outputs[request_id]
            assert [o.finish_reason is not None for o in outputs] == [False] * (
                len(outputs) - 1
            ) + [True]
            tokens, reason, stop = expected(r, self.max_model_len)
            mine = self.tokens(request_id)
            last = outputs[-1]
            if last.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert mine == tokens[: len(mine)]
                continue
            assert (mine, last.finish_reason, last.stop_reason) == (tokens, reason, stop)
            if r.params.prompt_logprobs is not None and not r.output_token_ids:
                scores = outputs[0].prompt_logprobs
                assert scores is not None
                assert scores[0] is None
                assert [s.token_ids[0] for s in scores[1:] if s] == r.prompt_token_ids[1:]

    def _execute(self, scheduled: Scheduled) -> set[tuple[int, int]]:
        """Run the plan on the fake memory. Returns the blocks it uses."""
        plan = scheduled.plan
        assert plan.step == self._next_step
        self._next_step += 1
        assert 0 < plan.num_tokens <= self.budget.max_tokens
        assert len(plan.chunks) <= self.config.max_num_seqs
        assert len({chunk.seq for chunk in plan.chunks}) == len(plan.chunks)
        used_before = {block for _, blocks in self.in_flight for block in blocks}
        for slot in plan.freed:
            del self._tables[slot]
            del self._sampler[slot]
            self._parts.pop(slot, None)
        for seq in scheduled.entered:
            assert seq.slot not in self._tables
            assert seq.slot not in plan.freed
            self._tables[seq.slot] = [[] for _ in self.kv.groups]
            state = seq.sampling_state()
            self._sampler[seq.slot] = [*state.prompt_token_ids, *state.output_token_ids]
            self.entered.append(seq.request.request_id)
        rows = 0
        used: set[tuple[int, int]] = set()
        for chunk, seq in zip(plan.chunks, scheduled.sequences, strict=True):
            assert chunk.seq == seq.slot
            assert chunk.token_ids == seq.tokens[chunk.start : chunk.end]
            assert 0 <= chunk.num_logits <= len(chunk.token_ids)
            done = self._check_layers(chunk, chunk is plan.chunks[-1])
            tables = self._tables[chunk.seq]
            for table, new in zip(tables, chunk.new_blocks, strict=True):
                table.extend(new)
            prefixes = self._prefixes(seq.request.request_id, seq.tokens)[: chunk.end]
            begun = chunk.layers is not None and chunk.layers[0] > 0
            for group, table in enumerate(() if begun else tables):
                self._write(group, table, chunk.start, prefixes, used_before)
            sampled = [row for row in scheduled.rows if row.seq == chunk.seq]
            if done and chunk.end == len(seq.tokens) and seq.num_output < seq.request.max_tokens:
                assert [row.row for row in sampled] == [rows + chunk.num_logits - 1]
            else:
                assert not sampled
            rows += chunk.num_logits
        # Reads come after all writes of the step, as in a backend's layer.
        for chunk, seq in zip(plan.chunks, scheduled.sequences, strict=True):
            prefixes = self._prefixes(seq.request.request_id, seq.tokens)[: chunk.end]
            for group, table in enumerate(self._tables[chunk.seq]):
                used |= self._read(group, table, chunk.start, prefixes)
                self._check_held(group, seq.tables[group], seq.num_computed, chunk.end)
        for rows_of in scheduled.prompt_rows:
            assert rows_of.first_row + len(rows_of.targets) <= rows
        return used

    def _check_layers(self, chunk: Chunk, is_last: bool) -> bool:
        """Whether the chunk's last layer is run, all layers before having been."""
        before = self._parts.pop(chunk.seq, None)
        if chunk.layers is None:
            assert before is None, "another chunk before the last layer"
            return True
        first, last = chunk.layers
        assert is_last
        assert 0 <= first < last <= self.split_layers
        self.num_parts += 1
        if before is None:
            assert first == 0
        else:
            assert before.layers is not None
            assert (before.start, before.token_ids) == (chunk.start, chunk.token_ids)
            assert before.layers[1] == first
            assert not any(chunk.new_blocks)
        if last == self.split_layers:
            return True
        assert not chunk.num_logits
        self._parts[chunk.seq] = chunk
        return False

    def _write(
        self,
        group: int,
        table: list[int],
        start: int,
        prefixes: list[bytes],
        used_before: set[tuple[int, int]],
    ) -> None:
        size, memory = self.block_size, self._memory[group]
        for position in range(start, len(prefixes)):
            block = table[position // size]
            assert 0 <= block < self.kv.pools[group].num_blocks
            assert self.kv.pools[group].references(block) == 1, "written while shared"
            if position % size == 0:
                assert (group, block) not in used_before, "taken from a plan in flight"
                memory[block] = [None] * size
            memory[block][position % size] = prefixes[position]

    def _read(
        self, group: int, table: list[int], start: int, prefixes: list[bytes]
    ) -> set[tuple[int, int]]:
        size, memory = self.block_size, self._memory[group]
        reach = self.kv.groups[group].window
        first = 0 if reach is None else max(0, start - reach + 1)
        used = set()
        for position in range(first, len(prefixes)):
            block = table[position // size]
            assert memory[block][position % size] == prefixes[position], "reads a foreign prefix"
            used.add((group, block))
        return used

    def _check_held(self, group: int, table: list[int], computed: int, end: int) -> None:
        held = sum(block >= 0 for block in table)
        self.max_held[group] = max(self.max_held[group], held)
        reach = self.kv.groups[group].window
        if reach is not None:
            first = max(0, computed - reach + 1) // self.block_size
            assert held == -(-end // self.block_size) - first, "holds more than the window needs"

    def _prefixes(self, request_id: str, tokens: list[int]) -> list[bytes]:
        """For each position, what stands for the tokens up to there."""
        known = self._known_prefixes.setdefault(request_id, [])
        parent = known[-1] if known else self.requests[request_id].cache_salt.encode()
        for token in tokens[len(known) :]:
            parent = hashlib.blake2b(parent + bytes([token]), digest_size=8).digest()
            known.append(parent)
        return known
