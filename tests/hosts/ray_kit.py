"""A real Ray node on each host of a ``Net``, with token authentication."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hosts_kit import Host, Net

PORT = 6379
#: Bytes of each node's object store; Ray's least is 75 MiB. Nothing of ours goes through it.
_STORE_BYTES = 80 * 2**20

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Ranks at Ray's usual 15 starve beside its own daemons, since a host here has one core.
    "RAY_worker_niceness": "0",
    # A dead node is found in seconds, not in half a minute.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
}


class Cluster:
    """Ray on every host of ``net``; the first is the head. ``resources``: of each node.

    Programs run on the hosts find the cluster and the token in their environment (``RAY_ADDRESS``,
    ``RAY_AUTH_MODE``, ``RAY_AUTH_TOKEN``).
    """

    def __init__(
        self, net: Net, resources: Sequence[Mapping[str, float]], *, num_cpus: int = 1
    ) -> None:
        self.net = net
        self.token = secrets.token_hex(32)
        self.address = f"{net.hosts[0].address}:{PORT}"
        for host in net.hosts:
            host.environment |= _QUIET | {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": self.token,
                "RAY_ADDRESS": self.address,
                "VIRTUAL_ENV": sys.prefix,
            }
        self._resources = list(resources)
        self._num_cpus = num_cpus

    def start(self, timeout_s: float = 180) -> None:
        """All nodes at once; raises ``RuntimeError`` with what Ray said if one does not come up."""
        starting = [self._launch(index) for index in range(len(self.net.hosts))]
        try:
            for index, process in enumerate(starting):
                self._finish(index, process, timeout_s)
        finally:
            for process in starting:
                process.kill()
                process.wait()

    def start_node(self, index: int, timeout_s: float = 180) -> None:
        """One node, again or for the first time."""
        self._finish(index, self._launch(index), timeout_s)

    def _log(self, index: int) -> Path:
        return self.net.hosts[index].directory / "ray_start.log"

    def _finish(self, index: int, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        try:
            status: object = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            status = f"nothing after {timeout_s:.0f} s"
        if status != 0:
            said = self._log(index).read_text()
            host = self.net.hosts[index]
            raise RuntimeError(f"ray start on {host.address} ended with {status}:\n{said}")

    def _launch(self, index: int) -> subprocess.Popen[bytes]:
        host = self.net.hosts[index]
        head = index == 0
        place = (
            ["--head", f"--port={PORT}", "--include-dashboard=false"]
            if head
            else [f"--address={self.address}"]
        )
        command = host.command(
            str(Path(sys.executable).with_name("ray")),
            "start",
            *place,
            f"--node-ip-address={host.address}",
            f"--num-cpus={self._num_cpus}",
            f"--resources={json.dumps(dict(self._resources[index]))}",
            f"--object-store-memory={_STORE_BYTES}",
            f"--temp-dir={host.directory}",
            "--disable-usage-stats",
        )
        # A file, since the daemons that stay behind would keep a pipe open.
        with self._log(index).open("w") as log:
            return subprocess.Popen(
                command,
                env=host.merged_environment({"RAY_ADDRESS": None}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def python(self, script: str, *arguments: str, host: Host | None = None, **options) -> str:
        """What a script prints that runs as a Ray client on the head (or ``host``)."""
        return (host or self.net.hosts[0]).python(script, *arguments, **options)


__all__ = ["Cluster"]
