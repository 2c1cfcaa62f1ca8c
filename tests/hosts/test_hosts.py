"""The hosts themselves: what the other tests here build on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hosts_kit import Net, _namespaces, why_no_latency

pytestmark = pytest.mark.slow

SERVER = """
import contextlib, socket, threading

def serve(client):
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with client, contextlib.suppress(OSError):
        while data := client.recv(2**20):
            if data[:1] == b"e":
                client.sendall(data)
        client.sendall(b"k")

server = socket.create_server(("", 5000))
print("up", flush=True)
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""

CLIENT = """
import socket, sys, time
client = socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[3]))
client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
if sys.argv[2] == "echo":
    times = []
    for _ in range(10):
        started = time.monotonic()
        client.sendall(b"e")
        client.recv(1)
        times.append(time.monotonic() - started)
    print(min(times))
else:
    block, sent, started = bytes(2**18), 0, time.monotonic()
    while time.monotonic() - started < 1:
        client.sendall(block)
        sent += len(block)
    client.shutdown(socket.SHUT_WR)
    client.recv(1)  # all has arrived
    print(sent / (time.monotonic() - started))
"""


def _sleeper(host):
    """A process that is on the host by now, which one just started may not be."""
    command = host.command("sh", "-c", "echo inside; exec sleep 100")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "inside\n"
    return process


@pytest.fixture
def server(pair):
    """The address of a server on the second host."""
    with pair[1].start(sys.executable, "-c", SERVER) as process:
        assert process.stdout.readline() == "up\n"
        yield pair[1].address


def test_hosts_reach_each_other_by_their_addresses(pair, server):
    assert float(pair[0].python(CLIENT, server, "echo", "5")) < 0.1


def test_a_host_has_its_address_and_nothing_else(pair):
    script = "import socket; print([name for _, name in socket.if_nameindex()])"
    for host in pair:
        assert host.python(script).strip() == "['lo', 'eth0']"
        assert f"inet {host.address}/24" in host.run("ip", "addr").stdout


def test_this_machine_is_left_alone(pair):
    names = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert "bridge" not in names
    assert "port0" not in names


def test_processes_keep_to_their_cpus():
    script = "import os; print(sorted(os.sched_getaffinity(0)))"
    last = max(os.sched_getaffinity(0))
    with Net(2, cpus=[None, str(last)]) as net:
        everywhere, pinned = (host.python(script) for host in net.hosts)
    assert everywhere.strip() == str(sorted(os.sched_getaffinity(0)))
    assert pinned.strip() == f"[{last}]"


def test_bandwidth_is_limited_and_set_free_again(pair, server):
    for host in pair:  # either end's limit is one of the connection
        host.limit(80)
        limited = float(pair[0].python(CLIENT, server, "send", "20"))
        assert 5e6 < limited < 11e6
        host.limit(None)
    assert float(pair[0].python(CLIENT, server, "send", "20")) > 5 * limited


def test_cut_cable_loses_everything_until_it_is_restored(pair, server):
    pair[1].cut()
    with pytest.raises(RuntimeError, match=r"timed out|No route to host"):
        pair[0].python(CLIENT, server, "echo", "0.5")
    pair[1].restore()
    assert float(pair[0].python(CLIENT, server, "echo", "5")) < 0.5


def test_frozen_host_goes_on_when_it_is_thawed(pair, server):
    pair[1].signal(signal.SIGSTOP)
    with pytest.raises(RuntimeError, match="timed out"):
        pair[0].python(CLIENT, server, "echo", "0.5")
    pair[1].signal(signal.SIGCONT)
    assert float(pair[0].python(CLIENT, server, "echo", "5")) < 0.5


def test_killed_host_has_no_processes_left(pair):
    script = "import os, time; os.fork(); os.setsid(); print('up', flush=True); time.sleep(100)"
    with pair[1].start("sh", "-c", f'{sys.executable} -c "{script}" & wait') as process:
        for _ in range(2):
            assert process.stdout.readline() == "up\n"
        assert len(pair[1].pids()) == 3
        pair[1].kill()
        assert pair[1].pids() == []
        assert process.wait(5) == -signal.SIGKILL


@pytest.mark.skipif(why_no_latency() is not None, reason=str(why_no_latency()))
@pytest.mark.parametrize("latency_ms", [5, 20])
def test_latency_is_added_each_way_and_bandwidth_stays(latency_ms):
    with Net(2, latency_ms=latency_ms) as net:
        a, b = net.hosts
        with b.start(sys.executable, "-c", SERVER) as process:
            assert process.stdout.readline() == "up\n"
            round_trip = float(a.python(CLIENT, b.address, "echo", "5"))
            assert 2 * latency_ms / 1000 <= round_trip < 2 * latency_ms / 1000 + 0.05
            assert float(a.python(CLIENT, b.address, "send", "20")) > 20e6


def test_two_nets_at_once_do_not_meet(pair, server):
    with Net(1) as net, pytest.raises(RuntimeError, match=r"timed out|No route|refused"):
        net.hosts[0].python(CLIENT, server, "echo", "0.5")


def test_all_is_removed_even_when_a_test_fails():
    with pytest.raises(ZeroDivisionError), Net(2) as net:  # noqa: PT012
        directory = net.hosts[0].directory.parent
        process = _sleeper(net.hosts[0])
        1 / 0  # noqa: B018
    assert process.wait(30) == -signal.SIGKILL
    assert not directory.exists()
    assert not [name for name in _namespaces() if name.startswith(f"{net._name}-")]


def test_what_a_killed_run_left_is_swept():
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from hosts_kit import Net\n"
        "net = Net(1).__enter__()\n"
        "import subprocess\n"
        "run = net.hosts[0].command('sh', '-c', 'echo inside; exec sleep 100')\n"
        "inside = subprocess.Popen(run, stdout=subprocess.PIPE, text=True)\n"
        "inside.stdout.readline()\n"
        "print(net._name, flush=True); time.sleep(100)\n"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        name = other.stdout.readline().strip()
        assert any(one.startswith(f"{name}-") for one in _namespaces())
        with Net(1):  # a run that lives is left alone
            assert any(one.startswith(f"{name}-") for one in _namespaces())
        other.kill()
    with Net(1):
        assert not any(one.startswith(f"{name}-") for one in _namespaces())


def test_a_command_that_fails_says_what_it_said(pair):
    with pytest.raises(RuntimeError, match="no such thing"):
        pair[0].run(sys.executable, "-c", "raise SystemExit('no such thing')")
    with pytest.raises(subprocess.TimeoutExpired):
        pair[0].run("sleep", "100", timeout_s=0.2)
    assert pair[0].pids() == []
