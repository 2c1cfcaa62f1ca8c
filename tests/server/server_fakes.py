"""A tokenizer of bytes and an engine that recites, so that the server can be tested by itself."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import httpx
import msgspec
import uvicorn
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pippin.clock import Clock
from pippin.config import Config
from pippin.errors import EngineUnavailable, PippinError
from pippin.models.tokenizer_parts import TokenizerParts
from pippin.server.app import App, build_app
from pippin.server.token_bytes import byte_level_alphabet
from pippin.server.tokenizer import Tokenizer
from pippin.types.message import Ready, StepOutputs
from pippin.types.request import FinishReason, Logprobs, Request, SequenceOutput
from pippin.types.step import SchedulerStats

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, IM_START, IM_END = range(3)
VOCAB = 3 + 256
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RECITATION = "The quick brown fox jumps over the lazy dog. "
MAX_MODEL_LEN = 512


def make_tokenizer(**parts: Any) -> Tokenizer:
    """A token a byte: id 3 + byte. The three special tokens come first."""
    names = sorted(byte_level_alphabet(), key=byte_level_alphabet().__getitem__)
    vocab = {name: i for i, name in enumerate((*SPECIAL, *names))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return Tokenizer(
        TokenizerParts(
            backend=backend,
            special_tokens={"eos_token": "<|im_end|>"},
            eos_token_ids=(IM_END,),
            vocab_size=VOCAB,
            **{"chat_templates": {"default": CHATML}, **parts},
        )
    )


def ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


class FakeEngine:
    """Each sequence recites ``script(request)``, a token a step, and honours what ends it.

    ``logit_bias`` of 100 forces a token. ``hold`` stops all sequences until ``let_go``.
    """

    def __init__(self) -> None:
        self.ready = Ready(
            pid=0,
            model_name="fake",
            architecture="FakeForCausalLM",
            num_layers=1,
            vocab_size=VOCAB,
            max_model_len=MAX_MODEL_LEN,
            max_model_len_note=None,
            num_blocks=(100,),
            block_size=16,
            kv_tokens=1600,
            kv_bytes=1 << 20,
            weights_bytes=1 << 20,
            dtype="float32",
            quantization=None,
            backend="fake",
            backend_reason="a test",
            device="cpu",
            load_seconds=0.0,
        )
        self.on_step: Callable[[StepOutputs], None] = lambda step: None
        self.reset()

    def reset(self) -> None:
        self.stats = SchedulerStats(0, 0, 0.0, 0, 0, 0, 0, 0.0)
        self.failure: PippinError | None = None
        self.script: Callable[[Request], Sequence[int]] = recite
        self.errors: dict[int, str] = {}
        """By step: what every running sequence fails with then."""
        self.tokens_per_step = 1
        self.pace_s = 0.0
        self.hold_at: int | None = None
        """The step before which everything holds."""
        self.held: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.requests: list[Request] = []
        self.aborted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.started: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.running: set[str] = set()
        self._aborts: set[str] = set()
        self._may_go = asyncio.Event()
        self._may_go.set()

    def hold(self) -> None:
        self._may_go.clear()

    def let_go(self) -> None:
        self._may_go.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._aborts.update(request_ids)
        for request_id in request_ids:
            self.aborted.put(request_id)

    async def generate(
        self, requests: Sequence[Request]
    ) -> AsyncGenerator[list[SequenceOutput], None]:
        if self.failure is not None:
            raise EngineUnavailable(str(self.failure))
        self.requests += requests
        left = {request.request_id: Recital(request, self.script(request)) for request in requests}
        assert not self.running & left.keys()
        self.running |= left.keys()
        for request_id in left:
            self.started.put(request_id)
        step = 0
        try:
            while left:
                if step == self.hold_at:
                    self.hold()
                    self.held.put(step)
                await self._may_go.wait()
                await asyncio.sleep(self.pace_s)
                outputs = [self._step(recital, step) for recital in left.values()]
                for output in outputs:
                    if output.finish_reason is not None:
                        del left[output.request_id]
                        self.running.discard(output.request_id)
                self._report(outputs)
                step += 1
                yield outputs
        finally:
            for request_id in left:
                self.running.discard(request_id)
                self.aborted.put(request_id)
            self._report([])

    def _step(self, recital: Recital, step: int) -> SequenceOutput:
        request_id = recital.request.request_id
        if step in self.errors:
            return SequenceOutput(
                request_id=request_id, finish_reason=FinishReason.ERROR, error=self.errors[step]
            )
        if request_id in self._aborts:
            return SequenceOutput(request_id=request_id, finish_reason=FinishReason.ABORT)
        return recital.step(self.tokens_per_step)

    def _report(self, outputs: list[SequenceOutput]) -> None:
        self.stats = SchedulerStats(
            len(self.running), 0, len(self.running) / 100, 0, 0, 0, len(outputs), 0.001
        )
        self.on_step(StepOutputs(outputs, self.stats))


def recite(request: Request) -> list[int]:
    """The fox, from a place that the seed and the choice give where there is randomness."""
    start = 0 if request.params.greedy else (request.seed + 7 * request.choice) % 40
    text = (RECITATION * 3)[start:]
    return [*ids(text), IM_END]


class Recital:
    """One sequence of the fake engine."""

    def __init__(self, request: Request, script: Sequence[int]) -> None:
        self.request = request
        self._script = script
        self._done = 0
        self._forced = [
            token for token, bias in (request.params.logit_bias or {}).items() if bias == 100
        ]

    def step(self, most: int) -> SequenceOutput:
        params = self.request.params
        first = self._done == 0
        tokens: list[int] = []
        reason: FinishReason | None = None
        stop_reason = None
        while reason is None and len(tokens) < most:
            token = (
                self._forced[0] if self._forced else self._script[self._done % len(self._script)]
            )
            tokens.append(token)
            self._done += 1
            if self._done > params.min_tokens:
                if token in self.request.eos_token_ids and not params.ignore_eos:
                    reason = FinishReason.STOP
                elif token in params.stop_token_ids:
                    reason, stop_reason = FinishReason.STOP, token
            if reason is None and self._done >= self.request.max_tokens:
                reason = FinishReason.LENGTH
        prompt = self.request.prompt_token_ids
        asked = params.prompt_logprobs
        return SequenceOutput(
            request_id=self.request.request_id,
            token_ids=tokens,
            logprobs=None
            if params.logprobs is None
            else [logprobs(token, params.logprobs) for token in tokens],
            prompt_logprobs=[None, *(logprobs(token, asked) for token in prompt[1:])]
            if asked is not None and first
            else None,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=len(prompt) // 2 if first else 0,
            queue_seconds=0.001 if first else 0.0,
        )


def logprobs(token: int, top: int) -> Logprobs:
    """The token itself is the most likely one; the last alternative is masked."""
    others = [token, *((token + k) % VOCAB for k in range(1, top))][:top]
    values = [-0.5 * (k + 1) for k in range(top)]
    if top > 1:
        values[-1] = float("-inf")
    return Logprobs([token, *others], [-0.5, *values], 1)


class LiveServer:
    """The real application on a real socket, in a thread with its own loop."""

    def __init__(
        self,
        config: Config,
        engine: FakeEngine,
        tokenizer: Tokenizer,
        clock: Clock | None = None,
    ) -> None:
        self.engine = engine
        self.app: App = build_app(config, engine, tokenizer, clock)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.base = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.server = uvicorn.Server(
            uvicorn.Config(self.app, log_level="error", timeout_graceful_shutdown=1)
        )
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._up.wait(10)
        self.client = httpx.Client(base_url=self.base, timeout=20)

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            self.loop.call_soon(self._up.set)
            await self.server.serve(sockets=[self._socket])

        asyncio.run(serve())

    def call(self, function: Callable[[], Any]) -> None:
        """Run something in the server's loop, and wait for it."""
        done = threading.Event()

        def run() -> None:
            function()
            done.set()

        self.loop.call_soon_threadsafe(run)
        assert done.wait(10)

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self._thread.join()

    # -- requests

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.client.post(path, json=body, **kwargs)

    def chat(self, text: str = "hi", **body: Any) -> httpx.Response:
        return self.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]} | body
        )

    def complete(self, prompt: Any = "hi", **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt} | body)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The decoded events of a stream that must end with [DONE], which is left out."""
        answer = self.post(path, body | {"stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        blocks = answer.text.split("\n\n")
        assert blocks.pop() == ""
        assert blocks.pop() == "data: [DONE]"
        return [msgspec.json.decode(block.removeprefix("data: ")) for block in blocks]
