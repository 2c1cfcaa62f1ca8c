"""Several machines on this one: network namespaces on a bridge, each with an address and CPUs.

    with Net(2) as net:
        a, b = net.hosts
        b.run("ip", "addr")
        with b.start(sys.executable, "-c", "...") as process: ...
        b.cut(); b.restore(); b.signal(signal.SIGSTOP); b.kill()

The bridge has a namespace too, so nothing outside them is touched, and this process itself cannot
reach the hosts: whatever talks to them runs on one of them. Names carry this process's id; what a
killed test run has left behind is swept when the next one starts. Needs root, ``ip`` and ``tc``:
``why_not`` says what is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

#: Of all interfaces: large, so that the delaying cable has few frames to carry.
MTU = 65_000

_PREFIX = "pippin-"
_DIRECTORY = "ppn-"  # short, since Unix sockets lie in it
_numbers = itertools.count()


def why_not() -> str | None:
    """Why hosts cannot be made here, None if they can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command in ("ip", "tc", "taskset"):
        if shutil.which(command) is None:
            return f"the command {command!r} is missing (Debian: iproute2, util-linux)"
    name = f"{_PREFIX}{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


def why_no_latency() -> str | None:
    return None if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "there is no /dev/net/tun"


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class Host:
    """One machine. Its processes are those in its namespace, however they came to be."""

    def __init__(
        self,
        namespace: str,
        address: str,
        cpus: str | None,
        directory: Path,
        switch: str,
        port: str,
    ) -> None:
        self.namespace = namespace
        self.address = address
        self.cpus = cpus
        """As ``taskset -c`` takes it; None: all."""
        self.directory = directory
        """For files of its own; removed at the end."""
        self.environment: dict[str, str] = {}
        """Added to that of its processes."""
        self._switch = switch
        self._port = port
        """Of the switch, at the other end of this host's cable."""

    def command(self, *command: str) -> list[str]:
        pinned = [] if self.cpus is None else ["taskset", "-c", self.cpus]
        return ["ip", "netns", "exec", self.namespace, *pinned, *command]

    def merged_environment(self, extra: Mapping[str, str | None]) -> dict[str, str]:
        merged: dict[str, str | None] = {**os.environ, **self.environment, **extra}
        return {name: value for name, value in merged.items() if value is not None}

    def run(
        self,
        *command: str,
        timeout_s: float = 60,
        check: bool = True,
        env: Mapping[str, str | None] = {},
    ) -> subprocess.CompletedProcess[str]:
        """Run to its end. ``env``: added to the host's; None takes a variable away."""
        done = subprocess.run(
            self.command(*command),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self.merged_environment(env),
            check=False,
        )
        if check and done.returncode != 0:
            raise RuntimeError(
                f"{self.address}: {' '.join(command)} ended with {done.returncode}:\n"
                f"{done.stdout}{done.stderr}"
            )
        return done

    @contextlib.contextmanager
    def start(
        self,
        *command: str,
        env: Mapping[str, str | None] = {},
        **options: object,
    ) -> Iterator[subprocess.Popen[str]]:
        """A process with pipes for its input and output, killed at the end."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(
            self.command(*command), env=self.merged_environment(env), **(pipes | options)
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()

    def python(self, script: str, *arguments: str, **options: object) -> str:
        """What a Python script prints on this host."""
        return self.run(sys.executable, "-c", script, *arguments, **options).stdout

    def pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def signal(self, number: int) -> None:
        """To all processes of the host: ``SIGSTOP`` freezes it, ``SIGCONT`` thaws it."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Power off: ends all processes at once and waits until they are gone."""
        deadline = time.monotonic() + 10
        while self.pids():
            self.signal(signal.SIGKILL)
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.address}: processes {self.pids()} do not die")
            time.sleep(0.01)

    def cut(self) -> None:
        """Take the cable out. Frames are lost and nobody is told, as behind a switch."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def restore(self) -> None:
        _ip("-n", self._switch, "link", "set", self._port, "up")

    def limit(self, mbit: float | None) -> None:
        """Bandwidth each way in megabits a second; None: no limit."""
        for namespace, device in ((self.namespace, "eth0"), (self._switch, self._port)):
            if mbit is None:
                rule = ["del", "dev", device, "root"]
            else:
                # Bursts must hold a frame, and about a millisecond's worth at high rates.
                burst = max(2 * MTU, int(mbit * 1e6 / 8 / 1000))
                shape = ["rate", f"{int(mbit * 1000)}kbit", "burst", f"{burst}", "limit", "10mb"]
                rule = ["replace", "dev", device, "root", "tbf", *shape]
            command = ["tc", "-n", namespace, "qdisc", *rule]
            subprocess.run(command, check=True, capture_output=True, text=True)

    def wait_for_port(self, port: int, timeout_s: float = 30) -> None:
        """Until something listens at this host's port."""
        script = (
            "import socket, sys, time\n"
            "deadline = time.monotonic() + float(sys.argv[3])\n"
            "while True:\n"
            "    try: socket.create_connection(sys.argv[1:3], 1).close(); break\n"
            "    except OSError:\n"
            "        if time.monotonic() > deadline: raise\n"
            "        time.sleep(0.05)\n"
        )
        self.python(script, self.address, str(port), str(timeout_s), timeout_s=timeout_s + 10)


