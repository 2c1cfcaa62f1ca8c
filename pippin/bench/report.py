"""How a result is shown and kept."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from pippin.bench.metrics import METRICS, TITLES
from pippin.errors import ConfigError

_WIDTH = 54
_LINES = (
    ("Successful requests", "completed", "d"),
    ("Failed requests", "failed", "d"),
    ("Benchmark duration (s)", "duration", ".2f"),
    ("Total input tokens", "total_input_tokens", "d"),
    ("Total generated tokens", "total_output_tokens", "d"),
    ("Request throughput (req/s)", "request_throughput", ".2f"),
    ("Request goodput (req/s)", "request_goodput", ".2f"),
    ("Output token throughput (tok/s)", "output_throughput", ".2f"),
    ("Peak output token throughput (tok/s)", "max_output_tokens_per_s", ".2f"),
    ("Peak concurrent requests", "max_concurrent_requests", "d"),
    ("Total token throughput (tok/s)", "total_token_throughput", ".2f"),
    ("Client's CPU share (of one core)", "client_cpu_share", ".1%"),
)


def as_text(result: Mapping[str, Any]) -> str:
    """The table of ``vllm bench serve``."""
    lines = [" Serving benchmark result ".center(_WIDTH, "=")]
    lines += [
        f"{title + ':':<40}{format(result[key], form):>14}"
        for title, key, form in _LINES
        if result.get(key) is not None
    ]
    for name in METRICS:
        shown = [key for key in result if key.endswith(f"_{name}_ms")]
        if shown:
            lines.append(f" {TITLES[name]} ".center(_WIDTH, "-"))
            lines += [f"{_title(key, name):<40}{result[key]:>14.2f}" for key in shown]
    lines.append("=" * _WIDTH)
    return "\n".join(lines + notes(result))


def notes(result: Mapping[str, Any]) -> list[str]:
    """What a reader must know to compare the numbers with those of another server."""
    found = []
    tokens, chunks = result["total_output_tokens"], result["total_output_chunks"]
    if result["output_tokens_counted_by"] != "usage":
        found.append(
            "note: the server sent no usage for some requests; there, a chunk of text counts as a"
            " token"
        )
    elif chunks and abs(tokens - chunks) > 0.02 * tokens:
        found.append(
            f"note: {tokens} tokens came in {chunks} chunks of text, so that inter-token latency is"
            " per chunk"
        )
    if result.get("client_cpu_share", 0.0) > 0.25:
        found.append(
            "note: the client took more than a quarter of a core; on a small machine that slows"
            " the server down"
        )
    return found


def save(result: Mapping[str, Any], path: Path, *, append: bool = False) -> None:
    """Write (or append, one object a line) JSON. Raises ``ConfigError`` if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(as_json(result) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def as_json(result: Mapping[str, Any]) -> str:
    """One line of strict JSON; an infinite rate is the string ``inf``, as in vLLM's files."""
    return json.dumps(
        {key: "inf" if value == math.inf else value for key, value in result.items()},
        ensure_ascii=False,
    )


def default_filename(label: str, rate: float, concurrency: int | None, model: str) -> str:
    """vLLM's name: ``LABEL-RATEqps[-concurrencyN]-MODEL-DATE.json``."""
    limit = f"-concurrency{concurrency}" if concurrency else ""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return f"{label}-{rate:g}qps{limit}-{Path(model).name}-{stamp}.json"


def _title(key: str, name: str) -> str:
    kind = key.removesuffix(f"_{name}_ms")
    return f"{kind.capitalize()} {name.upper()} (ms):"
