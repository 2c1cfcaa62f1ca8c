"""Starting and stopping an engine's processes, for the API process.

With several ranks on this machine (``mp``) the leader starts the others: see ``engine.ranks``.
Engines on other machines (``ray``) come from above this package; they are ``Launched``, too.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from pippin.config import Config
from pippin.engine.spec import EngineSpec
from pippin.errors import EngineError, PippinError
from pippin.transport.channel import ask
from pippin.transport.keys import CurveKeys
from pippin.types.message import Failed, Hello, Ready

#: Seconds between two looks at whether a loading process still lives.
_POLL_S = 0.5

#: Seconds for which an engine process may be stopped by a signal before it counts as lost.
FROZEN_S = 5.0


class Launched(Protocol):
    """An engine in processes of its own, owned by whoever started it: it ends with its owner."""

    @property
    def address(self) -> str:
        """Of the leader's stream; known once started."""

    @property
    def keys(self) -> CurveKeys | None:
        """Of that stream; None: plain."""

    def start(self, waiting: Callable[[float], None] = ...) -> Ready: ...

    def why_ended(self) -> PippinError:
        """Block until the engine has ended; from any thread."""

    def failure(self) -> PippinError | None:
        """Why it has ended, None while it runs."""

    def stop(self, timeout_s: float = ...) -> None: ...


class EngineProcess:
    """One engine process, on this machine."""

    keys = None

    def __init__(self, config: Config) -> None:
        self._config = config
        # A private directory (mode 0700) keeps other users of the machine off the socket.
        self._directory = Path(tempfile.mkdtemp(prefix="pippin-"))
        self.address = f"ipc://{self._directory}/engine"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self, waiting: Callable[[float], None] = lambda seconds: None) -> Ready:
        """Start the process and wait until the model is loaded.

        ``waiting`` is called about twice a second with the seconds passed, for a progress line.
        Raises the ``PippinError`` that the engine failed with.
        """
        started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pippin.engine.process", self.address],
            stdin=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for the parent, which decides when the engine stops
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(EngineSpec(config=self._config)) + b"\n")
        self._process.stdin.flush()
        while True:
            answer = ask(self.address, Hello(), _POLL_S)
            if isinstance(answer, Ready):
                return answer
            if isinstance(answer, Failed):
                self.stop()
                raise failure_to_error(answer)
            if self._process.poll() is not None:
                error = died(self._process.returncode)
                self.stop()
                raise error
            waiting(time.monotonic() - started)

    def wait(self) -> int:
        """Block until the process has ended; returns its exit status.

        One that is stopped (SIGSTOP) for ``FROZEN_S`` seconds is ended, and ``-SIGSTOP`` returned:
        to its clients it is as good as dead.
        """
        assert self._process is not None, "not started"
        watched = psutil.Process(self._process.pid)
        frozen_since: float | None = None
        while True:
            try:
                return self._process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                if not _is_stopped(watched):
                    frozen_since = None
                    continue
            frozen_since = frozen_since or time.monotonic()
            if time.monotonic() - frozen_since > FROZEN_S:
                self._process.kill()
                self._process.wait()
                return -signal.SIGSTOP

    def why_ended(self) -> PippinError:
        return died(self.wait())

    def poll(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def failure(self) -> PippinError | None:
        status = self.poll()
        return None if status is None else died(status)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the process, by force after ``timeout_s`` seconds, and clean up. Safe to repeat."""
        process = self._process
        if process is not None:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout_s)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            if process.stdin is not None:
                process.stdin.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def died(status: int) -> EngineError:
    """The error for a process that ended without a word."""
    if status == -signal.SIGSTOP:
        return EngineError(
            f"the engine process was frozen (stopped) for {FROZEN_S:.0f} s and was ended",
            hint="start again",
        )
    if status == -9:
        return EngineError(
            "the engine process was killed (signal 9), probably for lack of memory",
            hint="use a smaller model, --max-model-len or --gpu-memory-utilization",
        )
    how = f"by signal {-status}" if status < 0 else f"with status {status}"
    return EngineError(
        f"the engine process ended {how}", hint="its log stands above; --log-level debug says more"
    )


def failure_to_error(failure: Failed) -> PippinError:
    """The engine's own error, with its code and exit status, on this side of the socket."""
    for kind in _all_kinds(PippinError):
        if kind.code == failure.code and kind.exit_code == failure.exit_code:
            error = kind.__new__(kind)
            PippinError.__init__(error, failure.error, hint=failure.hint)
            return error
    return EngineError(failure.error, hint=failure.hint)


def _all_kinds(kind: type[PippinError]) -> list[type[PippinError]]:
    kinds = [kind]
    for sub in kind.__subclasses__():
        kinds += _all_kinds(sub)
    return kinds
