"""Memory of the host, as far as this process may use it."""

from __future__ import annotations

import psutil


def host_memory() -> tuple[int, int]:
    """Bytes (free, total), within the limits of the process's control groups."""
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    for limit, used in _cgroup_limits():
        free, total = min(free, limit - used), min(total, limit)
    return max(free, 0), total


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, used) bytes of the control groups of this process, v2 and v1."""
    found = []
    for limit_file, used_file, stat_file in (
        (
            "/sys/fs/cgroup/memory.max",
            "/sys/fs/cgroup/memory.current",
            "/sys/fs/cgroup/memory.stat",
        ),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
            "/sys/fs/cgroup/memory/memory.stat",
        ),
    ):
        try:
            with open(limit_file, encoding="ascii") as file:
                text = file.read().strip()
            if text == "max" or int(text) >= 1 << 60:
                continue
            with open(used_file, encoding="ascii") as file:
                used = int(file.read())
            with open(stat_file, encoding="ascii") as file:
                stat = dict(line.split() for line in file)
        except OSError:
            continue
        # Cached files are given back under pressure.
        cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        found.append((int(text), max(used - cached, 0)))
    return found
