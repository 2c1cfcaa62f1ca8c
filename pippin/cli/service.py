"""Wires engine process, client, app and HTTP server into one running endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType
from typing import Self

import msgspec
import uvicorn

from pippin import log
from pippin.cli.output import Progress, size
from pippin.config import Config, environment
from pippin.engine.launcher import EngineProcess, Launched
from pippin.errors import ConfigError, PippinError, PortInUse
from pippin.models import files
from pippin.models.checkpoint import open_checkpoint
from pippin.server.app import App, build_app
from pippin.server.client import EngineClient
from pippin.server.tokenizer import load_tokenizer
from pippin.types.message import Ready

#: Connections the kernel keeps waiting while the server is busy.
_BACKLOG = 2048


class Service:
    """One model at one URL. Everything that can fail early fails in the constructor.

    Raises ``PortInUse``, ``ConfigError`` (an address that is not this machine's) or ``ModelError``.
    """

    def __init__(self, config: Config) -> None:
        log.setup("server", config.log_level)
        self._socket = bind(config.server.host, config.server.port)
        try:
            home = environment()
            found = files.resolve(
                config.model.model,
                revision=config.model.revision,
                offline=home.hub_offline,
                home=home.home,
                progress=sys.stderr.isatty(),
            )
            open_checkpoint(found)  # here, where a broken file costs no start of the engine
            self._tokenizer = load_tokenizer(
                found,
                config.model.tokenizer,
                chat_template=config.model.chat_template,
                trust_request_chat_template=config.server.trust_request_chat_template,
            )
        except BaseException:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        server = msgspec.structs.replace(config.server, port=self.port)
        self.config = msgspec.structs.replace(config, server=server)
        self._engine = launched(self.config)
        self._app: App | None = None
        self._http: _Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals = 0
        self.ready: Ready

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine.stop()
        self._socket.close()

    @property
    def root(self) -> str:
        """``http://host:port``, with a host that this machine reaches itself by."""
        host = self.config.server.host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def load(self) -> Ready:
        """Start the engine process and wait for its model. Raises what the engine failed with."""
        name = self.config.model.model
        if not sys.stderr.isatty():
            print(f"loading {name}", file=sys.stderr, flush=True)
        with Progress("loading") as progress, _interruptible() as check:

            def waiting(seconds: float) -> None:
                check()
                progress.say(f"loading {name}: {seconds:.0f} s")

            self.ready = self._engine.start(waiting)
            check()
        return self.ready

    def serve(
        self, on_up: Callable[[], Awaitable[None]] | None = None, *, handle_signals: bool = True
    ) -> None:
        """``run`` in an event loop of its own; signals can be handled in the main thread only."""
        with asyncio.Runner(loop_factory=_fastest_loop()) as runner:
            runner.run(self.run(on_up, handle_signals=handle_signals))

    async def run(
        self, on_up: Callable[[], Awaitable[None]] | None = None, *, handle_signals: bool = True
    ) -> None:
        """Serve until ``stop`` or a signal, then let running requests finish.

        ``on_up`` runs once, beside the server, when it accepts connections; what it raises ends the
        service. Raises the engine's error if the engine process fails.
        """
        client = EngineClient(self._engine.address, self._ended, keys=self._engine.keys)
        try:
            await client.start()
            app = build_app(self.config, client, self._tokenizer)
            server = _Server(self._uvicorn_config(app))
            self._app, self._http, self._loop = app, server, asyncio.get_running_loop()
            if handle_signals:
                for number in (signal.SIGINT, signal.SIGTERM):
                    self._loop.add_signal_handler(number, self._on_signal, client)
            self._listen()
            gc.collect()
            gc.freeze()  # what is loaded by now stays; later collections need not look at it
            await self._serve(server, client, on_up)
        finally:
            await client.close()
            self._engine.stop(1.0 if self._signals > 1 else 10.0)

    def stop(self) -> None:
        """End ``run`` from any thread."""
        loop, server = self._loop, self._http
        if loop is not None and server is not None:
            loop.call_soon_threadsafe(setattr, server, "should_exit", True)

    async def _serve(
        self, server: _Server, client: EngineClient, on_up: Callable[[], Awaitable[None]] | None
    ) -> None:
        async def end_with_engine() -> None:
            await client.failed.wait()
            server.should_exit = True

        async def when_up() -> None:
            await server.up.wait()
            if on_up is not None:
                try:
                    await on_up()
                except BaseException:
                    server.should_exit = True
                    raise

        beside = [asyncio.create_task(end_with_engine()), asyncio.create_task(when_up())]
        try:
            await server.serve(sockets=[self._socket])
        finally:
            for task in beside:
                task.cancel()
            results = await asyncio.gather(*beside, return_exceptions=True)
        if client.failure is not None:  # whatever else went wrong follows from it
            raise client.failure
        for result in results:
            if isinstance(result, Exception):
                raise result

    def _uvicorn_config(self, app: App) -> uvicorn.Config:
        return uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=max(1, round(self.config.server.drain_timeout)),
        )

    def _listen(self) -> None:
        """Only now, so that nobody connects before there is a model; another process may have
        listened in the meantime."""
        try:
            self._socket.listen(_BACKLOG)
        except OSError as error:
            raise _in_use(self.config.server.host, self.port) from error

    async def _ended(self) -> PippinError:
        return await asyncio.to_thread(self._engine.why_ended)

    def _on_signal(self, client: EngineClient) -> None:
        assert self._http is not None
        assert self._app is not None
        self._signals += 1
        if self._signals == 1:
            self._app.drain()
            self._http.should_exit = True
            if left := client.num_unfinished:
                print(f"\nfinishing {left} running (Ctrl-C again stops at once)", file=sys.stderr)
        else:
            self._http.force_exit = True


