"""What goes wrong on a link is one clear error, at both ends, in seconds."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec
import pytest
import zmq
from link_kit import HIDDEN_SIZE, SECRET, announcement, hidden, meet, pair, peer, plan

from pippin.errors import (
    ClusterSecretWrong,
    LinkError,
    PeerLost,
    ProtocolError,
    StageMismatch,
)
from pippin.transport.frames import Control, Header, Kind, encode, encode_head
from pippin.transport.keys import derive_keys
from pippin.transport.link import Link
from pippin.types.stage import PROTOCOL

pytestmark = pytest.mark.slow

KEYS = derive_keys(SECRET)
OTHER_KEYS = derive_keys("quite another secret")


# the secret


def shake(link: Link, rank: int, timeout_s: float) -> Exception | None:
    try:
        link.handshake(announcement(rank), lambda theirs: None, timeout_s)
    except LinkError as error:
        return error
    return None


def test_wrong_secret_is_an_error_at_the_connecting_end_and_logged_at_the_bound_one(caplog):
    a = Link.bind("tcp://127.0.0.1:0", KEYS)
    b = Link.connect(a.address, OTHER_KEYS)
    errors: list[Exception | None] = []
    waiting = threading.Thread(target=lambda: errors.append(shake(a, 0, 2)))
    waiting.start()
    started = time.monotonic()
    error = shake(b, 1, 30)
    assert time.monotonic() - started < 2
    assert isinstance(error, ClusterSecretWrong)
    assert a.address in str(error)
    assert error.hint
    waiting.join()
    assert isinstance(errors[0], ClusterSecretWrong)
    assert "refused 127.0.0.1:" in caplog.text
    assert "its cluster secret is another one" in caplog.text


def test_bound_end_waits_on_for_the_right_peer_after_a_wrong_one():
    a = Link.bind("tcp://127.0.0.1:0", KEYS)
    wrong = Link.connect(a.address, OTHER_KEYS)
    assert isinstance(shake(wrong, 1, 30), ClusterSecretWrong)
    b = Link.connect(a.address, KEYS)
    assert meet(a, b) == [announcement(1), announcement(0)]
    a.close(0)
    b.close(0)


def test_the_bound_ends_public_key_alone_opens_nothing(caplog):
    thief = thief_of_server_key(KEYS, OTHER_KEYS)
    a = Link.bind("tcp://127.0.0.1:0", KEYS)
    b = Link.connect(a.address, thief)
    assert isinstance(shake(b, 1, 30), ClusterSecretWrong)
    assert "not a member of this cluster" in caplog.text
    a.close(0)


def thief_of_server_key(keys, other):
    return type(keys)(keys.server_public, b"\0" * 40, other.client_public, other.client_secret)


@pytest.mark.parametrize(("bound", "connecting"), [(KEYS, None), (None, KEYS)])
def test_one_end_encrypted_and_the_other_not(bound, connecting):
    a = Link.bind("tcp://127.0.0.1:0", bound)
    b = Link.connect(a.address, connecting)
    error = shake(b, 1, 10)
    assert isinstance(error, ProtocolError)
    assert "one end of the link is encrypted, the other is not" in str(error)
    a.close(0)


def test_what_is_sent_cannot_be_read_on_the_wire():
    """A relay in between sees the bytes; the secret words must not be among them."""
    words = b"the quick brown fox jumps over the lazy dog"
    for keys, readable in ((None, True), (KEYS, False)):
        a = Link.bind("tcp://127.0.0.1:0", keys)
        with listening_relay(int(a.address.rpartition(":")[2])) as (port, seen):
            b = Link.connect(f"tcp://127.0.0.1:{port}", keys)
            meet(a, b)
            b.send(Control(words))
            assert a.receive(5) == Control(words)
            assert (words in b"".join(seen)) is readable
            b.close(0)
            a.close(0)


@contextlib.contextmanager
def listening_relay(port: int):
    """Passes one TCP connection on and keeps what went from client to server."""
    seen: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))

    def carry(source, target, keep):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if keep:
                    seen.append(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def accept():
        with contextlib.suppress(OSError):
            client, _ = server.accept()
            upstream = socket.create_connection(("127.0.0.1", port))
            back = threading.Thread(target=carry, args=(upstream, client, False), daemon=True)
            back.start()
            carry(client, upstream, True)
            back.join(5)
            client.close()
            upstream.close()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1], seen
    finally:
        server.close()
        thread.join(5)


# the announcement


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "9.9"}, "Pippin version 1.0, stage 1 has 9.9"),
        ({"fingerprint": "xyz"}, "model fingerprint abc, stage 1 has xyz"),
        ({"dtype": "bfloat16"}, "dtype float32, stage 1 has bfloat16"),
        ({"layers": (3, 4)}, "ends before layer 2, but stage 1, which follows, begins at layer 3"),
        ({"rank": 0}, "both ends say that they are stage 0"),
    ],
)
def test_mismatch_is_raised_at_both_ends(change, words):
    a = Link.bind("tcp://127.0.0.1:0", KEYS)
    b = Link.connect(a.address, KEYS)
    for error in meet(a, b, announcement(0), announcement(**{"rank": 1} | change)):
        assert isinstance(error, StageMismatch)
        assert words in str(error)


def test_refusal_of_one_end_alone_reaches_the_other():
    a = Link.bind("tcp://127.0.0.1:0", KEYS)
    b = Link.connect(a.address, KEYS)
    results: list[Exception | None] = []
    other = threading.Thread(target=lambda: results.append(shake(b, 1, 10)))
    other.start()
    with pytest.raises(StageMismatch, match="no room"):
        a.handshake(announcement(0), lambda theirs: "no room", 10)
    other.join()
    assert isinstance(results[0], StageMismatch)
    assert str(results[0]) == "no room"


def test_nobody_there_is_an_error_in_time():
    with pair() as (a, _):
        free = a.address
    for link, words in (
        (Link.connect(free), f"nothing answered at {free} in time"),
        (Link.bind("tcp://127.0.0.1:0"), "nobody connected"),
    ):
        started = time.monotonic()
        error = shake(link, 0, 0.3)
        assert time.monotonic() - started < 2
        assert isinstance(error, PeerLost)
        assert words in str(error)
        assert error.hint


def test_what_listens_is_something_else():
    server = socket.create_server(("127.0.0.1", 0))

    def answer():
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 100)
                client.close()

    threading.Thread(target=answer, daemon=True).start()
    link = Link.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
    error = shake(link, 1, 10)
    server.close()
    assert isinstance(error, ProtocolError)
    assert "is not a link of Pippin" in str(error)


# a peer that breaks the rules


class RawPeer:
    """Speaks the protocol by hand, so that it can break it."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(address)

    def send(self, header: Header, body: bytes = b"") -> None:
        self.socket.send_multipart([encode_head(header), body])

    def receive(self, kind: Kind) -> bytes:
        """The next message of this kind; answers pings on the way."""
        while True:
            assert self.socket.poll(5000), f"no {kind.name} came"
            head, body = self.socket.recv_multipart()
            header = msgspec.msgpack.decode(head[4:], type=Header)
            if header.kind is kind:
                return body
            if header.kind is Kind.PING:
                self.send(Header(Kind.PONG, seconds=header.seconds))

    def greet(self) -> None:
        self.send(Header(Kind.ANNOUNCE), msgspec.msgpack.encode(announcement(1)))
        self.send(Header(Kind.ACCEPT))

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def raw():
    """A link after its handshake, and the raw peer at its other end."""
    link = Link.bind("tcp://127.0.0.1:0")
    peer = RawPeer(link.address)
    peer.greet()
    errors: list[Exception | None] = []
    shaking = threading.Thread(target=lambda: errors.append(shake(link, 0, 10)))
    shaking.start()
    peer.receive(Kind.ANNOUNCE)
    deadline = time.monotonic() + 10
    while shaking.is_alive():
        assert time.monotonic() < deadline
        if peer.socket.poll(20):
            head, _ = peer.socket.recv_multipart()
            header = msgspec.msgpack.decode(head[4:], type=Header)
            if header.kind is Kind.PING:
                peer.send(Header(Kind.PONG, seconds=header.seconds))
    assert errors == [None]
    yield link, peer
    peer.close()
    link.close(0)