class Net:
    """Hosts ``10.77.0.1``, ``10.77.0.2``, … on one bridge.

    ``cpus``: of each host, as ``taskset -c`` takes them; default: the machine's in turn.
    ``latency_ms``: added each way between any two hosts (half of it at either's cable).
    """

    def __init__(
        self, count: int, *, cpus: Sequence[str | None] | None = None, latency_ms: float = 0
    ) -> None:
        self._name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._name}-switch"
        self._directory = Path(tempfile.mkdtemp(prefix=f"{_DIRECTORY}{os.getpid()}-"))
        self._count = count
        available = sorted(os.sched_getaffinity(0))
        self._cpus = cpus or [str(available[i % len(available)]) for i in range(count)]
        self._latency_s = latency_ms / 1000
        self._cables: list[subprocess.Popen[str]] = []
        self.hosts: list[Host] = []

    def __enter__(self) -> Net:
        _sweep()
        try:
            self._add_namespace(self._switch)
            _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "bridge", "mtu", str(MTU))
            # A gateway makes programs find the right address of their host by asking for a route.
            _ip("-n", self._switch, "addr", "add", "10.77.0.254/24", "dev", "bridge")
            _ip("-n", self._switch, "link", "set", "bridge", "up")
            for index in range(self._count):
                self.hosts.append(self._add_host(index))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        # Large windows, so that latency alone does not limit the bandwidth of one connection.
        for setting in ("tcp_rmem", "tcp_wmem"):
            line = f"echo '4096 1048576 134217728' > /proc/sys/net/ipv4/{setting}"
            _ip("netns", "exec", name, "sh", "-c", line)

    def _add_host(self, index: int) -> Host:
        namespace, port = f"{self._name}-{index}", f"port{index}"
        self._add_namespace(namespace)
        if self._latency_s:
            self._lay_slow_cable(namespace, port, f"far{index}")
        else:
            end = ["peer", "name", "eth0", "netns", namespace]
            _ip("link", "add", port, "netns", self._switch, "type", "veth", *end)
        address = f"10.77.0.{index + 1}"
        _ip("-n", self._switch, "link", "set", port, "mtu", str(MTU), "master", "bridge", "up")
        _ip("-n", namespace, "link", "set", "eth0", "mtu", str(MTU), "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", namespace, "route", "add", "default", "via", "10.77.0.254")
        directory = self._directory / str(index)
        directory.mkdir()
        return Host(namespace, address, self._cpus[index], directory, self._switch, port)

    def _lay_slow_cable(self, namespace: str, near: str, far: str) -> None:
        script = str(Path(__file__).with_name("delay.py"))
        cable = subprocess.Popen(
            [
                *("ip", "netns", "exec", self._switch, sys.executable, script),
                *(str(self._latency_s / 2), near, far),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._cables.append(cable)
        assert cable.stdout is not None
        if cable.stdout.readline() != "ready\n":
            raise RuntimeError("the delaying cable did not start")
        _ip("-n", self._switch, "link", "set", far, "netns", namespace, "name", "eth0")

    def close(self) -> None:
        """Ends every process of the hosts and removes all that was made."""
        for host in self.hosts:
            host.kill()
        for cable in self._cables:
            cable.kill()
            cable.wait()
            if cable.stdout is not None:
                cable.stdout.close()
        for name in _namespaces():
            if name.startswith(f"{self._name}-"):
                _ip("netns", "del", name)
        shutil.rmtree(self._directory, ignore_errors=True)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]


def _sweep() -> None:
    """Remove what a test run that was killed has left: its process is gone, its names are not."""
    for name in _namespaces():
        owner = name.removeprefix(_PREFIX).partition("-")[0]
        if not name.startswith(_PREFIX) or not owner.isdigit() or Path(f"/proc/{owner}").exists():
            continue
        with contextlib.suppress(RuntimeError):  # another run may sweep at the same time
            for pid in _ip("netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "del", name)
    for directory in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY}*"):
        owner = directory.name.removeprefix(_DIRECTORY).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(directory, ignore_errors=True)


def free_port(host: Host) -> int:
    script = "import socket; print(socket.create_server(('', 0)).getsockname()[1])"
    return int(host.python(script))
