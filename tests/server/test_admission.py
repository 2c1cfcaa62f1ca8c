"""The bounded queue and its honest answer."""

from __future__ import annotations

import pytest

from pippin.clock import FakeClock
from pippin.errors import EngineUnavailable, InvalidRequest, QueueFull
from pippin.server.admission import RETRY_MAX_S, WINDOW, Admission


def test_all_sequences_of_a_request_or_none() -> None:
    admission = Admission(2, 3, FakeClock())
    admission.enter(3)
    with pytest.raises(QueueFull):
        admission.enter(3)
    assert admission.in_flight == 3
    admission.enter(2)
    with pytest.raises(QueueFull):
        admission.enter(1)
    assert admission.rejections == 2


def test_what_can_never_fit_is_a_bad_request() -> None:
    with pytest.raises(InvalidRequest) as caught:
        Admission(2, 3, FakeClock()).enter(6)
    assert caught.value.param == "n"


def test_places_come_back_once() -> None:
    admission = Admission(2, 0, FakeClock())
    ticket = admission.enter(2)
    ticket.end_one()
    assert admission.in_flight == 1
    ticket.leave()
    ticket.leave()
    assert admission.in_flight == 0


def test_retry_after_is_the_measured_rate() -> None:
    clock = FakeClock()
    admission = Admission(10, 0, clock)
    ticket = admission.enter(10)
    for _ in range(5):
        clock.advance(2.0)
        ticket.end_one()
        admission.enter(1)
    with pytest.raises(QueueFull) as caught:
        admission.enter(4)
    assert caught.value.retry_after == 8
    assert "8 s" in caught.value.message


def test_retry_after_before_anything_ended_is_the_time_so_far() -> None:
    clock = FakeClock()
    admission = Admission(1, 0, clock)
    clock.advance(1000.0)
    admission.enter(1)
    clock.advance(7.0)
    with pytest.raises(QueueFull) as caught:
        admission.enter(1)
    assert caught.value.retry_after == 7


def test_old_endings_do_not_count() -> None:
    clock = FakeClock()
    admission = Admission(100, 0, clock)
    ticket = admission.enter(100)
    for _ in range(50):
        ticket.end_one()
    admission.enter(50)
    clock.advance(100.0)  # fifty at once, then nothing for long
    assert admission.seconds_until(1) == 100


@pytest.mark.parametrize("seconds", [1e-6, 1e6])
def test_retry_after_is_bounded(seconds: float) -> None:
    clock = FakeClock()
    admission = Admission(1, 0, clock)
    admission.enter(1)
    clock.advance(seconds)
    assert 1 <= admission.seconds_until(1) <= RETRY_MAX_S


def test_the_window_is_bounded_and_the_rate_right() -> None:
    clock = FakeClock()
    admission = Admission(10_000, 0, clock)
    ticket = admission.enter(10_000)
    for _ in range(3 * WINDOW):
        clock.advance(0.125)
        ticket.end_one()
    assert admission.seconds_until(80) == 10


def test_draining_refuses() -> None:
    admission = Admission(1, 1, FakeClock())
    admission.draining = True
    with pytest.raises(EngineUnavailable):
        admission.enter(1)
