"""``LLM``: generation in this process, without a server. Names are those of vLLM's ``LLM``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from pippin import options
from pippin.clock import SystemClock
from pippin.config import Config, environment
from pippin.engine import core
from pippin.engine.remote import RemoteEngine
from pippin.errors import ConfigError, ContextLengthExceeded, EngineError, InvalidRequest
from pippin.models import files
from pippin.server.detokenizer import Detokenizer
from pippin.server.tokenizer import Tokenizer, load_tokenizer
from pippin.types.request import FinishReason, Logprobs, Request, SamplingParams, SequenceOutput

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int
    """1 is the most likely token."""
    decoded_token: str


TokenLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """Of the generated tokens; None unless ``logprobs`` was asked for."""
    logprobs: list[TokenLogprobs] | None = None
    """For each generated token: itself and the most likely ones."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; None at end of sequence or length."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """For each prompt token but the first (None): itself and the most likely ones."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache (of the choice that found most)."""

    @property
    def finished(self) -> bool:
        return all(output.finished() for output in self.outputs)


class LLM:
    """A model loaded into this process.

    ``options``: any flag of ``pippin serve`` that concerns the engine, with underscores:
    ``dtype``, ``max_model_len``, ``gpu_memory_utilization``, ``quantization``, ``seed``, …
    Raises ``ConfigError`` for an unknown or unsupported one, ``ModelError`` or ``OutOfMemory`` if
    the model cannot be loaded. Free it with ``close`` or use it as a context manager.
    """

    def __init__(self, model: str = "demo", **engine_options: Any) -> None:
        config = _config(model, engine_options)
        home = environment()
        found = files.resolve(
            config.model.model,
            revision=config.model.revision,
            offline=home.hub_offline,
            home=home.home,
        )
        self._tokenizer = load_tokenizer(
            found, config.model.tokenizer, chat_template=config.model.chat_template
        )
        self._engine: core.EngineCore | RemoteEngine | None = _engine(config)
        self._counter = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt, all in one batch; results in the order of the prompts.

        A prompt is text, a list of token ids, ``{"prompt": text}`` or
        ``{"prompt_token_ids": ids}``.
        ``sampling_params``: one for all, one for each, or None for the model's own defaults.
        Raises ``InvalidRequest`` or ``ContextLengthExceeded`` before anything is generated.
        """
        given = _as_list(prompts)
        params = self._params_for(len(given), sampling_params)
        priorities = [0] * len(given) if priority is None else list(priority)
        if len(priorities) != len(given):
            raise InvalidRequest(
                f"{len(given)} prompts but {len(priorities)} priorities.", param="priority"
            )
        jobs = [
            self._job(prompt, chosen, level)
            for prompt, chosen, level in zip(given, params, priorities, strict=True)
        ]
        self._run(jobs, use_tqdm)
        return [job.result for job in jobs]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, with the model's template."""
        if not messages:
            raise InvalidRequest("messages must not be empty.", param="messages")
        several = not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts = [
            self._tokenizer.apply_chat_template(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(
            [{"prompt_token_ids": ids} for ids in prompts], sampling_params, use_tqdm=use_tqdm
        )

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own settings (its ``generation_config.json``) over the general defaults."""
        return SamplingParams(**self._tokenizer.default_sampling)

    def close(self) -> None:
        """Free the model's memory. Safe to repeat."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _live(self) -> core.EngineCore | RemoteEngine:
        if self._engine is None:
            raise EngineError("this LLM is closed")
        return self._engine

    def _params_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise InvalidRequest(
                f"{count} prompts but {len(given)} sampling parameters.", param="sampling_params"
            )
        return list(given)

    def _job(self, prompt: Prompt, params: SamplingParams, priority: int) -> _Job:
        ready = self._live().ready
        text, ids = self._tokens(prompt)
        params.check_vocabulary(ready.vocab_size)
        room = ready.max_model_len - len(ids)
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {len(ids)} tokens; with one more it exceeds the context length of"
                f" {ready.max_model_len}."
            )
        wanted = room if params.max_tokens is None else min(params.max_tokens, room)
        if wanted < 1:
            raise InvalidRequest("max_tokens must be at least 1.", param="max_tokens")
        if any(not 0 <= token < ready.vocab_size for token in ids):
            raise InvalidRequest(
                f"the prompt holds a token id outside [0, {ready.vocab_size}).", param="prompt"
            )
        name = f"offline-{self._counter}"
        self._counter += 1
        seed = secrets.randbits(62) if params.seed is None else params.seed
        requests = [
            Request(
                request_id=f"{name}-{choice}",
                prompt_token_ids=ids,
                params=params,
                seed=seed,
                choice=choice,
                max_tokens=wanted,
                eos_token_ids=self._tokenizer.eos_token_ids,
                bad_words_token_ids=self._tokenizer.bad_words_token_ids(params.bad_words),
                priority=priority,
                arrival_time=time.time(),
            )
            for choice in range(params.n)
        ]
        outputs = [CompletionOutput(index=choice) for choice in range(params.n)]
        detokenizers = [Detokenizer(self._tokenizer, params, ids) for _ in outputs]
        return _Job(requests, detokenizers, RequestOutput(name, text, ids, outputs))

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise InvalidRequest(
                    "a prompt is {'prompt': text} or {'prompt_token_ids': ids}, got the keys"
                    f" {sorted(prompt)}.",
                    param="prompt",
                )
            text = prompt.get("prompt")
            ids = prompt.get("prompt_token_ids")
        else:
            text = prompt if isinstance(prompt, str) else None
            ids = None if isinstance(prompt, str) else prompt
        ids = self._tokenizer.encode(text or "") if ids is None else list(ids)
        if not ids:
            raise InvalidRequest("the prompt is empty.", param="prompt")
        if not all(isinstance(token, int) for token in ids):
            raise InvalidRequest("token ids must be integers.", param="prompt")
        return text, ids

    def _run(self, jobs: Sequence[_Job], use_tqdm: bool) -> None:
        engine = self._live()
        pending = {
            request.request_id: (job, request.choice) for job in jobs for request in job.requests
        }
        bar = _bar(len(pending)) if use_tqdm else None
        try:
            for job in jobs:
                for request in job.requests:
                    engine.add(request)
            while pending:
                for output in engine.step():
                    found = pending.get(output.request_id)
                    if found is None:  # already ended by a stop string
                        continue
                    job, choice = found
                    if self._take(job, choice, output):
                        del pending[output.request_id]
                        if output.finish_reason is None:
                            engine.abort(output.request_id)
                        if bar is not None:
                            bar.update()
        finally:
            for request_id in pending:
                engine.abort(request_id)
            if bar is not None:
                bar.close()

    def _take(self, job: _Job, choice: int, output: SequenceOutput) -> bool:
        """Put one step's tokens into the result; returns whether the choice has ended."""
        if output.finish_reason is FinishReason.ERROR:
            raise EngineError(output.error or "the engine ended a sequence with an error")
        result, target = job.result, job.result.outputs[choice]
        result.num_cached_tokens = max(result.num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs is not None and result.prompt_logprobs is None:
            result.prompt_logprobs = [self._logprobs(entry) for entry in output.prompt_logprobs]
        finished = output.finish_reason is not None
        ended_by_token = output.finish_reason is FinishReason.STOP
        step = job.detokenizers[choice].push(output.token_ids, finished, ended_by_token)
        kept = step.num_tokens_kept
        target.text += step.text
        target.token_ids += output.token_ids[:kept]
        if output.logprobs is not None:
            entries = output.logprobs[:kept]
            target.logprobs = (target.logprobs or []) + [
                found for entry in entries if (found := self._logprobs(entry)) is not None
            ]
            total = target.cumulative_logprob or 0.0
            target.cumulative_logprob = total + sum(entry.logprobs[0] for entry in entries)
        if step.stop is not None:
            target.finish_reason, target.stop_reason = FinishReason.STOP.value, step.stop
        elif output.finish_reason is not None:
            target.finish_reason = output.finish_reason.value
            target.stop_reason = output.stop_reason
        return target.finished()

    def _logprobs(self, entry: Logprobs | None) -> TokenLogprobs | None:
        if entry is None:
            return None
        ranks = [entry.rank, *range(1, len(entry.token_ids))]
        return {
            token: Logprob(value, rank, self._tokenizer.token_text(token))
            for token, value, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True)
        }


@dataclass(slots=True)
class _Job:
    """One prompt under way: a request and a detokeniser for each choice."""

    requests: list[Request]
    detokenizers: list[Detokenizer]
    result: RequestOutput


def _config(model: str, given: Mapping[str, Any]) -> Config:
    for name in given:
        option = options.BY_NAME.get(name)
        if option is not None and option.group == "Server" and name != "log_level":
            raise ConfigError(f"{name} belongs to a server; LLM runs in this process")
    return options.make_config({"model": model, **given})


def _engine(config: Config) -> core.EngineCore | RemoteEngine:
    if config.parallel.distributed_executor_backend == "ray":
        from pippin.cluster.ray_launcher import RayEngine

        return RemoteEngine(RayEngine(config))
    return core.load(config, SystemClock())


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]
    return listed


def _bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="Generating", unit="seq")


__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput"]
