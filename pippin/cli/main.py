"""The ``pippin`` command: one file a subcommand, each importing what is heavy only when it runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

import pippin
from pippin.cli import bench, chat, demo, models, serve
from pippin.errors import PippinError

app = typer.Typer(
    name="pippin",
    help="Your own computers as one fast OpenAI-compatible LLM endpoint.",
    epilog="Start with `pippin demo`. Every command takes --help.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help starts in half the time and pipes well
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("serve")(serve.serve)
app.command("demo")(demo.demo)
app.command("chat")(chat.chat)
app.add_typer(models.app, name="models")
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pippin {pippin.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: list[str]) -> int:
    """Run one command and return the exit status. A user's mistake is never a traceback."""
    try:
        status = app(arguments, prog_name="pippin", standalone_mode=False)
    except PippinError as error:
        _report(error.message, error.hint or _help_hint(arguments))
        return error.exit_code
    except typer.TyperException as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        _report(message[:1].lower() + message[1:], _help_hint(arguments))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return status if isinstance(status, int) else 0


def run() -> None:
    """Entry of the console script."""
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output, such as `head`, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)


def _report(message: str, hint: str) -> None:
    """Two lines on standard error: what went wrong and what fixes it."""
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)


def _help_hint(arguments: list[str]) -> str:
    """Names the command that was meant, as far as it exists."""
    group: Any = typer.main.get_command(app)
    path = "pippin"
    for word in arguments:
        group = getattr(group, "commands", {}).get(word)
        if group is None:
            break
        path += f" {word}"
    return f"{path} --help shows what it takes"
