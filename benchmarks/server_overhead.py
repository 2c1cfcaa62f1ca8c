"""CPU time of the API process per streamed token, all included: ZeroMQ, msgpack, text, JSON, HTTP.

Three processes: a stand-in for the engine that sends one ``StepOutputs`` a step for all streams at
a fixed rate (the real channel and messages), the real server (measured), and a client that reads.

    python benchmarks/server_overhead.py MODEL.gguf [--streams 32] [--rate 15.6] [--tokens 300]

``--rate`` is steps a second: 32 streams at 15.6 steps are 500 tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import uvicorn

from pippin import config
from pippin.errors import PippinError
from pippin.models.files import resolve
from pippin.server.app import build_app
from pippin.server.client import EngineClient
from pippin.server.tokenizer import load_tokenizer
from pippin.transport.channel import LeaderChannel
from pippin.types.message import Add, Hello, Ready, StepOutputs
from pippin.types.request import FinishReason, Request, SequenceOutput
from pippin.types.step import SchedulerStats

TEXT = "The kitchen table was set for two, and nobody came; it rained. " * 40


def lead(address: str, rate: float, vocab_size: int, text: list[int]) -> None:
    """The engine's stand-in: one token a stream a step."""
    channel = LeaderChannel(address)
    ready = Ready(
        pid=os.getpid(), model_name="stand-in", architecture="none", num_layers=1,
        vocab_size=vocab_size,
        max_model_len=8192, max_model_len_note=None, num_blocks=(1,), block_size=16,
        kv_tokens=16, kv_bytes=1, weights_bytes=1, dtype="float32", quantization=None,
        backend="none", backend_reason="a benchmark", device="cpu", load_seconds=0.0,
    )  # fmt: skip
    running: dict[str, tuple[Request, int]] = {}
    owner = b""
    step = 0
    due = time.monotonic()
    while True:
        due = max(due + 1 / rate, time.monotonic() - 1 / rate)
        channel.wait(max(0.0, due - time.monotonic()))
        for client, message in channel.receive():
            owner = client
            if isinstance(message, Hello):
                channel.send(client, ready)
            elif isinstance(message, Add):
                running |= {request.request_id: (request, 0) for request in message.requests}
        time.sleep(max(0.0, due - time.monotonic()))
        outputs = []
        for name, (request, done) in list(running.items()):
            last = done + 1 >= request.max_tokens
            outputs.append(
                SequenceOutput(
                    request_id=name,
                    token_ids=[text[done % len(text)]],
                    finish_reason=FinishReason.LENGTH if last else None,
                )
            )
            running[name] = (request, done + 1)
            if last:
                del running[name]
        if outputs:
            step += 1
            stats = SchedulerStats(len(running), 0, 0.5, 0, 0, 0, len(outputs), 0.05)
            channel.send(owner, StepOutputs(outputs, stats))


async def read(port: int, streams: int, tokens: int, path: str) -> int:
    """The client: bare sockets, nothing parsed. Returns the bytes read."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    body = json.dumps(
        (chat if "chat" in path else {"prompt": "hi"})
        | {"max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
    ).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        size = 0
        tail = b""
        while b"[DONE]" not in tail:
            data = await reader.read(65536)
            size += len(data)
            tail = (tail + data)[-64:]
        writer.close()
        return size

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


def client(port: int, streams: int, tokens: int, path: str, done: Any) -> None:
    done.put(asyncio.run(read(port, streams, tokens, path)))


async def measure(args: argparse.Namespace) -> dict[str, float]:
    files = resolve(args.model, home=Path(tempfile.gettempdir()), offline=True)
    tokenizer = load_tokenizer(files)
    spawn = multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp()
    address = f"ipc://{folder}/engine"
    text = tokenizer.encode(TEXT)
    leader = spawn.Process(
        target=lead, args=(address, args.rate, tokenizer.vocab_size, text), daemon=True
    )
    leader.start()

    async def never() -> PippinError:
        await asyncio.Event().wait()
        raise AssertionError

    engine = EngineClient(address, never)
    await engine.start()
    app = build_app(config.build({"model": {"model": "demo"}}), engine, tokenizer)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    done = spawn.Queue()
    results = {}
    for name, tokens in (("warm", 20), ("measured", args.tokens)):
        reader = spawn.Process(target=client, args=(port, args.streams, tokens, args.path, done))
        reader.start()
        while not engine.num_unfinished:
            await asyncio.sleep(0.01)
        began, cpu = time.monotonic(), cpu_seconds()
        while reader.is_alive():
            await asyncio.sleep(0.1)
        results[name] = (cpu_seconds() - cpu, time.monotonic() - began)
        reader.join()
    size = done.get()
    size = done.get()
    server.should_exit = True
    await serving
    await engine.close()
    leader.terminate()
    spent, wall = results["measured"]
    total = args.streams * args.tokens
    return {
        "streams": args.streams,
        "tokens": total,
        "tokens_per_s": round(total / wall, 1),
        "cpu_us_per_token": round(spent / total * 1e6, 1),
        "core_share_per_500_tokens_per_s": round(spent / total * 500, 4),
        "bytes_per_token": round(size / total, 1),
    }


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rate", type=float, default=500 / 32)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--path", default="/v1/chat/completions")
    args = parser.parse_args()
    runner = asyncio.run
    try:
        import uvloop
    except ImportError:
        pass
    else:
        runner = uvloop.run
    print(json.dumps(runner(measure(args))))


if __name__ == "__main__":
    main()
