"""What runs on each node: it starts one rank's process there, watches it, and ends it.

Ray sends this class by value, so that a node without Pippin, or with another version of it, can say
so; hence it needs nothing but the standard library. The process is the same as without Ray. It ends
with this one at the latest: its standard input is a pipe from here, and its end means that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

Ended = tuple[int, bytes]
"""Exit status (negative: the signal) and the last line of standard output."""


class RankHost:
    """One rank's place. Methods may run at the same time, each in a thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._reader: threading.Thread | None = None

    def facts(self) -> dict[str, object]:
        """``version``: of the Pippin that ranks here would run, None without; ``why``: what was
        said instead; ``python``; ``cpus``: cores that this process may use."""
        asked = subprocess.run(
            [sys.executable, "-c", "import pippin; print(pippin.__version__)"],
            capture_output=True,
            text=True,
            timeout=25,
            check=False,
        )
        lines = (asked.stdout if asked.returncode == 0 else asked.stderr).strip().splitlines()
        last = lines[-1] if lines else ""
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        return {
            "version": last if asked.returncode == 0 else None,
            "why": last,
            "python": sys.executable,
            "cpus": cpus,
        }

    def free_ports(self, address: str, count: int, ports: tuple[int, int] | None) -> list[int]:
        """Ports of ``address`` that nobody listens at; fewer than ``count`` if there are not so
        many in ``ports`` (first, last). Raises ``OSError`` for an address that is not this node's.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        found: list[int] = []
        with contextlib.ExitStack() as stack:
            for port in range(ports[0], ports[1] + 1) if ports else [0] * count:
                if len(found) == count:
                    break
                one = stack.enter_context(socket.socket(family))
                try:
                    one.bind((address, port))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    continue
                found.append(one.getsockname()[1])
        return found

    def start(
        self, module: str, arguments: Sequence[str], line: bytes, environment: Mapping[str, str]
    ) -> int:
        """Start ``python -m module`` and give it one line; returns its process id.

        ``environment`` is added to this process's own.
        """
        merged = {**os.environ, **environment}
        if "OMP_NUM_THREADS" not in environment:
            # Ray's own doing: it says 1 for a process that asked for no CPU.
            merged.pop("OMP_NUM_THREADS", None)
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=merged,
            process_group=0,
        )
        self._process = process
        # Ray runs us at niceness 15, at which a rank may starve; only some may undo that.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, 0)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: that is seen soon enough
            process.stdin.write(line + b"\n")
            process.stdin.flush()
        self._reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._reader.start()
        return process.pid

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._said = line

    def ended(self) -> Ended:
        """Wait for the end of the process."""
        process = self._process
        assert process is not None, "not started"
        status = process.wait()
        if self._reader is not None:
            self._reader.join(1.0)
        return status, self._said

    def stop(self, grace_s: float) -> None:
        """End the process, by force after ``grace_s`` seconds (a frozen one knows no other way)."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
