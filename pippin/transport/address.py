"""Addresses of sockets: ``tcp://10.0.0.1:5000``, port 0 for a free one, or ``ipc://path``."""

from __future__ import annotations

import errno
import ipaddress

import zmq

from pippin.errors import ConfigError, PortInUse


def is_local(address: str) -> bool:
    """Whether an address stays on this machine."""
    kind, _, rest = address.partition("://")
    if kind in ("ipc", "inproc"):
        return True
    host = rest.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind_error(address: str, error: zmq.ZMQError) -> PortInUse | ConfigError:
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"cannot listen at {address}: another program does",
            hint="end it, or leave the port out: a free one is chosen then",
        )
    return ConfigError(
        f"cannot listen at {address}: {error.strerror or error}",
        hint="the address must be one of this machine's own (ip addr, ifconfig)",
    )
