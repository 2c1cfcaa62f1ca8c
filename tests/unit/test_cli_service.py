"""The running endpoint: signals, draining, an engine that dies. The engine is a fake in a thread,
behind the real socket, client, app and HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from pippin import options
from pippin.cli import chat, demo, service
from pippin.engine.launcher import died
from pippin.engine.process import Leader
from pippin.errors import EngineError, PippinError, PortInUse
from pippin.transport.channel import LeaderChannel
from pippin.types.message import Failed, Ready
from pippin.types.request import FinishReason, Request, SequenceOutput
from pippin.types.step import SchedulerStats

sys.path.append(str(Path(__file__).parents[1] / "server"))
from server_fakes import IM_END, FakeEngine, ids, make_tokenizer

ANSWER = "It is Paris, of course."


class FakeCore:
    """Recites, a token a step; with ``hold`` set, every sequence waits after its third token."""

    def __init__(self) -> None:
        self.ready: Ready = FakeEngine().ready
        self.hold = False
        self.running: dict[str, list[int]] = {}
        self.died = False
        self.failure = None
        self.wake = None
        self.waits = False

    @property
    def has_work(self) -> bool:
        return self.has_unfinished()

    def idle(self) -> None:
        pass

    def busy(self) -> tuple[float, ...]:
        return ()

    def add(self, request: Request) -> None:
        self.running[request.request_id] = [*ids(ANSWER), IM_END][: request.max_tokens]

    def abort(self, request_id: str) -> SequenceOutput | None:
        if self.running.pop(request_id, None) is None:
            return None
        return SequenceOutput(request_id=request_id, finish_reason=FinishReason.ABORT)

    def has_unfinished(self) -> bool:
        return bool(self.running)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(len(self.running), 0, 0.0, 0, 0, 0, 0, 0.0)

    def step(self, timeout_s: float | None = None) -> list[SequenceOutput]:
        outputs: list[SequenceOutput] = []
        for name, left in list(self.running.items()):
            if self.died or (self.hold and len(left) <= len(ANSWER) - 2):
                continue
            token = left.pop(0)
            last = FinishReason.STOP if token == IM_END else FinishReason.LENGTH
            reason = None if left else last
            outputs.append(SequenceOutput(request_id=name, token_ids=[token], finish_reason=reason))
            if reason:
                del self.running[name]
        return outputs


class FakeProcess:
    """Stands for ``EngineProcess``; ``die`` ends it as a crash would."""

    def __init__(self, directory: Path) -> None:
        self.address = f"ipc://{directory}/engine"
        self.keys = None
        self.core = FakeCore()
        self.stopped_with: list[float] = []
        self._ended = threading.Event()
        self._status = 0
        self._leader: Leader | None = None
        self._thread: threading.Thread | None = None

    def start(self, waiting: Callable[[float], None]) -> Ready:
        started = threading.Event()

        def lead() -> None:
            channel = LeaderChannel(self.address)
            self._leader = Leader(channel, self.core)
            started.set()
            self._leader.run()
            channel.close()

        self._thread = threading.Thread(target=lead)
        self._thread.start()
        started.wait()
        waiting(1.0)
        return self.core.ready

    def why_ended(self) -> PippinError:
        self._ended.wait()
        return died(self._status)

    def die(self, status: int) -> None:
        self.core.died = True
        self._status = status
        self._ended.set()

    def stop(self, timeout_s: float = 10.0) -> None:
        self.stopped_with.append(timeout_s)
        if self._leader is not None and self._thread is not None:
            self.core.running.clear()
            self._leader.stop()
            self._thread.join()
        self._ended.set()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProcess:
    fake = FakeProcess(tmp_path)
    monkeypatch.setattr(service, "EngineProcess", lambda config: fake)
    monkeypatch.setattr(service.files, "resolve", lambda model, **how: model)
    monkeypatch.setattr(service, "open_checkpoint", lambda files: None)
    monkeypatch.setattr(service, "load_tokenizer", lambda files, name, **more: make_tokenizer())
    return fake


@pytest.fixture
def made(engine: FakeProcess) -> Iterator[service.Service]:
    config = options.make_config({"port": "0", "log_level": "error"})
    with service.Service(config) as made:
        made.load()
        yield made


def run(made: service.Service, on_up: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Serve until ``on_up`` has ended the service."""

    async def with_client() -> None:
        async with httpx.AsyncClient(base_url=made.root, trust_env=False, timeout=30) as client:
            await on_up(client)

    made.serve(with_client)


