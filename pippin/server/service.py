"""From a parsed request to running sequences: names, tokens, lengths, places in the queue."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from pippin import __version__
from pippin.clock import Clock
from pippin.config import Config
from pippin.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    UnknownModel,
)
from pippin.server.admission import Admission, Ticket
from pippin.server.generation import Choice, Engine, Generation
from pippin.server.logprobs import TokenNames
from pippin.server.metrics import Metrics, SequenceTimes
from pippin.server.openai import ChatPrompt, CompletionPrompts, Parsed
from pippin.server.render import ChoiceRenderer, Head
from pippin.server.tokenizer import Tokenizer
from pippin.types.message import Ready
from pippin.types.request import Request

#: Texts longer than this (in characters) are tokenised in a thread: under a millisecond before.
THREAD_CHARACTERS = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answering:
    """A request that is ready to run, and how its answer is to be written."""

    head: Head
    generation: Generation
    renderers: list[ChoiceRenderer]


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: list[int]
    echo: str


class Service:
    """What the routes share. Belongs to one event loop."""

    def __init__(self, config: Config, engine: Engine, tokenizer: Tokenizer, clock: Clock) -> None:
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.clock = clock
        self.names = config.model.served_model_name or (config.model.model,)
        self.created = int(clock.time())
        self.admission = Admission(
            config.scheduler.max_num_seqs, config.scheduler.max_num_queued_reqs, clock
        )
        self.token_names = TokenNames(tokenizer)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="tokenise")
        self._serial = itertools.count()

    # What the engine says of itself is known when its client has started, which may be after this.

    @property
    def ready(self) -> Ready:
        return self.engine.ready

    @cached_property
    def metrics(self) -> Metrics:
        return Metrics(
            self.ready,
            self.names[0],
            lambda: self.engine.stats,
            lambda: self.admission.rejections,
        )

    @cached_property
    def fingerprint(self) -> str:
        ready = self.ready
        return _fingerprint(ready.model_name, ready.dtype, ready.quantization, ready.backend)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def drain(self) -> None:
        """From now on new requests are answered 503; running ones go on."""
        self.admission.draining = True

    def check_open(self) -> None:
        """Raise ``EngineUnavailable`` if nothing can be generated."""
        if self.admission.draining:
            raise EngineUnavailable("The server is shutting down.")
        if self.engine.failure is not None:
            raise EngineUnavailable(f"The engine has failed: {self.engine.failure}")

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises ``UnknownModel``; no name at all means the only model."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise UnknownModel(
                f"The model '{asked[:200]}' does not exist; this server has"
                f" {', '.join(self.names)}.",
                param="model",
            )
        return asked

    async def prepare(
        self, parsed: Parsed, ticket: Ticket, arrival: float, request_id: str | None
    ) -> Answering:
        """Tokenise, check lengths, make the engine's requests.

        Raises ``InvalidRequest`` and ``ContextLengthExceeded``.
        """
        model = self.model_name(parsed.model)
        if parsed.priority and self.config.scheduler.policy != "priority":
            raise InvalidRequest(
                "priority needs a server started with --scheduling-policy priority.",
                param="priority",
            )
        parsed.params.check_vocabulary(self.ready.vocab_size)
        prompts = [self._truncated(prompt, parsed) for prompt in await self._prompts(parsed)]
        prefix = "chatcmpl-" if parsed.kind == "chat" else "cmpl-"
        answer_id = prefix + (parsed.request_id or request_id or uuid.uuid4().hex)
        head = Head(parsed.kind, answer_id, int(arrival), model, self.fingerprint)
        timeout = self.config.server.request_timeout
        deadline = None if timeout is None else arrival + timeout
        requests = self._requests(parsed, prompts, answer_id, arrival, deadline)
        started = time.monotonic()
        for _ in prompts:
            self.metrics.request_n.observe(parsed.params.n)
        choices = []
        for index, request in enumerate(requests):
            times = SequenceTimes(self.metrics, started, len(request.prompt_token_ids))
            self.metrics.request_max_tokens.observe(request.max_tokens)
            choices.append(
                Choice(index, request, self.tokenizer, times, drop=parsed.shape.prompt_only)
            )
        echoes = [prompt.echo for prompt in prompts for _ in range(parsed.params.n)]
        return Answering(
            head,
            Generation(self.engine, self.clock, ticket, choices, deadline),
            [
                ChoiceRenderer(head, parsed.shape, choice, echo, self.token_names)
                for choice, echo in zip(choices, echoes, strict=True)
            ],
        )

    def _requests(
        self,
        parsed: Parsed,
        prompts: Sequence[_Prompt],
        answer_id: str,
        arrival: float,
        deadline: float | None,
    ) -> list[Request]:
        params = parsed.params
        seed = secrets.randbits(63) if params.seed is None else params.seed
        bad_words = self.tokenizer.bad_words_token_ids(params.bad_words)
        requests = []
        for prompt in prompts:
            max_tokens = self._max_tokens(len(prompt.token_ids), parsed)
            requests += [
                Request(
                    request_id=f"{answer_id}.{next(self._serial)}",
                    prompt_token_ids=prompt.token_ids,
                    params=params,
                    seed=seed,
                    choice=choice,
                    max_tokens=max_tokens,
                    eos_token_ids=self.tokenizer.eos_token_ids,
                    bad_words_token_ids=bad_words,
                    priority=parsed.priority,
                    arrival_time=arrival,
                    deadline=deadline,
                    cache_salt=parsed.cache_salt,
                )
                for choice in range(params.n)
            ]
        return requests

    def _max_tokens(self, prompt_tokens: int, parsed: Parsed) -> int:
        longest = self.ready.max_model_len
        asked = parsed.params.max_tokens
        left = longest - prompt_tokens
        if left < 1:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {longest} tokens, and the prompt has"
                f" {prompt_tokens}: there is no room for an answer. Please shorten the prompt.",
                param="messages" if parsed.kind == "chat" else "prompt",
            )
        if asked is None:
            return left
        if asked > left and parsed.limit_given:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {longest} tokens, but"
                f" {prompt_tokens + asked} were requested: {prompt_tokens} in the prompt and"
                f" max_tokens={asked} for the answer. Please shorten the prompt or ask for at most"
                f" {left}.",
                param="max_tokens",
            )
        return min(asked, left)

    def _truncated(self, prompt: _Prompt, parsed: Parsed) -> _Prompt:
        keep = parsed.truncate
        if keep is None:
            return prompt
        longest = self.ready.max_model_len
        if keep > longest:
            raise InvalidRequest(
                f"truncate_prompt_tokens ({keep}) is more than the maximum context length of"
                f" {longest} tokens.",
                param="truncate_prompt_tokens",
            )
        if keep == -1:
            keep = max(longest - (parsed.params.max_tokens or 1), 1)
        if len(prompt.token_ids) <= keep:
            return prompt
        ids = prompt.token_ids[-keep:]
        return _Prompt(ids, self.tokenizer.decode_whole(ids) if prompt.echo else "")

    async def _prompts(self, parsed: Parsed) -> list[_Prompt]:
        if isinstance(parsed.prompt, ChatPrompt):
            ids = await self.chat_token_ids(parsed.prompt)
            return [_checked(ids, parsed.prompt.echo if parsed.shape.echo else "", "messages")]
        return [await self._prompt(item, parsed) for item in parsed.prompt.prompts]

    async def _prompt(self, item: str | list[int], parsed: Parsed) -> _Prompt:
        assert isinstance(parsed.prompt, CompletionPrompts)
        echo = ""
        if isinstance(item, str):
            ids = await self.encode(item, parsed.prompt.add_special_tokens)
            echo = item
        else:
            ids = item
            if len(ids) <= self.ready.max_model_len or parsed.truncate is not None:
                self.check_token_ids(ids, "prompt")
                if parsed.shape.echo:
                    echo = self.tokenizer.decode_whole(
                        ids, skip_special_tokens=parsed.params.skip_special_tokens
                    )
        return _checked(ids, echo if parsed.shape.echo else "", "prompt")

    def check_token_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise ``InvalidRequest`` for an id outside the vocabulary."""
        if ids and not (min(ids) >= 0 and max(ids) < self.ready.vocab_size):
            bad = next(token for token in ids if not 0 <= token < self.ready.vocab_size)
            raise InvalidRequest(
                f"{param} holds token id {bad}, outside the vocabulary of"
                f" {self.ready.vocab_size} tokens.",
                param=param,
            )

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        def encode() -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await self.run(encode, len(text))

    async def decode(self, ids: Sequence[int]) -> str:
        def decode() -> str:
            return self.tokenizer.decode(ids, skip_special_tokens=False)

        return await self.run(decode, len(ids))

    async def chat_token_ids(self, prompt: ChatPrompt) -> list[int]:
        """Template and tokens. Raises ``InvalidRequest`` if the template refuses the messages."""

        def apply() -> list[int]:
            return self.tokenizer.apply_chat_template(
                prompt.messages,
                tools=prompt.tools,
                documents=prompt.documents,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                chat_template=prompt.chat_template,
                template_kwargs=prompt.template_kwargs,
            )

        return await self.run(apply, prompt.num_characters)

    async def run(self, work: Callable[[], T], characters: int) -> T:
        """Do ``work`` here, or in a thread if it is much: ``characters`` of text, about."""
        if characters <= THREAD_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _checked(ids: list[int], echo: str, param: str) -> _Prompt:
    if not ids:
        raise InvalidRequest("The prompt is empty: it has no tokens.", param=param)
    return _Prompt(ids, echo)


def _fingerprint(*facts: Any) -> str:
    """Changes with whatever may change the answer to a seeded request."""
    text = "/".join((__version__, *map(str, facts)))
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]
