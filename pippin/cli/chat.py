"""``pippin chat``: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pippin.cli.flags import config_from, engine_options, with_options
from pippin.errors import ConfigError, EngineUnavailable, PippinError

if TYPE_CHECKING:
    import httpx

_HELP = "/exit leaves, /new forgets the conversation, /system TEXT sets the system message"


@with_options(engine_options())
def chat(
    model: Annotated[
        str | None,
        typer.Argument(help="Model to start for this chat; without it, --url is asked."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Running endpoint. [default: http://127.0.0.1:8000]")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key to send.")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name to ask for; default: the first that is served.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: the model's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    **flags: Any,
) -> None:
    """Chat with a running endpoint, or with MODEL started for the purpose."""
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    if model is None and given:
        raise ConfigError(
            f"--{next(iter(given)).replace('_', '-')} needs a MODEL to start",
            hint="pippin chat demo, or leave the flag out to ask a running endpoint",
        )
    if model is not None and url is not None:
        raise ConfigError("MODEL and --url exclude each other", hint="give one of them")
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    wanted = {name: value for name, value in sampling.items() if value is not None}
    if model is not None:
        config = config_from(model, {"log_level": "warning", **given, "port": "0"}, None)
        with _own_endpoint(config) as root, _connect(root, None) as client:
            _talk(Conversation(client, None, system, wanted))
    else:
        with _connect(url or "http://127.0.0.1:8000", api_key) as client:
            _talk(Conversation(client, served_model_name, system, wanted))


class Conversation:
    """History and the endpoint that goes on with it."""

    def __init__(
        self,
        client: httpx.Client,
        model: str | None,
        system: str | None,
        sampling: dict[str, Any],
    ) -> None:
        self._client = client
        self._sampling = sampling
        self.model = model or self._first_model()
        self.system = system
        self.history: list[dict[str, str]] = []

    def answer(self, text: str) -> Iterator[str]:
        """Pieces of the answer. The exchange joins the history, also if the reader leaves early.

        Raises ``EngineUnavailable`` if the endpoint refuses or breaks off; the history stays as it
        was then.
        """
        said = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*system, *self.history, said],
            "stream": True,
            **self._sampling,
        }
        pieces: list[str] = []
        try:
            for piece in self._stream(body):
                pieces.append(piece)
                yield piece
        except (GeneratorExit, KeyboardInterrupt):
            self._remember(said, pieces)
            raise
        self._remember(said, pieces)

    def _remember(self, said: dict[str, str], pieces: list[str]) -> None:
        self.history += [said, {"role": "assistant", "content": "".join(pieces)}]

    def _stream(self, body: dict[str, Any]) -> Iterator[str]:
        with (
            _reachable(self._client),
            self._client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if response.status_code != 200:
                raise _refused(response.status_code, response.read())
            for line in response.iter_lines():
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                event = json.loads(line[5:])
                if event.get("error"):
                    raise EngineUnavailable(str(event["error"].get("message", event["error"])))
                for choice in event.get("choices", []):
                    yield choice["delta"].get("content") or ""

    def _first_model(self) -> str:
        with _reachable(self._client):
            response = self._client.get("/v1/models")
        if response.status_code != 200:
            raise _refused(response.status_code, response.content)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise EngineUnavailable(
                f"{self._client.base_url} does not say which model it serves",
                hint="is it an OpenAI-compatible server? --served-model-name names the model",
            ) from error


def _talk(conversation: Conversation) -> None:
    if not sys.stdin.isatty():
        text = sys.stdin.read().strip()
        if not text:
            raise ConfigError("nothing to ask: standard input is empty")
        _print_answer(conversation, text)
        return
    with contextlib.suppress(ImportError):  # line editing, where Python was built with it
        import readline  # noqa: F401
    print(f"{conversation.model}: {_HELP}")
    while (text := _read_line()) is not None:
        match text.split(maxsplit=1):
            case []:
                continue
            case ["/exit" | "/quit"]:
                return
            case ["/new"]:
                conversation.history.clear()
            case ["/system", *rest]:
                conversation.system = " ".join(rest) or None
            case [command, *_] if command.startswith("/"):
                print(_HELP)
            case _:
                try:
                    _print_answer(conversation, text)
                except PippinError as error:  # a refused message does not end the conversation
                    print(f"error: {error.message}", file=sys.stderr)
                except KeyboardInterrupt:
                    print(" [stopped]")


def _read_line() -> str | None:
    """None at the end of input or Ctrl-C."""
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _print_answer(conversation: Conversation, text: str) -> None:
    for piece in conversation.answer(text):
        print(piece, end="", flush=True)
    print()


@contextlib.contextmanager
def _connect(url: str, api_key: str | None) -> Iterator[httpx.Client]:
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    root = url.rstrip("/").removesuffix("/v1")
    if not root.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url}: not a URL", hint="give it as http://127.0.0.1:8000")
    timeout = httpx.Timeout(10.0, read=600.0)
    try:
        client = httpx.Client(base_url=root, headers=headers, timeout=timeout)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url}: {error}") from error
    with client:
        yield client


@contextlib.contextmanager
def _reachable(client: httpx.Client) -> Iterator[None]:
    import httpx

    try:
        yield
    except httpx.HTTPError as error:
        raise EngineUnavailable(
            f"no answer from {client.base_url}: {error}",
            hint="start an endpoint with `pippin serve demo`, or chat with `pippin chat demo`",
        ) from error


def _refused(status: int, body: bytes) -> EngineUnavailable:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = body.decode("utf-8", "replace")[:200]
    hint = "give a key with --api-key" if status == 401 else None
    return EngineUnavailable(f"the endpoint answered {status}: {message}", hint=hint)


@contextlib.contextmanager
def _own_endpoint(config: Any) -> Iterator[str]:
    """Serve in a thread, so that the terminal (and Ctrl-C) stay with the conversation."""
    from pippin.cli.service import Service

    up = threading.Event()
    failures: list[BaseException] = []

    async def say_up() -> None:
        up.set()

    with Service(config) as service:
        service.load()

        def serve() -> None:
            try:
                service.serve(say_up, handle_signals=False)
            except PippinError as error:
                failures.append(error)
            finally:
                up.set()

        thread = threading.Thread(target=serve, name="server")
        thread.start()
        up.wait()
        try:
            if not failures:
                yield service.root
        finally:
            service.stop()
            thread.join()
        if failures:
            raise failures[0]
