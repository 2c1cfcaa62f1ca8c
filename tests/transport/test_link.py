"""Links over real sockets: whole messages in order, bounded, fast, closed when told."""

from __future__ import annotations

import os
import threading
import time

import pytest
from link_kit import HIDDEN_SIZE, SECRET, announcement, hidden, meet, pair, peer, plan

from pippin.errors import ConfigError, PeerLost, PortInUse, StageMismatch
from pippin.transport.frames import PART_BYTES, Control, Hidden, Plan, Stop
from pippin.transport.keys import derive_keys
from pippin.transport.link import Link

KEYS = derive_keys(SECRET)
BOTH = pytest.mark.parametrize("keys", [None, KEYS], ids=["plain", "encrypted"])


@BOTH
def test_mixed_kinds_arrive_in_order_both_ways(keys):
    sent = [plan(0), hidden(0, 3), Control(b"sizes"), plan(0), plan(1), hidden(1), Stop("done")]
    with pair(keys) as (a, b):
        for link, other in ((a, b), (b, a)):
            for message in sent:
                link.send(message)
            assert [other.receive(5) for _ in sent] == sent


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_large_tensors_arrive_whole_out_of_their_parts(keys, dtype):
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    with Links(keys, dtype) as (a, b):
        for step, parts in enumerate((0.001, 0.5, 1, 1.001, 3, 7.3)):
            tokens = int(parts * PART_BYTES) // (size * HIDDEN_SIZE)
            data = os.urandom(tokens * size * HIDDEN_SIZE)
            a.send(Hidden(step, dtype, (tokens, HIDDEN_SIZE), memoryview(data), 1.5))
            got = b.receive(10)
            assert (got.step, got.dtype, got.shape, got.seconds) == (
                step,
                dtype,
                (tokens, HIDDEN_SIZE),
                1.5,
            )
            assert got.data == data
            assert not got.data.readonly  # arrays are made on it without a copy


class Links:
    """A pair whose stages announced ``dtype``."""

    def __init__(self, keys, dtype):
        self.a = Link.bind("tcp://127.0.0.1:0", keys)
        self.b = Link.connect(self.a.address, keys)
        self.dtype = dtype

    def __enter__(self):
        results = meet(
            self.a,
            self.b,
            announcement(0, dtype=self.dtype),
            announcement(1, dtype=self.dtype),
        )
        assert not any(isinstance(result, Exception) for result in results), results
        return self.a, self.b

    def __exit__(self, *_):
        self.a.close(0)
        self.b.close(0)


def test_ipc_addresses_work(tmp_path):
    a = Link.bind(f"ipc://{tmp_path}/stage")
    b = Link.connect(a.address)
    meet(a, b)
    b.send(plan(0))
    assert a.receive(5) == plan(0)
    a.close()
    b.close()


def test_handshake_tells_each_end_who_the_other_is():
    a = Link.bind("tcp://127.0.0.1:0", KEYS)
    b = Link.connect(a.address, KEYS)
    assert meet(a, b) == [announcement(1), announcement(0)]
    a.close()
    b.close()


def test_the_connecting_end_may_be_first():
    with pair() as (a, b):
        address = a.address
    late: list[Link] = []
    b = Link.connect(address)
    timer = threading.Timer(0.3, lambda: late.append(Link.bind(address)))
    timer.start()
    timer.join()
    results = meet(late[0], b)
    assert [type(result).__name__ for result in results] == ["Announcement"] * 2
    late[0].close()
    b.close()


def test_window_bounds_what_is_unread():
    message = hidden(0, tokens=4096)  # 1 MiB
    count = 0
    with pair(window_bytes=8 * 2**20, stall_timeout_s=0.3) as (a, b):
        while count < 100:
            try:
                a.send(Hidden(count, message.dtype, message.shape, message.data))
            except PeerLost as error:
                assert "has read nothing" in str(error)  # noqa: PT017
                break
            count += 1
        assert 6 <= count <= 9
        # Reading opens it again, and nothing was lost.
        for step in range(count):
            assert b.receive(5).step == step
        a.send(Hidden(1000, message.dtype, message.shape, message.data))
        assert b.receive(5).step == 1000


def test_small_messages_are_bounded_too():
    with pair(window_bytes=2**20, stall_timeout_s=0.2) as (a, _):
        for step in range(250):
            a.send(plan(step))
        with pytest.raises(PeerLost, match="has read nothing"):
            exhaust(a)


def exhaust(link: Link) -> None:
    for step in range(1000, 1100):
        link.send(plan(step))


def test_a_blocked_sender_goes_on_when_the_receiver_reads():
    steps = 40
    message = hidden(0, tokens=4096)
    with pair(window_bytes=4 * 2**20) as (a, b):

        def work() -> None:
            for step in range(steps):
                a.send(Hidden(step, message.dtype, message.shape, message.data))

        sender = threading.Thread(target=work)
        sender.start()
        for step in range(steps):
            assert b.receive(5).step == step
        sender.join(5)
        assert not sender.is_alive()


def test_a_tensor_larger_than_the_window_passes():
    with pair(window_bytes=2**20) as (a, b):
        for step in range(3):
            a.send(hidden(step, tokens=3 * 4096))
            assert b.receive(5) == hidden(step, tokens=3 * 4096)


