"""``pippin models``: what is on this machine."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from pippin.cli.output import size, table

app = typer.Typer(help="Models on this machine: list, pull, rm, info.", rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_models(json: Json = False) -> None:
    """List the models that can be served without a network."""
    from pippin.config import environment
    from pippin.models.local import list_local

    found = list_local(environment().home)
    if json:
        _print_json(
            [
                {
                    "name": model.name,
                    "kind": model.kind,
                    "size_bytes": model.size_bytes,
                    "last_used": model.last_used,
                    "path": str(model.path),
                }
                for model in found
            ]
        )
    elif not found:
        print("no models here yet; `pippin models pull demo` fetches a small one")
    else:
        rows = [(m.name, m.kind, size(m.size_bytes), _ago(m.last_used)) for m in found]
        print(table([("NAME", "KIND", "SIZE", "LAST USED"), *rows]))


@app.command("pull")
def pull(
    model: Annotated[str, typer.Argument(help="A hub id (org/name), or demo.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    json: Json = False,
) -> None:
    """Fetch a model, so that it can be served without a network."""
    from pippin.config import environment
    from pippin.models.files import resolve

    home = environment()
    found = resolve(
        model,
        revision=revision,
        offline=home.hub_offline,
        home=home.home,
        progress=sys.stderr.isatty(),
    )
    if json:
        _print_json({"name": model, "path": str(found.path), "size_bytes": _bytes_in(found.path)})
    else:
        print(f"{model} is at {found.path} ({size(_bytes_in(found.path))})")


@app.command("rm")
def remove(
    model: Annotated[str, typer.Argument(help="A name that `pippin models list` shows.")],
    json: Json = False,
) -> None:
    """Delete a fetched model from this machine."""
    from pippin.config import environment
    from pippin.models import local

    freed = local.remove(model, environment().home)
    if json:
        _print_json({"name": model, "freed_bytes": freed})
    else:
        print(f"{model} is gone; {size(freed)} are free again")


@app.command("info")
def info(
    model: Annotated[str, typer.Argument(help="demo, a directory, a GGUF file, or a hub id.")],
    json: Json = False,
) -> None:
    """Say what a model on this machine is; nothing is fetched."""
    from pippin.config import environment
    from pippin.models.checkpoint import open_checkpoint
    from pippin.models.files import resolve

    found = resolve(model, offline=True, home=environment().home)
    checkpoint = open_checkpoint(found)
    facts: dict[str, Any] = {
        "name": model,
        "path": str(found.path),
        "format": "gguf" if found.kind == "gguf" else "safetensors",
        "quantization": checkpoint.quantization,
        "size_bytes": _bytes_in(found.path),
        **_facts(checkpoint.config),
        "fingerprint": found.fingerprint,
    }
    if json:
        _print_json(facts)
        return
    facts["size_bytes"] = size(facts["size_bytes"])
    for key, value in facts.items():
        if value is not None:
            title = key.removesuffix("_bytes").replace("_", " ")
            print(f"{title:<22}{f'{value:,}' if isinstance(value, int) else value}")


def _facts(config: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a ``config.json`` that people compare models by."""
    text = config.get("text_config") or config
    return {
        "architecture": next(iter(config.get("architectures") or ()), None),
        "layers": text.get("num_hidden_layers"),
        "hidden_size": text.get("hidden_size"),
        "attention_heads": text.get("num_attention_heads"),
        "kv_heads": text.get("num_key_value_heads", text.get("num_attention_heads")),
        "experts": text.get("num_local_experts", text.get("num_experts")),
        "vocabulary": text.get("vocab_size"),
        "context_length": text.get("max_position_embeddings"),
    }


def _bytes_in(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _ago(moment: float | None) -> str:
    if moment is None:
        return "-"
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("day", 86400.0), ("hour", 3600.0), ("minute", 60.0)):
        count = int(seconds // length)
        if count:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _print_json(value: Any) -> None:
    print(jsonlib.dumps(value, ensure_ascii=False))