def chat_body(**fields: object) -> dict[str, object]:
    return {"model": "demo", "messages": [{"role": "user", "content": "?"}], **fields}


async def streamed(client: httpx.AsyncClient, on_first: Callable[[], Awaitable[None]]) -> str:
    """Lines of a streamed chat; ``on_first`` runs when the first text is there."""
    text, told = "", False
    body = chat_body(stream=True)
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            text += line
            if "content" in line and not told:
                told = True
                await on_first()
    return text


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


def test_it_serves_and_stops(made: service.Service, engine: FakeProcess):
    answers = []

    async def ask(client: httpx.AsyncClient) -> None:
        answers.append((await client.get("/health")).status_code)
        response = await client.post("/v1/chat/completions", json=chat_body())
        answers.append(response.json()["choices"][0]["message"]["content"])
        made.stop()

    run(made, ask)
    assert answers == [200, ANSWER]
    assert engine.stopped_with == [10.0]


@pytest.mark.skipif(sys.platform != "linux", reason="others refuse the second bind itself")
def test_another_server_may_be_faster(made: service.Service):
    with service.bind("127.0.0.1", made.port) as other:
        other.listen()
        with pytest.raises(PortInUse, match=str(made.port)):
            made.serve()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(
    made: service.Service, engine: FakeProcess, number: int
):
    engine.core.hold = True
    texts = []

    async def interrupt() -> None:
        os.kill(os.getpid(), number)
        await until(lambda: made._signals == 1)
        engine.core.hold = False

    async def ask(client: httpx.AsyncClient) -> None:
        texts.append(await streamed(client, interrupt))

    run(made, ask)
    assert texts[0].endswith("data: [DONE]")
    assert '"finish_reason":"stop"' in texts[0]
    assert engine.stopped_with == [10.0]


def test_a_second_signal_stops_at_once(made: service.Service, engine: FakeProcess):
    engine.core.hold = True  # the answer would never end

    async def interrupt_twice() -> None:
        for count in (1, 2):
            os.kill(os.getpid(), signal.SIGINT)
            await until(lambda count=count: made._signals == count)

    async def ask(client: httpx.AsyncClient) -> None:
        with contextlib.suppress(httpx.HTTPError):
            await streamed(client, interrupt_twice)

    run(made, ask)
    assert engine.stopped_with == [1.0]


def test_an_engine_that_dies_ends_the_server_with_its_error(
    made: service.Service, engine: FakeProcess
):
    engine.core.hold = True
    answers = []

    async def die() -> None:
        engine.die(-9)

    async def ask(client: httpx.AsyncClient) -> None:
        answers.append(await streamed(client, die))

    with pytest.raises(EngineError, match="killed"):
        run(made, ask)
    assert "killed" in answers[0]


def test_what_runs_beside_the_server_may_fail(made: service.Service):
    async def fail(client: httpx.AsyncClient) -> None:
        raise PippinError("no answer")

    with pytest.raises(PippinError, match="no answer"):
        run(made, fail)


def test_an_engine_that_cannot_start(engine: FakeProcess, monkeypatch: pytest.MonkeyPatch, capsys):
    from pippin.cli.main import main
    from pippin.engine.launcher import failure_to_error

    def refuse(waiting: Callable[[float], None]) -> Ready:
        raise failure_to_error(Failed("weights do not fit", "out_of_memory", "smaller model"))

    monkeypatch.setattr(engine, "start", refuse)
    assert main(["serve", "demo", "--port", "0"]) == 1
    said = capsys.readouterr()
    assert said.err.endswith("error: weights do not fit\nhint: smaller model\n")
    assert "Traceback" not in said.err
    assert engine.stopped_with


def test_summary_says_what_runs(made: service.Service):
    text = service.summary(made)
    for fact in ("fake, FakeForCausalLM", "fake on cpu", "float32: a test", "512 tokens",
                 "1,600 tokens", "3.1 requests of full length", f"{made.root}/v1"):  # fmt: skip
        assert fact in text
    assert "--api-key" not in text


def test_summary_warns_of_an_open_endpoint(engine: FakeProcess):
    config = options.make_config({"port": "0", "host": "0.0.0.0"})
    with service.Service(config) as made:
        made.load()
        assert "--api-key" in service.summary(made)
        assert made.root.startswith("http://127.0.0.1:")


