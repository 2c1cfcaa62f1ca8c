"""Where the ranks of a group find each other, and tell each other what is settled before steps run.

The first rank listens at the address that the plan names; the others hold one connection to it.
Whoever ends, ends the waiting of the others: its connection closes. A message is a line of JSON.

(torch's TCPStore would do, but for its waits: a rank that comes early tries again after a second,
nobody hears of a rank that ended, and a wait that is cut short can leave the next call hanging.)
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from pippin.backends.base import GroupSpec
from pippin.errors import ConfigError, PeerLost, PortInUse

#: Seconds that ranks wait for each other: to appear,
INIT_SECONDS = 60.0
#: ... and to have read their weights.
LOAD_SECONDS = 900.0

_RETRY_SECONDS = 0.05
_BUFFER = 1 << 16
_LONGEST = 1 << 20


class Meeting:
    """One rank's end."""

    def __init__(self, spec: GroupSpec, seconds: float = INIT_SECONDS) -> None:
        """Waits for all ranks. Raises ``PortInUse``, ``ConfigError`` or ``PeerLost``."""
        self.rank, self.size = spec.rank, spec.size
        self.address = spec.addresses[0]
        self.host, port = split_address(self.address)
        self._peers: dict[int, _Peer] = {}
        deadline = time.monotonic() + seconds
        try:
            if self.rank == 0:
                self._accept(port, deadline)
            else:
                self._peers[0] = _Peer(self._reach(port, deadline), 0)
                self._peers[0].send({"rank": self.rank, "size": self.size})
            self.share("met", "", deadline - time.monotonic())
        except (PeerLost, PortInUse, ConfigError):
            self.close()
            raise

    def share(self, key: str, value: str, seconds: float = LOAD_SECONDS) -> list[str]:
        """Every rank's ``value``, by rank. Raises ``PeerLost`` if one is gone or does not say its
        within ``seconds``."""
        deadline = time.monotonic() + seconds
        if self.rank:
            self._peers[0].send([key, value])
            answer = self._peers[0].receive(deadline)
        else:
            values = {0: value}
            for rank, peer in self._peers.items():
                said, values[rank] = peer.receive(deadline)
                if said != key:
                    raise lost(rank, f"it said {said!r} where {key!r} was due")
            answer = [key, [values[rank] for rank in range(self.size)]]
            for peer in self._peers.values():
                peer.send(answer)
        if answer[0] != key:
            raise lost(0, f"it said {answer[0]!r} where {key!r} was due")
        result: list[str] = answer[1]
        return result

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _accept(self, port: int, deadline: float) -> None:
        with listen(self.host, port) as listener:
            while len(self._peers) < self.size - 1:
                missing = min(set(range(1, self.size)) - set(self._peers))
                try:
                    listener.settimeout(_left(deadline))
                    connection, _ = listener.accept()
                except TimeoutError:
                    raise self._did_not_come(missing) from None
                peer = _Peer(connection, missing)
                try:
                    hello = peer.receive(min(deadline, time.monotonic() + 5))
                except PeerLost:
                    hello = None  # Somebody else, or a rank that ended: it is missed in the end.
                if not isinstance(hello, dict):
                    hello = {}
                rank = hello.get("rank")
                if isinstance(rank, int) and 0 < rank < self.size and rank not in self._peers:
                    if hello.get("size") != self.size:
                        raise ConfigError(
                            f"rank {rank} was started for a group of {hello.get('size')}, this one"
                            f" for a group of {self.size}"
                        )
                    peer.rank = rank
                    self._peers[rank] = peer
                else:
                    peer.close()

    def _reach(self, port: int, deadline: float) -> socket.socket:
        while True:
            try:
                return socket.create_connection((self.host, port), timeout=_left(deadline))
            except OSError as error:
                if time.monotonic() + _RETRY_SECONDS > deadline:
                    raise PeerLost(
                        f"rank {self.rank} does not reach rank 0 of its tensor-parallel group at"
                        f" {self.address}: {error}",
                        hint="is it running, and is the address reachable from here?",
                    ) from error
            time.sleep(_RETRY_SECONDS)

    def _did_not_come(self, rank: int) -> PeerLost:
        return PeerLost(
            f"rank {rank} of the tensor-parallel group at {self.address} did not come",
            hint="its log says whether it started, and what it is doing",
        )


class _Peer:
    """A connection to a rank."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.rank = rank
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""

    def send(self, message: Any) -> None:
        try:
            self._socket.settimeout(INIT_SECONDS)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise lost(self.rank, _closed(error)) from error

    def receive(self, deadline: float) -> Any:
        while b"\n" not in self._read:
            try:
                self._socket.settimeout(_left(deadline))
                data = self._socket.recv(_BUFFER)
            except TimeoutError:
                raise lost(self.rank, "it does not answer") from None
            except OSError as error:
                raise lost(self.rank, _closed(error)) from error
            if not data:
                raise lost(self.rank, "it ended")
            self._read += data
            if len(self._read) > _LONGEST:
                raise lost(self.rank, "it says what no rank says")
        line, _, self._read = self._read.partition(b"\n")
        try:
            return json.loads(line)
        except ValueError as error:
            raise lost(self.rank, "it says what no rank says") from error

    def close(self) -> None:
        self._socket.close()


def lost(rank: int | str, why: str) -> PeerLost:
    return PeerLost(
        f"rank {rank} of the tensor-parallel group is lost: {why}",
        hint="its own log says why; the stage has to be started again",
    )


def split_address(address: str) -> tuple[str, int]:
    """``host:port``. Raises ``ConfigError``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{address!r} is no address of a rank", hint="host:port")
    return host.strip("[]"), int(port)


def listen(host: str, port: int) -> socket.socket:
    """A socket on the address that the plan names, and on no other."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"{host} is no address of this machine: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise PortInUse(
            f"rank 0 of the tensor-parallel group cannot listen on {host}:{port}: {error.strerror}",
            hint="another process uses the port, or the address is not this machine's",
        ) from error
    return listener


def _left(deadline: float) -> float:
    # Never 0, which would mean: do not wait at all, and raise another error.
    return max(0.001, deadline - time.monotonic())


def _closed(error: OSError) -> str:
    return f"its connection closed ({error.strerror or error})"
