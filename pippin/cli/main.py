"""The ``pippin`` command: one file a subcommand, each importing what is heavy only when it runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import pippin
from pippin.cli import bench, chat, demo, models, serve
from pippin.errors import PippinError

app = typer.Typer(
    name="pippin",
    help="Your own computers as one fast OpenAI-compatible LLM endpoint.",
    epilog="Start with `pippin demo`. Every command takes --help.",
    no_args_is_help=True,
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


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def report(error: PippinError) -> None:
    """Two lines on standard error: what went wrong and what fixes it."""
    print(f"error: {error.message}", file=sys.stderr)
    print(f"hint: {error.hint or 'pippin --help lists the commands'}", file=sys.stderr)


def main(arguments: list[str]) -> int:
    """Run one command and return the exit status. A user's mistake is never a traceback."""
    try:
        status = app(arguments, prog_name="pippin", standalone_mode=False)
    except PippinError as error:
        report(error)
        return error.exit_code
    except typer.TyperException as error:
        _report_usage(error, arguments)
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


def _report_usage(error: typer.TyperException, arguments: list[str]) -> None:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "pippin"
    message = " ".join(error.format_message().split())
    if message:
        print(f"error: {message[:1].lower()}{message[1:].rstrip('.')}", file=sys.stderr)
    else:  # a group without a subcommand has already printed its help
        print("error: a command is missing", file=sys.stderr)
    print(f"hint: {command} --help shows what it takes", file=sys.stderr)
