"""Two ends of a link for the tests: in this process, or one in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from pippin.transport.frames import Control, Hidden, Plan
from pippin.transport.keys import CurveKeys, derive_keys
from pippin.transport.link import Link
from pippin.types.stage import Announcement, mismatch
from pippin.types.step import Chunk, StepPlan

SECRET = "a cluster secret for tests"
HIDDEN_SIZE = 64


def announcement(rank: int, **changes: Any) -> Announcement:
    base = Announcement(
        version="1.0",
        rank=rank,
        layers=(2 * rank, 2 * rank + 2),
        num_layers=4,
        hidden_size=HIDDEN_SIZE,
        vocab_size=100,
        dtype="float32",
        fingerprint="abc",
        backend="torch",
        device="cpu",
    )
    return msgspec.structs.replace(base, **changes)


def plan(step: int) -> Plan:
    return Plan(StepPlan(step, (Chunk(0, step, [step], ((step,),), 1),)))


def hidden(step: int, tokens: int = 1, fill: int = 7) -> Hidden:
    data = bytes((fill + i) % 256 for i in range(HIDDEN_SIZE * 4)) * tokens
    return Hidden(step, "float32", (tokens, HIDDEN_SIZE), memoryview(data), 0.25)


def meet(
    a: Link, b: Link, first: Announcement | None = None, second: Announcement | None = None
) -> list[Announcement | Exception]:
    """Shake hands between two links of this process; what each end returned or raised."""
    mine = (first or announcement(0), second or announcement(1))
    results: list[Any] = [None, None]

    def one(index: int, link: Link) -> None:
        own = mine[index]

        def check(theirs: Announcement) -> str | None:
            return mismatch(*sorted((own, theirs), key=lambda one: one.rank), follows=True)

        try:
            results[index] = link.handshake(own, check, 10)
        except Exception as error:  # noqa: BLE001 (told to the test)
            results[index] = error

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate((a, b))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@contextmanager
def pair(keys: CurveKeys | None = None, **options: Any) -> Iterator[tuple[Link, Link]]:
    """Two ends after their handshake, over TCP on loopback."""
    a = Link.bind("tcp://127.0.0.1:0", keys, **options)
    b = Link.connect(a.address, keys, **options)
    try:
        for result in meet(a, b):
            if isinstance(result, Exception):
                raise result
        yield a, b
    finally:
        a.close(0)
        b.close(0)


@contextmanager
def peer(address: str, secret: str | None = SECRET, **options: Any) -> Iterator[subprocess.Popen]:
    """A process that connects, shakes hands as rank 1 and sends each message back."""
    spec = {"address": address, "secret": secret, "read": True} | options
    process = subprocess.Popen(
        [sys.executable, __file__, json.dumps(spec)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def main() -> None:
    spec = json.loads(sys.argv[1])
    keys = derive_keys(spec["secret"]) if spec["secret"] else None
    link = Link.connect(spec["address"], keys, trusted=True)
    link.handshake(announcement(1, pid=0), lambda theirs: None, 10)
    print("ready", flush=True)
    if not spec["read"]:
        sys.stdin.read()
    while True:
        message = link.receive()
        link.send(Control(bytes(message.body)) if isinstance(message, Control) else message)


if __name__ == "__main__":
    main()
