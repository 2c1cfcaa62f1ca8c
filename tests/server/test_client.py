"""The engine's client over a real socket, with a leader that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from server_fakes import FakeEngine

from pippin.errors import EngineError, EngineUnavailable, PippinError
from pippin.server.client import EngineClient
from pippin.transport.channel import LeaderChannel
from pippin.types.message import Abort, Add, Failed, FromEngine, Hello, StepOutputs, ToEngine
from pippin.types.request import FinishReason, Request, SamplingParams, SequenceOutput
from pippin.types.step import SchedulerStats

STATS = SchedulerStats(1, 0, 0.5, 0, 0, 0, 1, 0.01)


class Leader:
    """The engine's end of the socket, without an engine."""

    def __init__(self, address: str) -> None:
        self.channel = LeaderChannel(address)
        self.client = b""

    async def next(self) -> ToEngine:
        while True:
            for sender, message in self.channel.receive():
                self.client = sender
                return message
            await asyncio.to_thread(self.channel.wait, 0.2)

    def send(self, message: FromEngine) -> None:
        self.channel.send(self.client, message)

    def step(self, *outputs: SequenceOutput) -> None:
        self.send(StepOutputs(list(outputs), STATS))


@contextlib.asynccontextmanager
async def connected(
    folder: Path, ended: Callable[[], Coroutine[Any, Any, PippinError]] | None = None
) -> AsyncIterator[tuple[EngineClient, Leader]]:
    async def never() -> PippinError:
        await asyncio.Event().wait()
        raise AssertionError

    address = f"ipc://{folder}/engine"
    leader = Leader(address)
    client = EngineClient(address, ended or never)
    starting = asyncio.create_task(client.start())
    assert isinstance(await leader.next(), Hello)
    leader.send(FakeEngine().ready)
    assert (await starting).model_name == "fake"
    try:
        yield client, leader
    finally:
        await client.close()
        leader.channel.close()


def request(name: str) -> Request:
    return Request(
        request_id=name, prompt_token_ids=[1], params=SamplingParams(), seed=1, max_tokens=9
    )


def output(name: str, token: int, reason: FinishReason | None = None) -> SequenceOutput:
    return SequenceOutput(request_id=name, token_ids=[token], finish_reason=reason)


async def collect(client: EngineClient, *names: str) -> list[SequenceOutput]:
    got: list[SequenceOutput] = []
    async for step in client.generate([request(name) for name in names]):
        got += step
    return got


def run(test: Callable[[EngineClient, Leader], Coroutine[Any, Any, None]], folder: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), connected(folder) as (client, leader):
            await test(client, leader)
            assert client.num_unfinished == 0

    asyncio.run(main())


def test_streams_are_kept_apart(tmp_path: Path) -> None:
    async def test(client: EngineClient, leader: Leader) -> None:
        steps: list[StepOutputs] = []
        client.on_step = steps.append
        tasks = [asyncio.create_task(collect(client, *names)) for names in (("a", "b"), ("c",))]
        for _ in tasks:
            assert isinstance(await leader.next(), Add)
        leader.step(output("a", 1), output("c", 3), output("b", 2))
        leader.step(output("c", 33, FinishReason.STOP), output("a", 11, FinishReason.LENGTH))
        leader.step(output("b", 22, FinishReason.STOP))
        both, one = await asyncio.gather(*tasks)
        assert [(o.request_id, o.token_ids) for o in both] == [
            ("a", [1]),
            ("b", [2]),
            ("a", [11]),
            ("b", [22]),
        ]
        assert [o.token_ids for o in one] == [[3], [33]]
        assert client.stats == STATS
        assert len(steps) == 3

    run(test, tmp_path)


def test_leaving_aborts_what_is_unfinished(tmp_path: Path) -> None:
    async def test(client: EngineClient, leader: Leader) -> None:
        task = asyncio.create_task(collect(client, "a", "b"))
        assert isinstance(await leader.next(), Add)
        leader.step(output("a", 1, FinishReason.STOP), output("b", 2))
        while client.num_unfinished > 1:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await leader.next() == Abort(["b"])

    run(test, tmp_path)


def test_one_of_a_stream_is_aborted(tmp_path: Path) -> None:
    async def test(client: EngineClient, leader: Leader) -> None:
        task = asyncio.create_task(collect(client, "a", "b"))
        assert isinstance(await leader.next(), Add)
        await client.abort(["a", "unknown"])
        assert await leader.next() == Abort(["a"])
        leader.step(SequenceOutput(request_id="a", finish_reason=FinishReason.ABORT))
        leader.step(output("b", 2, FinishReason.STOP))
        assert len(await task) == 2
        await client.abort(["a"])

    run(test, tmp_path)


def test_a_failed_engine_ends_everything_once(tmp_path: Path) -> None:
    async def test(client: EngineClient, leader: Leader) -> None:
        task = asyncio.create_task(collect(client, "a", "b"))
        assert isinstance(await leader.next(), Add)
        leader.send(Failed("no memory left", "out_of_memory", None))
        got = await task
        assert {o.request_id for o in got} == {"a", "b"}
        assert {o.finish_reason for o in got} == {FinishReason.ERROR}
        assert "no memory left" in str(got[0].error)
        assert client.failed.is_set()
        with pytest.raises(EngineUnavailable, match="no memory left"):
            await collect(client, "c")

    run(test, tmp_path)


def test_the_end_of_the_process_is_noticed(tmp_path: Path) -> None:
    async def main() -> None:
        death: asyncio.Future[PippinError] = asyncio.get_running_loop().create_future()

        async def ended() -> PippinError:
            return await death

        async with asyncio.timeout(20), connected(tmp_path, ended) as (client, leader):
            task = asyncio.create_task(collect(client, "a"))
            assert isinstance(await leader.next(), Add)
            death.set_result(EngineError("killed by signal 9"))
            (only,) = await task
            assert only.finish_reason is FinishReason.ERROR
            assert "signal 9" in str(client.failure)

    asyncio.run(main())


def test_an_id_is_used_once_at_a_time(tmp_path: Path) -> None:
    async def test(client: EngineClient, leader: Leader) -> None:
        with pytest.raises(ValueError, match="unique"):
            await collect(client, "a", "a")

    run(test, tmp_path)
