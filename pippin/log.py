"""Logging set-up: one line a record, to standard error, so that ``--json`` output stays clean."""

from __future__ import annotations

import logging
import sys


def setup(process: str, level: str = "info") -> None:
    """Send all ``pippin`` records of this process to standard error, marked with its name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s [{process}] %(message)s", "%H:%M:%S")
    )
    logger = logging.getLogger("pippin")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
