"""CURVE keys made of the cluster secret, and the guard that checks them at the door.

Whoever knows the secret can make both key pairs, so both ends prove that they know it: the
connecting end needs the bound end's public key even to say hello, and its own key is looked at by
the guard. Nothing made of the secret travels in the clear. The traffic itself is encrypted with
keys of one connection, which are thrown away with it.

An onlooker can try secrets against a recorded hello, hence the deliberately slow derivation. A
random secret (``secrets.token_urlsafe(32)``) is out of reach in any case.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from pippin.errors import ConfigError

logger = logging.getLogger(__name__)

#: Shorter secrets are refused: they can be guessed.
MIN_SECRET_LENGTH = 16

_ZAP_ADDRESS = "inproc://zeromq.zap.01"  # where libzmq asks, by ZeroMQ RFC 27
_ZAP_DOMAIN = b"pippin"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Key pairs of the bound (server) and the connecting (client) end, in Z85 as libzmq wants."""

    server_public: bytes = field(repr=False)
    server_secret: bytes = field(repr=False)
    client_public: bytes = field(repr=False)
    client_secret: bytes = field(repr=False)


@functools.cache
def derive_keys(secret: str) -> CurveKeys:
    """The keys of a cluster; the same on every machine. Takes about 50 ms, once a process.

    Raises ``ConfigError`` for a secret of fewer than ``MIN_SECRET_LENGTH`` characters.
    """
    if len(secret) < MIN_SECRET_LENGTH:
        raise ConfigError(
            f"the cluster secret has {len(secret)} characters, fewer than {MIN_SECRET_LENGTH}",
            hint="python3 -c 'import secrets; print(secrets.token_urlsafe(32))' makes a good one",
        )
    # The salt is fixed since all machines must come to the same keys from the secret alone.
    seed = hashlib.scrypt(secret.encode(), salt=b"pippin cluster 1", n=2**14, r=8, p=1, dklen=64)
    server, client = z85.encode(seed[:32]), z85.encode(seed[32:])
    return CurveKeys(zmq.curve_public(server), server, zmq.curve_public(client), client)


def use_as_server(socket: zmq.Socket[Any], keys: CurveKeys) -> None:
    """Encrypt what a socket binds; before ``bind``. Its context needs a ``guard``."""
    socket.curve_server = True
    socket.curve_secretkey = keys.server_secret
    socket.curve_publickey = keys.server_public
    socket.zap_domain = _ZAP_DOMAIN


def use_as_client(socket: zmq.Socket[Any], keys: CurveKeys) -> None:
    """Encrypt what a socket connects to; before ``connect``."""
    socket.curve_serverkey = keys.server_public
    socket.curve_secretkey = keys.client_secret
    socket.curve_publickey = keys.client_public


def guard(context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> None:
    """Let only holders of the client key in to the bound sockets of ``context``.

    Starts a thread that sleeps until somebody knocks, and ends with the context.
    """
    socket = context.socket(zmq.REP)
    socket.linger = 0
    socket.bind(_ZAP_ADDRESS)
    threading.Thread(
        target=_answer, args=(socket, z85.decode(keys.client_public)), name="guard", daemon=True
    ).start()


def _answer(socket: zmq.Socket[bytes], client_key: bytes) -> None:
    """Answer libzmq's questions (ZeroMQ RFC 27) until the context is terminated."""
    try:
        while True:
            version, request, _, address, _, mechanism, *credentials = socket.recv_multipart()
            known = mechanism == b"CURVE" and credentials == [client_key]
            if not known:
                logger.warning("refused %s: not a member of this cluster", address.decode())
            status = (b"200", b"OK") if known else (b"400", b"not a member of this cluster")
            socket.send_multipart((version, request, *status, b"", b""))
    except (zmq.ContextTerminated, zmq.ZMQError):
        pass
    finally:
        socket.close()