def test_receive_waits_no_longer_than_told():
    with pair() as (a, _):
        started = time.monotonic()
        assert a.receive(0) is None
        assert a.receive(0.1) is None
        assert 0.1 <= time.monotonic() - started < 1


def test_wake_is_called_on_arrival_and_on_loss():
    woken = threading.Event()
    a = Link.bind("tcp://127.0.0.1:0", wake=woken.set)
    b = Link.connect(a.address)
    meet(a, b)
    assert not woken.is_set()
    b.send(plan(0))
    assert woken.wait(5)
    assert a.receive(0) == plan(0)
    woken.clear()
    b.close()
    assert woken.wait(5)
    with pytest.raises(PeerLost):
        a.receive(0)
    a.close()


def test_what_was_sent_before_closing_arrives_before_the_loss():
    with pair(KEYS) as (a, b):
        for step in range(20):
            a.send(hidden(step, tokens=2048))
        a.send(Stop("that was all"))
        a.close(5)
        assert [b.receive(5).step for _ in range(20)] == list(range(20))
        assert b.receive(5) == Stop("that was all")
        for _ in range(2):  # and ever after
            with pytest.raises(PeerLost, match="closed the connection"):
                b.receive(5)
        with pytest.raises(PeerLost, match="closed the connection"):
            b.send(plan(0))


def test_close_wakes_a_waiting_receiver():
    with pair() as (a, _):
        raised: list[Exception] = []

        def wait() -> None:
            try:
                a.receive()
            except PeerLost as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        a.close()
        waiting.join(5)
        assert str(raised[0]) == "the link was closed"
        a.close()  # again is nothing


@BOTH
def test_round_trip_is_measured_at_the_handshake(keys):
    with peer_of(keys) as a:
        assert 0 < a.stats.round_trip_s < 0.1
        heard = a.stats.last_heard
        deadline = time.monotonic() + 5
        while a.stats.last_heard == heard:  # heartbeats go on without work
            assert time.monotonic() < deadline
            time.sleep(0.02)


class peer_of:  # noqa: N801 (a context manager)
    def __init__(self, keys):
        self.link = Link.bind("tcp://127.0.0.1:0", keys)
        self.process = peer(self.link.address, SECRET if keys else None)

    def __enter__(self):
        self.process.__enter__()
        self.link.handshake(announcement(0), lambda theirs: None, 20)
        return self.link

    def __exit__(self, *error):
        self.process.__exit__(*error)
        self.link.close(0)


def test_messages_to_another_process_come_back():
    with peer_of(KEYS) as a:
        sent = [plan(0), hidden(0, 5000), Control(b"x" * 1000), plan(7)]
        for message in sent:
            a.send(message)
        assert [a.receive(10) for _ in sent] == sent
        assert a.stats.bytes_sent > 5000 * HIDDEN_SIZE * 4
        assert a.stats.bytes_received > 5000 * HIDDEN_SIZE * 4


def test_a_busy_port_is_a_clear_error():
    a = Link.bind("tcp://127.0.0.1:0")
    with pytest.raises(PortInUse, match=f"cannot listen at {a.address}") as caught:
        Link.bind(a.address, KEYS)
    assert caught.value.hint
    a.close()


def test_an_address_of_another_machine_is_a_clear_error():
    with pytest.raises(ConfigError, match=r"cannot listen at tcp://192\.0\.2\.1:0"):
        Link.bind("tcp://192.0.2.1:0", KEYS)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:port", "tcp://127.0.0.1", "10.0.0.1:5000"])
def test_what_is_no_address_is_a_clear_error(address):
    for make in (Link.connect, Link.bind):
        with pytest.raises(ConfigError, match="cannot"):
            make(address, KEYS)


@pytest.mark.parametrize("make", [Link.bind, Link.connect])
@pytest.mark.parametrize("host", ["192.0.2.1", "some-mac.local", "0.0.0.0", "[fe80::1]"])
def test_plain_text_off_the_machine_must_be_asked_for(make, host):
    with pytest.raises(ConfigError, match="unencrypted") as caught:
        make(f"tcp://{host}:5000")
    assert "trusted" in caught.value.hint


def test_messages_that_cannot_be_sent_are_the_callers_fault():
    with pair() as (a, b):
        for wrong in (
            Hidden(0, "int8", (1, 64), memoryview(bytes(64))),
            Hidden(0, "float32", (2, 64), memoryview(bytes(256))),
            Control(bytes(2**24 + 1)),
        ):
            with pytest.raises(ValueError, match=r"bytes|dtype"):
                a.send(wrong)
        a.send(plan(0))
        assert isinstance(b.receive(5), Plan)


def test_second_peer_is_refused_and_the_first_not_disturbed(caplog):
    with pair(KEYS) as (a, b):
        third = Link.connect(a.address, KEYS)
        with pytest.raises(StageMismatch, match="has its peer already"):
            third.handshake(announcement(1), lambda theirs: None, 10)
        b.send(plan(0))
        assert a.receive(5) == plan(0)
        assert "refused a second peer" in caplog.text
