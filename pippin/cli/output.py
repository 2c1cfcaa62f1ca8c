"""What commands print: progress on standard error, only for a person; sizes in words."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self


class Progress:
    """One line, written over; nothing where standard error is not a terminal."""

    def __init__(self, what: str, total: int | None = None, *, shown: bool = True) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._shown = shown and sys.stderr.isatty()

    def __enter__(self) -> Self:
        if self._total is not None:
            self.say(f"{self._what}: 0/{self._total}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def advance(self) -> None:
        self._done += 1
        self.say(f"{self._what}: {self._done}/{self._total}")

    def say(self, text: str) -> None:
        if self._shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()


def size(count: int) -> str:
    """Bytes in words: ``96 MB``, ``1.5 GB`` (powers of ten, as disks and downloads are sold)."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 999.5:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB" if value < 999.5 else f"{value / 1000:.1f} TB"


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as their longest cell; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