# --- demo and chat over the same fake ----------------------------------------------------------


def test_demo_answers_and_leaves(engine: FakeProcess, capsys: pytest.CaptureFixture[str]):
    demo.demo(port=0, leave=True)
    said = capsys.readouterr().out
    assert demo.QUESTION in said
    assert ANSWER in said


def test_demo_goes_on_until_a_signal(
    engine: FakeProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    how_to = demo._how_to_go_on

    def interrupt(*arguments: object) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return how_to(*arguments)

    monkeypatch.setattr(demo, "_how_to_go_on", interrupt)
    demo.demo(port=0, api_key=["secret"])
    said = capsys.readouterr().out
    assert ANSWER in said
    assert "curl http://127.0.0.1:" in said
    assert "Bearer secret" in said


def test_demo_takes_a_free_port_only_if_none_was_asked_for(
    engine: FakeProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with service.bind("127.0.0.1", 0) as holder:
        holder.listen()
        taken = holder.getsockname()[1]
        with pytest.raises(PortInUse):
            demo.demo(port=taken, leave=True)
        config = options.make_config({"port": taken})
        assert demo._on_free_port(config).server.port == 0
        assert f"port {taken} is in use" in capsys.readouterr().out
    assert demo._on_free_port(config) is config


class Piped:
    def __init__(self, text: str) -> None:
        self._text = text

    def isatty(self) -> bool:
        return False

    def read(self) -> str:
        return self._text


def test_chat_with_a_model_of_its_own(
    engine: FakeProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdin", Piped("What is the capital of France?\n"))
    chat.chat("demo")
    assert capsys.readouterr().out == f"{ANSWER}\n"
    assert engine.stopped_with


def test_chat_ends_when_its_engine_dies(
    engine: FakeProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdin", Piped("?"))
    engine.core.hold = True
    add = engine.core.add

    def die(request: Request) -> None:
        add(request)
        engine.die(1)

    monkeypatch.setattr(engine.core, "add", die)
    with pytest.raises(PippinError, match="status 1"):
        chat.chat("demo")


def conversation(made: service.Service, talk: Callable[[str], None]) -> None:
    """Run ``talk`` in a thread against the served fake."""

    async def beside(client: httpx.AsyncClient) -> None:
        await asyncio.to_thread(talk, made.root)
        made.stop()

    run(made, beside)


def test_chat_keeps_the_history(
    made: service.Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    histories = []

    def talk(root: str) -> None:
        with chat._connect(root, None) as client:
            talked = chat.Conversation(client, None, "Be brief.", {"max_tokens": 5})
            assert talked.model == "demo"
            said = ["", "Hello?", "/system Be long.", "/what", "Again?", "/new", "/exit"]
            lines = iter(said)

            def read() -> str:
                line = next(lines)
                if line == "/new":
                    histories.append(list(talked.history))
                return line

            monkeypatch.setattr(chat, "_read_line", read)
            monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
            chat._talk(talked)
            assert talked.history == []
            assert talked.system == "Be long."

    conversation(made, talk)
    answer = {"role": "assistant", "content": ANSWER[:5]}
    assert histories == [
        [
            {"role": "user", "content": "Hello?"},
            answer,
            {"role": "user", "content": "Again?"},
            answer,
        ]
    ]
    assert "/exit leaves" in capsys.readouterr().out


def test_chat_tells_refusals_and_goes_on(
    made: service.Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def talk(root: str) -> None:
        with chat._connect(root, None) as client:
            lines = iter(["x" * 600, "short", None])
            monkeypatch.setattr(chat, "_read_line", lambda: next(lines))
            monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
            chat._talk(chat.Conversation(client, None, None, {"max_tokens": 5}))
            with pytest.raises(PippinError, match="404"):
                list(chat.Conversation(client, "absent", None, {}).answer("?"))

    conversation(made, talk)
    said = capsys.readouterr()
    assert "the endpoint answered 400" in said.err
    assert ANSWER[:5] in said.out


def test_an_answer_left_early_stays_in_the_history(made: service.Service):
    def talk(root: str) -> None:
        with chat._connect(root, None) as client:
            talked = chat.Conversation(client, None, None, {})
            pieces = talked.answer("?")
            first = next(piece for piece in pieces if piece)
            pieces.close()
            assert talked.history[1]["content"].startswith(first)

    conversation(made, talk)
