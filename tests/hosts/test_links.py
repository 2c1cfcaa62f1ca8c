"""Stage links between hosts: cut cables, frozen machines, latency."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from pathlib import Path

import pytest
from hosts_kit import Net, why_no_latency

pytestmark = pytest.mark.slow

KIT = Path(__file__).parents[1] / "transport"

BOUND = f"""
import sys, time
sys.path.insert(0, {str(KIT)!r})
from link_kit import *
from pippin.errors import PippinError
link = Link.bind(f"tcp://{{sys.argv[1]}}:0", derive_keys(SECRET))
print(link.address, flush=True)
link.handshake(announcement(0), lambda theirs: None, 20)
print(link.stats.round_trip_s, flush=True)
try:
    while True:
        if sys.argv[2] == "listen":
            link.receive()
        elif sys.argv[2] == "talk":
            link.send(hidden(0, tokens=4096)); link.receive()
        else:
            # Messages of 64 KiB, whose echoes come back meanwhile.
            message, count = hidden(0, tokens=256), int(sys.argv[3])
            started = time.monotonic()
            for step in range(count):
                link.send(Hidden(step, message.dtype, message.shape, message.data))
            for step in range(count):
                assert link.receive().step == step
            print(time.monotonic() - started, flush=True)
            break
except PippinError as error:
    print(type(error).__name__, error, flush=True)
"""


@contextlib.contextmanager
def linked(net_hosts, *what: str):
    """A link from the second host to the first; the first's process and its round trip in s."""
    a, b = net_hosts
    with a.start(sys.executable, "-c", BOUND, a.address, *what) as bound:
        address = bound.stdout.readline().strip()
        spec = json.dumps(
            {"address": address, "secret": "a cluster secret for tests", "read": True}
        )
        with b.start(sys.executable, str(KIT / "link_kit.py"), spec) as connected:
            assert connected.stdout.readline() == "ready\n"
            yield bound, float(bound.stdout.readline())


@pytest.mark.parametrize("what", ["listen", "talk"])
def test_cut_cable_is_a_lost_peer_within_five_seconds(pair, what):
    with linked(pair, what) as (bound, _):
        pair[1].cut()
        started = time.monotonic()
        try:
            line = bound.stdout.readline()
        finally:
            pair[1].restore()
        assert time.monotonic() - started < 5.5
        assert line.startswith("PeerLost")
        assert "has been silent for" in line


def test_frozen_machine_is_a_lost_peer_within_five_seconds(pair):
    with linked(pair, "listen") as (bound, _):
        pair[1].signal(signal.SIGSTOP)
        started = time.monotonic()
        line = bound.stdout.readline()
        assert time.monotonic() - started < 5.5
        assert line.startswith("PeerLost")


def test_power_cut_of_the_processes_is_noticed_at_once(pair):
    with linked(pair, "listen") as (bound, _):
        started = time.monotonic()
        pair[1].kill()
        assert bound.stdout.readline().startswith("PeerLost")
        assert time.monotonic() - started < 1.5


def test_cable_that_is_out_for_a_second_is_survived(pair):
    with linked(pair, "bulk", "500") as (bound, _):
        pair[1].cut()
        time.sleep(1)  # what is tested is a second without a cable
        pair[1].restore()
        assert float(bound.stdout.readline()) > 0


@pytest.mark.skipif(why_no_latency() is not None, reason=str(why_no_latency()))
def test_latency_is_measured_and_bulk_transfer_overlaps_it():
    with Net(2, latency_ms=20) as net, linked(net.hosts, "bulk", "200") as (bound, round_trip):
        assert round_trip >= 0.04
        # One message a round trip would take 200 of them.
        assert float(bound.stdout.readline()) < 0.5 * 200 * round_trip
