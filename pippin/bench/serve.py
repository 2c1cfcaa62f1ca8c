"""``pippin bench serve``: a load against a running endpoint, ours or another's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from pippin.bench import http, load
from pippin.bench.dataset import WORDS, Prompt
from pippin.bench.metrics import METRICS, Record, summarise
from pippin.errors import ConfigError, EngineUnavailable

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Settings:
    target: http.Target
    model: str
    endpoint: str = COMPLETIONS
    traffic: load.Traffic = field(default_factory=load.Traffic)
    ignore_eos: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields added to every request's body."""
    timeout: float = 3600.0
    """Seconds for one request."""
    num_warmups: int = 1
    """Requests before the measured ones, one after the other, with a prompt of their own."""
    metrics: Sequence[str] = METRICS
    percentiles: Sequence[float] = (50.0, 99.0)
    goodput: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    detailed: bool = False
    """Keep every request's lengths, times, text and error in the result."""

    def body(self, prompt: Prompt) -> bytes:
        """JSON of one request."""
        said: dict[str, Any] = (
            {"messages": [{"role": "user", "content": prompt.text}]}
            if self.endpoint.endswith("/chat/completions")
            else {"prompt": prompt.text}
        )
        said |= {
            "model": self.model,
            "max_tokens": prompt.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            said["ignore_eos"] = True
        return msgspec.json.encode(said | dict(self.sampling))


async def find_model(target: http.Target, wanted: str | None) -> str:
    """The name to ask for: ``wanted``, else the first that the endpoint serves.

    Raises ``EngineUnavailable`` if nothing answers, ``ConfigError`` if the answer names no model.
    """
    if wanted:
        return wanted
    answer = await http.get_json(target, "/v1/models", timeout=30.0)
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{target.url}/v1/models names no model", hint="name it with --model"
        ) from error


async def run(
    settings: Settings,
    prompts: Sequence[Prompt],
    *,
    on_done: Callable[[Record], None] = lambda record: None,
) -> dict[str, Any]:
    """Run the load; returns the result file's content.

    Raises ``EngineUnavailable`` if the first, unmeasured request fails: nothing would work then.
    """

    async def send(prompt: Prompt) -> Record:
        return await http.stream(
            settings.target,
            settings.endpoint,
            settings.body(prompt),
            prompt_len=prompt.prompt_len,
            timeout=settings.timeout,
            keep_text=settings.detailed,
        )

    warm = Prompt(" ".join(WORDS[-8:]), 8, min(8, prompts[0].output_len))
    for _ in range(settings.num_warmups):
        record = await send(warm)
        if record.error is not None:
            raise EngineUnavailable(
                f"the test request failed: {record.error}",
                hint=f"does {settings.target.url} have {settings.endpoint}, and {settings.model}?",
            )
    arrivals = load.arrival_times(settings.traffic, len(prompts), settings.seed)
    done = await load.run(
        prompts,
        arrivals,
        send,
        max_concurrency=settings.traffic.max_concurrency,
        on_done=on_done,
    )
    result = _settings_fields(settings, len(prompts))
    result |= summarise(
        done.records,
        done.duration,
        metrics=settings.metrics,
        percentiles=settings.percentiles,
        goodput=settings.goodput,
    )
    result["client_cpu_share"] = done.client_cpu_share
    result["errors"] = sorted({r.error for r in done.records if r.error is not None})[:10]
    if settings.detailed:
        result |= _details(done.records)
    return result


def _settings_fields(settings: Settings, num_prompts: int) -> dict[str, Any]:
    traffic = settings.traffic
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat"
        if settings.endpoint.endswith("chat/completions")
        else "openai",
        "base_url": settings.target.url,
        "endpoint": settings.endpoint,
        "model_id": settings.model,
        "num_prompts": num_prompts,
        "request_rate": traffic.request_rate if math.isfinite(traffic.request_rate) else "inf",
        "burstiness": traffic.burstiness,
        "max_concurrency": traffic.max_concurrency,
        **{
            key: value
            for key, value in dataclasses.asdict(traffic).items()
            if key.startswith("ramp_up") and value is not None
        },
    }


def _details(records: Sequence[Record]) -> dict[str, Any]:
    return {
        "input_lens": [record.input_tokens for record in records],
        "output_lens": [record.output_tokens if record.ok else 0 for record in records],
        "start_times": [record.start for record in records],
        "ttfts": [record.ttft if record.ok else 0.0 for record in records],
        "itls": [record.itls for record in records],
        "generated_texts": [record.text for record in records],
        "request_errors": [record.error or "" for record in records],
    }
