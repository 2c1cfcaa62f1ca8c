"""A cable that adds latency: frames go in at one TAP device and come out of the other later.

    python delay.py SECONDS TAP TAP

Stands in for netem, which not every kernel has. The devices must exist; they may be moved to other
network namespaces while this runs. Prints ``ready`` and runs until killed. Bandwidth is limited by
nothing but this loop (with the large frames of ``hosts_kit`` a gigabyte a second or so).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME_BYTES = 2**16 + 64


def open_tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def main() -> None:
    delay = float(sys.argv[1])
    ends = [open_tap(name) for name in sys.argv[2:4]]
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    queues: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}  # by way out
    print("ready", flush=True)
    while True:
        first = min((queue[0][0] for queue in queues.values() if queue), default=None)
        wait = None if first is None else max(0.0, first - time.monotonic())
        readable, _, _ = select.select(ends, (), (), wait)
        for end in readable:
            receive(end, queues[other[end]], delay)
        now = time.monotonic()
        for end, queue in queues.items():
            while queue and queue[0][0] <= now:
                send(end, queue.popleft()[1])


def receive(end: int, queue: deque[tuple[float, bytes]], delay: float) -> None:
    for _ in range(32):
        try:
            queue.append((time.monotonic() + delay, os.read(end, FRAME_BYTES)))
        except BlockingIOError:
            return


def send(end: int, frame: bytes) -> None:
    # A device that is down loses frames, as a cable that is out would.
    with contextlib.suppress(OSError):
        os.write(end, frame)


if __name__ == "__main__":
    main()
