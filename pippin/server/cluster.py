"""``GET /api/cluster``: what serves, where. One machine with one replica of one stage so far."""

from __future__ import annotations

import socket
from typing import Any

import psutil

from pippin import __version__
from pippin.config import Config
from pippin.types.message import Ready


def state(
    config: Config, ready: Ready, names: tuple[str, ...], *, draining: bool, failure: str | None
) -> dict[str, Any]:
    """The whole state as plain JSON. What is not measured is null, never a guess."""
    node = socket.gethostname()
    on_cpu = ready.device.startswith("cpu")
    replica_state = "failed" if failure is not None else "draining" if draining else "up"
    reason = failure or ("The server is shutting down." if draining else None)
    stage = {
        "node": node,
        "rank": 0,
        "pid": ready.pid,
        "layers": [0, ready.num_layers],
        "backend": ready.backend,
        "busy_ratio": None,
    }
    return {
        "version": __version__,
        "model": _model(ready, names),
        "nodes": [
            {
                "name": node,
                "host": config.server.host,
                "state": "up",
                "reason": None,
                "backend": ready.backend,
                "device": ready.device,
                # A GPU's is known to the engine alone.
                "memory_bytes": psutil.virtual_memory().total if on_cpu else None,
                "power_watts": None,
            }
        ],
        "links": [],
        "plan": None,
        "replicas": [
            {
                "id": "0",
                "state": replica_state,
                "reason": reason,
                "node": node,
                "pid": ready.pid,
                "stages": [stage],
            }
        ],
    }


def _model(ready: Ready, names: tuple[str, ...]) -> dict[str, Any]:
    return {
        "name": names[0],
        "served_names": list(names),
        "architecture": ready.architecture,
        "dtype": ready.dtype,
        "quantization": ready.quantization,
        "backend_reason": ready.backend_reason,
        "weights_bytes": ready.weights_bytes,
        "max_model_len": ready.max_model_len,
        "max_model_len_note": ready.max_model_len_note,
        "kv_tokens": ready.kv_tokens,
        "kv_bytes": ready.kv_bytes,
    }
