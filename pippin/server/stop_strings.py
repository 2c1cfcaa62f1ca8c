"""Stop strings in a text that comes piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Finds the stop string that is complete first, however the text is cut into pushes.

    Of several that end at the same character the longest counts.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._prefixes = frozenset(
            stop[:length] for stop in self._stops for length in range(1, len(stop))
        )
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""
        self._seen = ""
        """The last characters already released (at most ``_longest - 1``): only needed where a
        stop may begin in text that was let go, that is where stops are included."""

    def __bool__(self) -> bool:
        return bool(self._stops)

    def push(self, piece: str, active: bool = True) -> tuple[str, str | None]:
        """Text that may go out, and the stop string found.

        A stop counts when it is completed by a push with ``active`` (vLLM's ``min_tokens``).
        """
        before = len(self._seen) + len(self._held)
        text = self._seen + self._held + piece
        found = self._find(text, before) if active else None
        if found is not None:
            start, stop = found
            end = start + len(stop) if self._include else start
            released = text[len(self._seen) : end]
            self._held = ""
            return released, stop
        keep = 0 if self._include else self._hold(text)
        cut = len(text) - keep
        released = text[len(self._seen) : cut]
        self._held = text[cut:]
        self._seen = text[:cut][-(self._longest - 1) :] if self._longest > 1 else ""
        return released, None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, before: int) -> tuple[int, str] | None:
        """Earliest end behind ``before``, then earliest start."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, before - len(stop) + 1))
            if start != -1:
                found = (start + len(stop), start, stop)
                if best is None or found < best:
                    best = found
        return None if best is None else (best[1], best[2])

    def _hold(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0
