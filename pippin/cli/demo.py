"""``pippin demo``: from nothing to an answered chat."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pippin.cli.flags import config_from, with_options
from pippin.options import BY_NAME, OPTIONS

if TYPE_CHECKING:
    from pippin.config import Config

QUESTION = "What is the capital of France?"
_SKIPPED = ("tokenizer", "revision", "port")


@with_options(option for option in OPTIONS if option.name not in _SKIPPED)
def demo(
    port: Annotated[
        int | None, typer.Option(help=f"{BY_NAME['port'].help} [default: 8000, or a free one]")
    ] = None,
    leave: Annotated[bool, typer.Option("--exit", "--once", help="Stop after the answer.")] = False,
    **flags: Any,
) -> None:
    """Fetch a small model, serve it, and answer one question over HTTP."""
    config = config_from("demo", {**flags, "port": None if port is None else str(port)}, None)

    from pippin.cli.service import Service, summary

    with Service(config if port is not None else _on_free_port(config)) as service:
        service.load()
        print(summary(service), flush=True)

        async def ask() -> None:
            answer = await _ask(service.root, service.config)
            print(f"\n  > {QUESTION}\n  {answer}\n", flush=True)
            if leave:
                service.stop()
            else:
                print(_how_to_go_on(service.root, service.config), flush=True)

        service.serve(ask)


def _on_free_port(config: Config) -> Config:
    """``config`` itself if its port is free, else with port 0, saying so."""
    import msgspec

    from pippin.cli.service import bind
    from pippin.errors import PortInUse

    try:
        bind(config.server.host, config.server.port).close()
    except PortInUse:
        print(f"port {config.server.port} is in use; taking a free one")
        return msgspec.structs.replace(
            config, server=msgspec.structs.replace(config.server, port=0)
        )
    return config


async def _ask(root: str, config: Config) -> str:
    """One greedy chat over HTTP, as any client would."""
    import httpx

    from pippin.errors import EngineUnavailable

    async with httpx.AsyncClient(timeout=300.0, trust_env=False) as client:
        response = await client.post(
            f"{root}/v1/chat/completions",
            headers=_headers(config),
            json=_body(config),
        )
    if response.status_code != 200:
        raise EngineUnavailable(f"the server answered {response.status_code}: {response.text}")
    return str(response.json()["choices"][0]["message"]["content"])


def _body(config: Config) -> dict[str, Any]:
    return {
        "model": (*config.model.served_model_name, config.model.model)[0],
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 64,
    }


def _headers(config: Config) -> dict[str, str]:
    key = next(iter(config.server.api_key), None)
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _how_to_go_on(root: str, config: Config) -> str:
    key = "".join(f" -H '{name}: {value}'" for name, value in _headers(config).items())
    return "\n".join(
        (
            f"  endpoint  {root}/v1",
            f"  dashboard {root}/",
            f"  metrics   {root}/metrics",
            "",
            "  Ask it yourself:",
            f"  curl {root}/v1/chat/completions -H 'Content-Type: application/json'{key} \\",
            f"    -d '{json.dumps(_body(config))}'",
            f"  pippin chat --url {root}",
            "",
            "  Ctrl-C stops it.",
        )
    )
