"""``pippin serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pippin.cli.flags import config_from, with_options
from pippin.options import OPTIONS


@with_options(OPTIONS, later=True)
def serve(
    model: Annotated[
        str | None, typer.Argument(help="demo, a directory, a GGUF file, or a hub id (org/name).")
    ] = None,
    model_option: Annotated[
        list[str] | None, typer.Option("--model", help="Another way to give MODEL.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with these names; flags win over it.")
    ] = None,
    **flags: Any,
) -> None:
    """Start the endpoint: an OpenAI-compatible server with its engine."""
    from pippin.errors import ConfigError

    if model and model_option:
        raise ConfigError("MODEL and --model both name a model", hint="give one of them")
    settings = config_from(model or model_option, flags, config)

    import pippin
    from pippin.cli.service import Service, summary

    with Service(settings) as service:
        service.load()

        async def say() -> None:
            print(f"Pippin {pippin.__version__}\n{summary(service)}", flush=True)

        service.serve(say)