def launched(config: Config) -> Launched:
    """How the engine's processes are to be born."""
    if config.parallel.distributed_executor_backend == "ray":
        from pippin.cluster.ray_launcher import RayEngine

        return RayEngine(config)
    return EngineProcess(config)


def _fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for this platform
        return None
    make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make


class _Server(uvicorn.Server):
    """Leaves signals to ``Service`` and says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Reserve the address. Raises ``PortInUse`` or ``ConfigError``."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM,
                                   flags=socket.AI_PASSIVE)  # fmt: skip
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: no such host", hint="--host 127.0.0.1") from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise _in_use(host, port) from error
        if error.errno == errno.EACCES:
            raise ConfigError(
                f"port {port} needs more rights than this user has", hint="--port 8000"
            ) from error
        raise ConfigError(
            f"--host {host}: {error.strerror}", hint="--host 127.0.0.1 or 0.0.0.0"
        ) from error
    return bound


def _in_use(host: str, port: int) -> PortInUse:
    return PortInUse(
        f"port {port} on {host} is in use",
        hint="stop the other server, or choose another port with --port (0 picks a free one)",
    )


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """Gives a check that raises once SIGINT or SIGTERM has come.

    An exception out of the blue could leave a half-made process or socket behind.
    """
    came: list[int] = []

    def check() -> None:
        if came:
            raise KeyboardInterrupt if came[0] == signal.SIGINT else SystemExit(128 + came[0])

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda got, frame: came.append(got)) for number in numbers]
    try:
        yield check
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def summary(service: Service) -> str:
    """What was started, in a few honest lines."""
    ready, config = service.ready, service.config
    full = ready.kv_tokens / ready.max_model_len
    note = f" ({ready.max_model_len_note})" if ready.max_model_len_note else ""
    name = ready.model_name
    names = [served for served in config.model.served_model_name if served != name]
    lines = [
        (
            "model",
            f"{name}, {ready.architecture}" + (f", served as {', '.join(names)}" if names else ""),
        ),
        ("weights", f"{size(ready.weights_bytes)}, {ready.quantization or 'not quantised'}"),
        ("backend", f"{ready.backend} on {ready.device}, {ready.dtype}: {ready.backend_reason}"),
        ("context", f"{ready.max_model_len:,} tokens a request{note}"),
        (
            "KV cache",
            f"{ready.kv_tokens:,} tokens in {size(ready.kv_bytes)}:"
            f" {full:.1f} requests of full length",
        ),
        ("loaded", f"in {ready.load_seconds:.1f} s"),
        ("URL", f"{service.root}/v1"),
        ("page", f"{service.root}/ (dashboard and chat)"),
    ]
    if config.server.host not in ("127.0.0.1", "localhost", "::1") and not config.server.api_key:
        lines.append(
            ("note", "anyone who reaches this machine can use it; --api-key KEY asks for a key")
        )
    return "\n".join(f"  {title:<9}{text}" for title, text in lines)
