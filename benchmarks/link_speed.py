"""Bandwidth and round trip of a stage link between two processes on this machine.

    python benchmarks/link_speed.py [--seconds 2]

For plain TCP, encrypted TCP and a Unix socket: the time from ``send`` of a small message to
``receive`` of its echo (one plan out, one row of hidden states back), and the bytes a second of
hidden states of several sizes that flow one way. Bandwidth counts what the other process has
received; both processes' CPU time is shown beside it, since encryption costs both ends.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from pippin.transport.frames import Control, Hidden, Plan
from pippin.transport.keys import derive_keys
from pippin.transport.link import Link
from pippin.types.stage import Announcement
from pippin.types.step import Chunk, StepPlan

SECRET = "a secret for benchmarks only"
WIDTH = 2048  # bfloat16: 4 KiB a token
SIZES = (64 * 2**10, 2**20, 2 * 2**20, 8 * 2**20, 32 * 2**20)


def announcement(rank: int) -> Announcement:
    return Announcement(
        version="0",
        rank=rank,
        layers=(rank, rank + 1),
        num_layers=2,
        hidden_size=WIDTH,
        vocab_size=1,
        dtype="bfloat16",
        fingerprint="",
        backend="none",
        device="none",
    )


def peer(address: str, encrypted: bool) -> None:
    """Answers plans with one row; after a Control, counts what comes and tells at the next."""
    link = Link.connect(address, derive_keys(SECRET) if encrypted else None)
    link.handshake(announcement(1), lambda theirs: None)
    row = bytes(2 * WIDTH)
    while True:
        match link.receive():
            case Plan(plan):
                link.send(Hidden(plan.step, "bfloat16", (1, WIDTH), memoryview(row)))
            case Control(body) if body == b"end":
                return
            case Control():
                link.send(Control(str(time.process_time()).encode()))


def measure(address: str, encrypted: bool, seconds: float) -> dict[str, object]:
    link = Link.bind(address, derive_keys(SECRET) if encrypted else None)
    command = [sys.executable, __file__, "--peer", link.address, str(int(encrypted))]
    process = subprocess.Popen(command)
    try:
        link.handshake(announcement(0), lambda theirs: None)
        result: dict[str, object] = {"round_trip_us": _round_trips(link)}
        result["heartbeat_us"] = round(1e6 * (link.stats.round_trip_s or 0))
        for size in SIZES:
            result[f"{size // 2**10} KiB"] = _bandwidth(link, size, seconds)
        link.send(Control(b"end"))
        process.wait(10)
        return result
    finally:
        process.kill()
        process.wait()
        link.close(0)


def _round_trips(link: Link, count: int = 2000) -> dict[str, int]:
    times = []
    for step in range(count):
        started = time.perf_counter()
        link.send(Plan(StepPlan(step, (Chunk(0, step, [1], ((1,),), 1),))))
        link.receive(10)
        times.append(time.perf_counter() - started)
    cuts = statistics.quantiles(times[100:], n=100)
    return {"median": round(1e6 * cuts[49]), "p99": round(1e6 * cuts[98])}


def _bandwidth(link: Link, size: int, seconds: float) -> dict[str, float]:
    data = memoryview(os.urandom(size))
    theirs = _their_cpu(link)
    mine, started, count = time.process_time(), time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        link.send(Hidden(count, "bfloat16", (size // (2 * WIDTH), WIDTH), data))
        count += 1
    received = _their_cpu(link)  # the answer comes after everything before it
    taken = time.perf_counter() - started
    total = count * size / 1e9
    return {
        "GB/s": round(total / taken, 2),
        "sender_cpu_s_per_GB": round((time.process_time() - mine) / total, 2),
        "receiver_cpu_s_per_GB": round((received - theirs) / total, 2),
    }


def _their_cpu(link: Link) -> float:
    link.send(Control(b"cpu"))
    answer = link.receive(60)
    assert isinstance(answer, Control)
    return float(answer.body)


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        peer(sys.argv[2], sys.argv[3] == "1")
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each bandwidth measurement")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as directory:
        for name, address, encrypted in (
            ("tcp, plain", "tcp://127.0.0.1:0", False),
            ("tcp, encrypted", "tcp://127.0.0.1:0", True),
            ("unix socket", f"ipc://{directory}/link", False),
        ):
            print(json.dumps({"link": name} | measure(address, encrypted, seconds)), flush=True)


if __name__ == "__main__":
    main()
