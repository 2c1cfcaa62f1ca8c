"""Who may enter: a bounded number of sequences, and an honest answer to the others.

A sequence is one choice of one prompt. ``max_num_seqs`` of them run, ``max_num_queued_reqs`` may
wait; a request brings all of its sequences in at once or none.
"""

from __future__ import annotations

import math
from collections import deque

from pippin.clock import Clock
from pippin.errors import EngineUnavailable, InvalidRequest, QueueFull

#: Endings that the rate is measured over, and how old they may be, in seconds.
WINDOW = 256
WINDOW_S = 60.0
#: Bounds of Retry-After in seconds.
RETRY_MIN_S = 1
RETRY_MAX_S = 600


class Admission:
    """Counts sequences from acceptance to ending. Belongs to one event loop."""

    def __init__(self, max_running: int, max_waiting: int, clock: Clock) -> None:
        self.capacity = max_running + max_waiting
        self.in_flight = 0
        self.rejections = 0
        self.draining = False
        self._clock = clock
        self._endings: deque[float] = deque(maxlen=WINDOW)
        self._measured_since = clock.monotonic()
        """When the server became busy, or the last ending that has left the window."""

    def enter(self, sequences: int) -> Ticket:
        """Raises ``QueueFull`` with the time until so many places should be free,
        ``EngineUnavailable`` while draining, ``InvalidRequest`` if they can never be."""
        if self.draining:
            raise EngineUnavailable("The server is shutting down.")
        if sequences > self.capacity:
            raise InvalidRequest(
                f"The request asks for {sequences} sequences; this server takes at most"
                f" {self.capacity} at a time.",
                param="n",
            )
        missing = self.in_flight + sequences - self.capacity
        if missing > 0:
            self.rejections += 1
            seconds = self.seconds_until(missing)
            raise QueueFull(
                f"The queue is full ({self.in_flight} sequences running or waiting);"
                f" try again in about {seconds} s.",
                retry_after=seconds,
            )
        if not self.in_flight:
            self._measured_since = self._clock.monotonic()
            self._endings.clear()
        self.in_flight += sequences
        return Ticket(self, sequences)

    def seconds_until(self, places: int) -> int:
        """Seconds until ``places`` sequences should have ended, at the measured rate.

        Before anything ended, the time that the server has been busy without an ending is the best
        lower bound there is for the next one.
        """
        now = self._clock.monotonic()
        while self._endings and now - self._endings[0] > WINDOW_S:
            self._measured_since = self._endings.popleft()
        elapsed = max(now - self._measured_since, 1e-3)
        rate = max(len(self._endings), 1) / elapsed
        return min(max(math.ceil(places / rate), RETRY_MIN_S), RETRY_MAX_S)

    def leave(self, sequences: int, completed: bool) -> None:
        """For ``Ticket``."""
        self.in_flight -= sequences
        if completed:
            if len(self._endings) == WINDOW:
                self._measured_since = self._endings[0]
            self._endings.append(self._clock.monotonic())


class Ticket:
    """Places of one request; ``leave`` what is left of them exactly once, in a ``finally``."""

    def __init__(self, admission: Admission, sequences: int) -> None:
        self._admission = admission
        self._held = sequences

    def end_one(self) -> None:
        """One sequence has got its ending."""
        self._held -= 1
        self._admission.leave(1, completed=True)

    def leave(self) -> None:
        self._admission.leave(self._held, completed=False)
        self._held = 0
