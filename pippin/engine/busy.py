"""How busy a stage is: time computing over time passed, of the last seconds."""

from __future__ import annotations

#: Seconds that a ratio is taken over.
WINDOW_S = 2.0


class BusyMeter:
    """Times are readings of one monotonic clock."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._busy = 0.0
        self._ratio = 0.0

    def add(self, seconds: float) -> None:
        """So much more was computed."""
        self._busy += seconds

    def ratio(self, now: float) -> float:
        """In [0, 1]; new about every ``WINDOW_S`` seconds."""
        passed = now - self._since
        if passed >= WINDOW_S:
            self._ratio = min(self._busy / passed, 1.0)
            self._since, self._busy = now, 0.0
        return self._ratio
