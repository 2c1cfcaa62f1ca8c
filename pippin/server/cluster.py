"""``GET /api/cluster``: what serves, where. One replica so far, whose stages may be several."""

from __future__ import annotations

import socket
from typing import Any

import psutil

from pippin import __version__
from pippin.config import Config
from pippin.types.message import Ready, StageInfo
from pippin.types.step import SchedulerStats


def state(
    config: Config,
    ready: Ready,
    stats: SchedulerStats,
    names: tuple[str, ...],
    *,
    draining: bool,
    failure: str | None,
) -> dict[str, Any]:
    """The whole state as plain JSON. What is not measured is null, never a guess."""
    node = socket.gethostname()
    on_cpu = ready.device.startswith("cpu")
    replica_state = "failed" if failure is not None else "draining" if draining else "up"
    reason = failure or ("The server is shutting down." if draining else None)
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
                "stages": _stages(ready, stats, node),
            }
        ],
    }


def _stages(ready: Ready, stats: SchedulerStats, node: str) -> list[dict[str, Any]]:
    stages = ready.stages or (
        StageInfo(
            rank=0,
            node=node,
            pid=ready.pid,
            layers=(0, ready.num_layers),
            backend=ready.backend,
            device=ready.device,
            weights_bytes=ready.weights_bytes,
        ),
    )
    busy = stats.busy if len(stats.busy) == len(stages) else (None,) * len(stages)
    return [
        {
            "node": stage.node,
            "rank": stage.rank,
            "pid": stage.pid,
            "layers": list(stage.layers),
            "backend": stage.backend,
            "busy_ratio": ratio,
        }
        for stage, ratio in zip(stages, busy, strict=True)
    ]


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
