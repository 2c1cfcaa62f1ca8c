"""``pippin bench serve`` and ``pippin bench latency``."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pippin.cli.flags import config_from, engine_options, with_arguments, with_options
from pippin.cli.output import Progress
from pippin.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from pippin.bench import serve as bench
    from pippin.bench.dataset import Prompt, Tokenizer

app = typer.Typer(help="Load tests of an endpoint and of the engine.", rich_markup_mode=None)


@dataclass(frozen=True, kw_only=True)
class ServeArguments:
    """Flags of ``vllm bench serve``."""

    base_url: Annotated[
        str | None, "Endpoint, such as http://host:8000; wins over the next two."
    ] = None
    host: Annotated[str, "Host of the endpoint."] = "127.0.0.1"
    port: Annotated[int, "Port of the endpoint."] = 8000
    endpoint: Annotated[str | None, "/v1/completions or /v1/chat/completions."] = None
    backend: Annotated[
        Literal["openai", "vllm", "openai-chat"], "openai-chat asks /v1/chat/completions."
    ] = "openai"
    api_key: Annotated[str | None, "Key to send."] = None
    model: Annotated[str | None, "Name to ask for; default: the first that is served."] = None
    served_model_name: Annotated[
        str | None, "Name to ask for, where --model says whose tokenizer to use."
    ] = None
    tokenizer: Annotated[
        str | None,
        "Makes prompts of exact length: directory, GGUF file, hub id or demo; default: that of"
        " --model if it is on this machine, else none (a word counts as a token).",
    ] = None
    dataset_name: Annotated[
        Literal["random", "sharegpt"], "random: fixed lengths; sharegpt: lengths of chat traffic."
    ] = "random"
    dataset_path: Annotated[Path | None, "A JSON file in ShareGPT's format."] = None
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 100
    random_input_len: Annotated[int, typer.Option(min=1, help="Tokens a prompt.")] = 128
    random_output_len: Annotated[int, typer.Option(min=1, help="Tokens an answer.")] = 128
    random_range_ratio: Annotated[float, "Lengths vary by this share, 0 to 1."] = 0.0
    random_prefix_len: Annotated[
        int, typer.Option(min=0, help="Tokens that all prompts begin with.")
    ] = 0
    sharegpt_output_len: Annotated[
        int | None, typer.Option(min=1, help="Fixed length of answers.")
    ] = None
    request_rate: Annotated[float, "Requests a second; inf sends all at once."] = math.inf
    burstiness: Annotated[float, "1 gives Poisson arrivals, less is burstier."] = 1.0
    max_concurrency: Annotated[int | None, "Most requests in flight."] = None
    ramp_up_strategy: Annotated[Literal["linear", "exponential"] | None, "How the rate grows."] = (
        None
    )
    ramp_up_start_rps: Annotated[float | None, "Rate at the start."] = None
    ramp_up_end_rps: Annotated[float | None, "Rate at the end."] = None
    ignore_eos: Annotated[bool, "Generate all tokens asked for."] = False
    temperature: Annotated[float, "0 is greedy."] = 0.0
    top_p: Annotated[float | None, "Default: the server's."] = None
    top_k: Annotated[int | None, "Default: the server's."] = None
    min_p: Annotated[float | None, "Default: the server's."] = None
    extra_body: Annotated[str | None, "JSON object added to every request."] = None
    num_warmups: Annotated[int, typer.Option(min=0, help="Unmeasured requests before.")] = 1
    timeout: Annotated[float, "Seconds for one request."] = 3600.0
    percentile_metrics: Annotated[str, "Which of ttft,tpot,itl,e2el to report."] = (
        "ttft,tpot,itl,e2el"
    )
    metric_percentiles: Annotated[str, "Percentiles to report."] = "50,99"
    goodput: Annotated[
        list[str] | None,
        "Limits in ms that a good request keeps, such as ttft:500 tpot:50; of ttft, tpot, e2el.",
    ] = None
    more_limits: Annotated[list[str] | None, typer.Argument(hidden=True)] = None
    save_result: Annotated[bool, "Write a JSON file."] = False
    append_result: Annotated[bool, "Append to the JSON file."] = False
    save_detailed: Annotated[bool, "Keep each request's times and text in it."] = False
    result_dir: Annotated[Path, "Folder of the file."] = Path()
    result_filename: Annotated[str | None, "Name of the file."] = None
    label: Annotated[str | None, "First part of the file's default name."] = None
    metadata: Annotated[list[str] | None, "KEY=VALUE put into the result (repeatable)."] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and arrivals.")] = 0
    disable_tqdm: Annotated[bool, "No progress line."] = False
    json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False


@app.command("serve")
@with_arguments(ServeArguments)
def serve(given: ServeArguments) -> None:
    """Send a load to a running endpoint; flags and fields as in `vllm bench serve`."""
    import asyncio

    from pippin.bench import report
    from pippin.bench import serve as bench

    settings = _settings(given)
    metadata = _pairs("--metadata", given.metadata or [], "=")
    name = asyncio.run(bench.find_model(settings.target, given.served_model_name or settings.model))
    settings = replace(settings, model=name)
    tokenizer = _tokenizer(given.tokenizer, given.model)
    prompts = _prompts(given, tokenizer)
    shown = not (given.disable_tqdm or given.json)
    with Progress("requests", len(prompts), shown=shown) as progress:
        result = asyncio.run(
            bench.run(settings, prompts, on_done=lambda record: progress.advance())
        )
    used = None if tokenizer is None else given.tokenizer or given.model
    result = {"backend": given.backend, "label": given.label, "tokenizer_id": used, **result}
    result |= metadata
    print(report.as_json(result) if given.json else report.as_text(result))
    for error in result["errors"]:
        print(f"failed: {error}", file=sys.stderr)
    if given.save_result or given.append_result:
        label = given.label or given.backend
        path = given.result_dir / (
            given.result_filename
            or report.default_filename(label, given.request_rate, given.max_concurrency, name)
        )
        report.save(result, path, append=given.append_result)
        print(f"saved to {path}", file=sys.stderr)
    if not result["completed"]:
        raise typer.Exit(1)


def _settings(given: ServeArguments) -> bench.Settings:
    from pippin.bench import http, load
    from pippin.bench import serve as bench

    sampling = {
        "temperature": given.temperature,
        "top_p": given.top_p,
        "top_k": given.top_k,
        "min_p": given.min_p,
    }
    default_endpoint = bench.CHAT if given.backend == "openai-chat" else bench.COMPLETIONS
    return bench.Settings(
        target=http.Target.parse(
            given.base_url or f"http://{given.host}:{given.port}", given.api_key
        ),
        model=given.model or "",
        endpoint=given.endpoint or default_endpoint,
        traffic=load.Traffic(
            request_rate=given.request_rate,
            burstiness=given.burstiness,
            ramp_up=given.ramp_up_strategy,
            ramp_up_start_rps=given.ramp_up_start_rps,
            ramp_up_end_rps=given.ramp_up_end_rps,
            max_concurrency=given.max_concurrency,
        ),
        ignore_eos=given.ignore_eos,
        sampling={k: v for k, v in sampling.items() if v is not None} | _object(given.extra_body),
        timeout=given.timeout,
        num_warmups=given.num_warmups,
        metrics=_metrics(given.percentile_metrics),
        percentiles=_percentiles(given.metric_percentiles),
        goodput=_limits([*(given.goodput or []), *(given.more_limits or [])]),
        seed=given.seed,
        detailed=given.save_detailed,
    )


def _prompts(given: ServeArguments, tokenizer: Tokenizer | None) -> list[Prompt]:
    from pippin.bench import dataset

    count, fixed = given.num_prompts, given.sharegpt_output_len
    if given.dataset_path is not None:
        return dataset.sharegpt_file(
            given.dataset_path, count, output_len=fixed, tokenizer=tokenizer, seed=given.seed
        )
    if given.dataset_name == "sharegpt":
        return dataset.sharegpt_like_prompts(
            count, output_len=fixed, tokenizer=tokenizer, seed=given.seed
        )
    return dataset.random_prompts(
        count,
        input_len=given.random_input_len,
        output_len=given.random_output_len,
        range_ratio=given.random_range_ratio,
        prefix_len=given.random_prefix_len,
        tokenizer=tokenizer,
        seed=given.seed,
    )


@app.command("latency")
@with_options(engine_options())
def latency(
    model: Annotated[str | None, typer.Option(help="Directory, GGUF file, hub id or demo.")] = None,
    input_len: Annotated[int, typer.Option(help="Tokens a prompt.")] = 32,
    output_len: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Sequences at once.")] = 8,
    num_iters: Annotated[int, typer.Option(help="Measured iterations.")] = 10,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Iterations before.")] = 2,
    output_json: Annotated[Path | None, typer.Option(help="File for the result.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    **flags: Any,
) -> None:
    """Time one batch in this process; flags and fields as in `vllm bench latency`."""
    from pippin import log
    from pippin.bench import latency as bench
    from pippin.bench import report

    batch = bench.Batch(
        input_len=input_len,
        output_len=output_len,
        batch_size=batch_size,
        num_iters=num_iters,
        num_iters_warmup=num_iters_warmup,
    )
    if flags.get("enable_prefix_caching") is None:
        flags["enable_prefix_caching"] = False
    config = config_from(model, flags, None)
    log.setup("bench", config.log_level)

    from pippin.clock import SystemClock
    from pippin.engine import core

    engine = core.load(config, SystemClock())
    try:
        if input_len + output_len > engine.ready.max_model_len:
            raise ConfigError(
                f"--input-len {input_len} and --output-len {output_len} exceed the context length"
                f" of {engine.ready.max_model_len} tokens"
            )
        total = num_iters_warmup + num_iters
        with Progress("iterations", total, shown=not json_output) as progress:
            result = bench.measure(
                engine,
                batch,
                vocab_size=engine.ready.vocab_size,
                on_iteration=lambda done: progress.advance(),
            )
    finally:
        engine.close()
    print(report.as_json(result) if json_output else bench.as_text(result))
    if output_json is not None:
        report.save(result, output_json)


def _tokenizer(tokenizer: str | None, model: str | None) -> Tokenizer | None:
    """Of ``--tokenizer`` (an error if there is none), else of ``--model`` if it is at hand."""
    if tokenizer is None and model is None:
        return None
    from pippin.config import environment
    from pippin.models import files
    from pippin.server.tokenizer import load_tokenizer

    surroundings = environment()
    try:
        found = files.resolve(
            tokenizer or model or "",
            offline=tokenizer is None or surroundings.hub_offline,
            home=surroundings.home,
        )
        return load_tokenizer(found)
    except ModelError:
        if tokenizer is not None:
            raise
        return None


def _pairs(flag: str, given: Sequence[str], separator: str) -> dict[str, str]:
    pairs = {}
    for text in given:
        key, found, value = text.partition(separator)
        if not found or not key:
            raise ConfigError(f"{flag} {text}: expected KEY{separator}VALUE")
        pairs[key] = value
    return pairs


def _limits(given: Sequence[str]) -> dict[str, float]:
    limits = {}
    words = [word for text in given for word in text.replace(",", " ").split()]
    for name, value in _pairs("--goodput", words, ":").items():
        if name not in ("ttft", "tpot", "e2el"):
            raise ConfigError(f"--goodput {name}: expected ttft, tpot or e2el")
        limits[name] = _number("--goodput", value)
        if limits[name] < 0:
            raise ConfigError(f"--goodput {name}:{value}: expected a limit of at least 0 ms")
    return limits


def _metrics(given: str) -> tuple[str, ...]:
    from pippin.bench.metrics import METRICS

    chosen = tuple(name.strip() for name in given.split(","))
    for name in chosen:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics {name}: expected some of {','.join(METRICS)}")
    return chosen


def _percentiles(given: str) -> tuple[float, ...]:
    chosen = tuple(_number("--metric-percentiles", part) for part in given.split(","))
    if any(not 0 <= value <= 100 for value in chosen):
        raise ConfigError(f"--metric-percentiles {given}: expected numbers from 0 to 100")
    return chosen


def _number(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: expected a number") from error


def _object(text: str | None) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError("--extra-body must be a JSON object")
    return value