ROW = HIDDEN_SIZE * 4


def part(step=0, dtype="float32", shape=(1, HIDDEN_SIZE), offset=0, total=ROW):
    return Header(Kind.HIDDEN, step, dtype, shape, offset, total)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([(part(dtype="bfloat16", total=ROW // 2), ROW // 2)], "peer announced float32"),
        ([(part(dtype="int8", total=HIDDEN_SIZE), HIDDEN_SIZE)], "dtype 'int8'"),
        ([(part(shape=(1, 32), total=128), 128)], "width 32; the model has 64"),
        ([(part(shape=(HIDDEN_SIZE,)), ROW)], "not [tokens, hidden size]"),
        ([(part(shape=(2, HIDDEN_SIZE)), ROW)], "256 bytes of hidden states for float32"),
        ([(part(offset=8), ROW)], "begin at byte 8"),
        ([(part(), ROW - 1), (part(1), ROW)], "expected the part of its hidden states at byte"),
        ([(part(), ROW + 1)], "a part of 257 bytes"),
        ([(part(), 0)], "a part of 0 bytes"),
        ([(part(), 100), (Header(Kind.CONTROL), 4)], "CONTROL inside the hidden states"),
        ([(part(3), ROW), (part(3), ROW)], "step 3 after those of step 3"),
        ([(part(3), ROW), (part(2), ROW)], "step 2 after those of step 3"),
        ([(part(total=2**40, shape=(2**32, HIDDEN_SIZE)), 8)], "the limit is"),
        ([(Header(Kind.PLAN, 0), 0)], "broken plan"),
        ([(Header(Kind.PLAN, 0), 100)], "broken plan"),
        ([(Header(Kind.ANNOUNCE), 0)], "unexpected ANNOUNCE"),
    ],
)
def test_frames_that_break_the_rules_end_the_link_at_both_ends(raw, frames, words):
    link, peer = raw
    for header, size in frames:
        peer.send(header, bytes(size))
    with pytest.raises(ProtocolError) as caught:
        read_to_the_end(link)
    assert words in str(caught.value)
    assert words in peer.receive(Kind.REFUSE).decode()
    with pytest.raises(ProtocolError):
        link.send(plan(0))


@pytest.mark.parametrize(
    "frames",
    [
        [b"garbage", b""],
        [b"", b""],
        [b"PPN", b""],
        [b"PPN\x01", b""],
        [encode_head(Header(Kind.STOP))[:-3], b""],
        [encode_head(Header(Kind.STOP))],
        [encode_head(Header(Kind.STOP)), b"", b""],
        [b"PPN\x01" + msgspec.msgpack.encode([99])],
        [b"PPN\x01" + msgspec.msgpack.encode([4, "x"]), b""],
        [b"PPN\x01" + msgspec.msgpack.encode([5, 0, "float32", [-1, 4], 0, 0, 0.0]), b""],
    ],
)
def test_garbage_from_the_peer_ends_the_link(raw, frames):
    link, peer = raw
    peer.socket.send_multipart(frames)
    with pytest.raises(ProtocolError):
        link.receive(5)


def test_plan_whose_step_is_not_its_headers(raw):
    link, peer = raw
    [(_, body)] = encode(plan(5))
    peer.send(Header(Kind.PLAN, 6), body)
    with pytest.raises(ProtocolError, match="header of step 6 with a plan of step 5"):
        link.receive(5)


def test_work_before_the_handshake_is_refused():
    link = Link.bind("tcp://127.0.0.1:0")
    raw = RawPeer(link.address)
    raw.send(Header(Kind.ANNOUNCE), msgspec.msgpack.encode(announcement(1)))
    raw.send(Header(Kind.CONTROL), b"now")
    with pytest.raises(ProtocolError, match="CONTROL before the handshake"):
        link.receive(5)
    raw.close()
    link.close(0)


@pytest.mark.parametrize("other", [0, PROTOCOL - 1, PROTOCOL + 1, 255])
def test_another_link_protocol_is_told_to_both_ends(other):
    link = Link.bind("tcp://127.0.0.1:0")
    raw = RawPeer(link.address)
    raw.socket.send_multipart([b"PPN" + bytes([other]) + b"whatever", b""])
    error = shake(link, 0, 10)
    assert isinstance(error, ProtocolError)
    assert f"the peer speaks link protocol {other}, this is {PROTOCOL}" in str(error)
    assert f"link protocol {other}" in raw.receive(Kind.REFUSE).decode()
    raw.close()


def read_to_the_end(link: Link) -> None:
    while link.receive(5) is not None:
        pass


# strangers


def test_third_parties_do_not_disturb_a_link(caplog):
    with pair() as (a, b):
        host, _, port = a.address.removeprefix("tcp://").partition(":")
        with socket.create_connection((host, int(port))) as rough:
            rough.sendall(os.urandom(1000))
            stranger = RawPeer(a.address)
            stranger.socket.send_multipart([b"who", b"are", b"you"])
            stranger.socket.send_multipart([b"hello"])
            stranger.send(Header(Kind.STOP), b"go away")
            stranger.send(Header(Kind.ANNOUNCE), msgspec.msgpack.encode(announcement(1)))
            assert b"has its peer already" in stranger.receive(Kind.REFUSE)
            b.send(hidden(0, 5000))
            assert a.receive(5) == hidden(0, 5000)
            a.send(plan(0))
            assert b.receive(5) == plan(0)
            stranger.close()
    assert "dropped a stranger's message" in caplog.text


def test_strangers_before_the_peer_do_not_take_its_place():
    a = Link.bind("tcp://127.0.0.1:0")
    stranger = RawPeer(a.address)
    stranger.socket.send_multipart([b"hello", b"there"])
    stranger.send(Header(Kind.PLAN), b"")
    b = Link.connect(a.address)
    assert meet(a, b) == [announcement(1), announcement(0)]
    stranger.close()
    a.close(0)
    b.close(0)


# death


@contextlib.contextmanager
def with_peer(timeout_s: float, secret: str | None = SECRET, **options):
    link = Link.bind(
        "tcp://127.0.0.1:0", KEYS if secret else None, peer_timeout_s=timeout_s, **options
    )
    with peer(link.address, secret) as process:
        link.handshake(announcement(0), lambda theirs: None, 20)
        assert process.stdout.readline() == "ready\n"
        try:
            yield link, process
        finally:
            link.close(0)


def lost(link: Link) -> tuple[PeerLost, float]:
    started = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        link.receive(20)
    return caught.value, time.monotonic() - started


@pytest.mark.parametrize("secret", [None, SECRET])
def test_killed_peer_is_noticed_at_once(secret):
    with with_peer(5, secret) as (link, process):
        process.kill()
        error, seconds = lost(link)
        assert seconds < 1
        assert "its process ended" in str(error)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_stopped_peer_is_noticed_within_the_timeout(secret):
    with with_peer(1.5, secret) as (link, process):
        os.kill(process.pid, signal.SIGSTOP)
        error, seconds = lost(link)
        assert 0.5 < seconds < 1.7
        assert "has been silent for" in str(error)


def test_stopped_peer_is_noticed_within_five_seconds_by_default():
    with with_peer(5) as (link, process):
        os.kill(process.pid, signal.SIGSTOP)
        _, seconds = lost(link)
        assert seconds < 5


def test_sender_blocked_by_a_stopped_peer_is_freed():
    with with_peer(1.5, window_bytes=2**20) as (link, process):
        os.kill(process.pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(PeerLost, match="has been silent for"):
            send_for_ever(link)
        assert time.monotonic() - started < 2


def send_for_ever(link: Link) -> None:
    for step in range(10**6):
        link.send(hidden(step, 1000))


def test_peer_that_freezes_for_less_than_the_timeout_lives():
    with with_peer(2) as (link, process):
        os.kill(process.pid, signal.SIGSTOP)
        assert link.receive(0.8) is None
        os.kill(process.pid, signal.SIGCONT)
        link.send(plan(0))
        assert link.receive(5) == plan(0)


def test_holding_pythons_lock_is_not_death():
    """Loading a model keeps other threads of a process waiting for seconds."""
    with pair(KEYS, peer_timeout_s=1):
        pass
    script = (
        "import ctypes, sys; sys.path.insert(0, sys.argv[1])\n"
        "from link_kit import *\n"
        "link = Link.connect(sys.argv[2], derive_keys(SECRET), peer_timeout_s=1)\n"
        "link.handshake(announcement(1), lambda theirs: None, 10)\n"
        "ctypes.PyDLL(None).usleep(2_500_000)\n"
        "link.send(plan(0))\n"
        "link.receive()\n"
    )
    link = Link.bind("tcp://127.0.0.1:0", KEYS, peer_timeout_s=1)
    command = [sys.executable, "-c", script, os.path.dirname(__file__), link.address]
    with subprocess.Popen(command) as process:
        try:
            link.handshake(announcement(0), lambda theirs: None, 20)
            assert link.receive(10) == plan(0)
        finally:
            process.kill()
    link.close(0)


def test_process_ends_without_closing_its_links():
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from link_kit import *\n"
        "links = [Link.bind('tcp://127.0.0.1:0', derive_keys(SECRET)),\n"
        "         Link.connect('tcp://127.0.0.1:1', derive_keys(SECRET))]\n"
        "print('over')\n"
    )
    command = [sys.executable, "-c", script, os.path.dirname(__file__)]
    done = subprocess.run(command, timeout=20, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


def test_closed_links_leave_no_descriptors_behind():
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else math.inf
    for _ in range(20):
        with pair(KEYS):
            pass
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after <= before + 2
