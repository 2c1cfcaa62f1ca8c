"""Brings an engine up: the model's files, the stages and their processes, the KV cache's size."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from pippin.clock import Clock, SystemClock
from pippin.config import Config, environment
from pippin.engine.backend import choose_backend, load_runner
from pippin.engine.blocks import KVCacheManager
from pippin.engine.budget import MAX_TOKENS, StepBudget
from pippin.engine.calibrate import calibrate
from pippin.engine.core import EngineCore, Stages
from pippin.engine.depth import PipelineShape
from pippin.engine.followers import Followers
from pippin.engine.pipeline import (
    SWITCH_INTERVAL_S,
    Pipeline,
    Wake,
    announcement,
    facts,
    greet,
)
from pippin.engine.ranks import Elsewhere, Others, Ranks
from pippin.engine.scheduler import Scheduler
from pippin.engine.sizing import KVSize, size_stages
from pippin.engine.spec import Allocate, EngineSpec, StageFacts, StageSpec
from pippin.engine.split import given_counts, head_layers, layer_counts, ranges
from pippin.errors import ConfigError, LinkError, OutOfMemory, StageMismatch
from pippin.models.checkpoint import open_checkpoint
from pippin.models.files import ModelFiles, resolve
from pippin.transport.link import Link
from pippin.types.message import Ready, StageInfo
from pippin.types.model import ModelInfo

logger = logging.getLogger(__name__)


def start(asked: EngineSpec, clock: Clock | None = None) -> EngineCore:
    """See ``core.load``."""
    clock = clock or SystemClock()
    config, rank = asked.config, asked.rank
    started = clock.monotonic()
    environ = environment()
    files = resolve(
        config.model.model,
        revision=config.model.revision,
        offline=environ.hub_offline,
        home=environ.home,
    )
    parallel = config.parallel
    if rank is None:
        backend, why = choose_backend(config)
    else:
        backend, why = rank.backend, f"the resource it was placed on, {rank.node}"
    if parallel.pipeline_parallel_size * parallel.tensor_parallel_size == 1:
        if parallel.pipeline_split is not None:
            given_counts(parallel.pipeline_split, *_layers_and_stages(files, config))
        stages = Stages(load_runner(backend, config, files))
        spec = rank or StageSpec(
            config=config,
            backend=backend,
            stage=0,
            num_stages=1,
            layers=(0, stages.runner.info.num_layers),
        )
    else:
        others: Others
        if rank is None:
            others = Ranks(config, backend, split_layers(config, files))
        else:
            others = Elsewhere(rank, asked.peers)
        stages, spec = _start_ranks(others, files), others.leader
    try:
        return assemble(config, stages, spec, f"{why}; {stages.runner.reason}", started, clock)
    except BaseException as error:
        stages.close("the leader could not start")
        if isinstance(error, LinkError):
            raise stages.describe_loss(error) from error
        raise


def assemble(
    config: Config, stages: Stages, spec: StageSpec, reason: str, started: float, clock: Clock
) -> EngineCore:
    runner, info = stages.runner, stages.runner.info
    available = spec.config.cache.kv_cache_bytes or runner.available_kv_bytes(
        config.scheduler.max_num_batched_tokens or MAX_TOKENS, config.scheduler.max_num_seqs
    )
    own = stages.followers.gather(facts(spec, runner, available))
    everybody = [own] if stages.pipeline is None else stages.pipeline.gather(own)
    _check_layers([stage.layers for stage in everybody], info.num_layers)
    size, note = _size(config, info, everybody)
    sizes = Allocate(size.num_blocks, config.cache.block_size)
    if stages.pipeline is not None:
        stages.pipeline.allocate(sizes)
    stages.followers.allocate(sizes)
    runner.allocate_kv(size.num_blocks, config.cache.block_size)
    kv = KVCacheManager(
        info.kv_groups,
        size.num_blocks,
        config.cache.block_size,
        fingerprint=info.fingerprint,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        rope_switch=info.rope_switch,
    )
    splits = stages.count == 1 and runner.splits_layers and info.num_layers > 1
    budget = StepBudget(config.scheduler, config.cache.block_size, splits_layers=splits)
    calibrate(
        budget,
        lambda plan: stages.timed(plan, clock),
        num_blocks=size.num_blocks,
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
    )
    scheduler = Scheduler(
        config.scheduler, kv, budget, size.max_model_len, split_layers=info.num_layers * splits
    )
    scheduler.set_pipeline(PipelineShape(stages.count))
    ready = Ready(
        pid=os.getpid(),
        model_name=_served_name(config),
        architecture=info.architecture,
        num_layers=info.num_layers,
        vocab_size=info.vocab_size,
        max_model_len=size.max_model_len,
        max_model_len_note=note,
        num_blocks=size.num_blocks,
        block_size=config.cache.block_size,
        kv_tokens=size.kv_tokens,
        kv_bytes=size.kv_bytes,
        weights_bytes=sum(stage.weights_bytes for stage in everybody),
        dtype=info.dtype,
        quantization=info.quantization,
        backend=spec.backend,
        backend_reason=reason,
        device=runner.device,
        load_seconds=clock.monotonic() - started,
        stages=tuple(
            StageInfo(
                rank=stage.stage,
                node=stage.node,
                pid=stage.pid,
                layers=stage.layers,
                backend=stage.backend,
                device=stage.device,
                weights_bytes=stage.weights_bytes,
            )
            for stage in everybody
        ),
    )
    return EngineCore(stages, scheduler, ready, clock)


def _check_layers(held: Sequence[tuple[int, int]], num_layers: int) -> None:
    """Every layer exactly once. Raises ``StageMismatch``."""
    borders = [0, *(last for _, last in held)]
    if [first for first, _ in held] != borders[:-1] or borders[-1] != num_layers:
        raise StageMismatch(
            f"the stages hold layers {', '.join(f'[{a}, {b})' for a, b in held)} of {num_layers}",
            hint="each layer must be held by one stage: start all with the same --pipeline-split",
        )


def _start_ranks(ranks: Others, files: ModelFiles) -> Stages:
    """Start the other ranks' processes, load this one, and connect them all."""
    spec = ranks.leader
    keys = spec.keys
    affinity = os.sched_getaffinity(0) if spec.cpus else None
    switch_interval = sys.getswitchinterval()
    links: list[Link] = []

    def close_others() -> None:
        sys.setswitchinterval(switch_interval)
        ranks.stop()
        for link in links:
            link.close(0.0)
        if affinity is not None:
            os.sched_setaffinity(0, affinity)

    try:
        ranks.start()
        if spec.cpus:
            os.sched_setaffinity(0, spec.cpus)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        wake = Wake()
        if spec.inbox is not None:
            links.append(Link.bind(spec.inbox, keys, wake=wake.notify))
        if spec.next is not None:
            links.append(Link.connect(spec.next, keys, wake=wake.notify))
        followers = [Link.connect(address, keys) for address in spec.followers]
        links += followers
        runner = load_runner(spec.backend, spec.config, files, spec.layers, spec.group)
        mine = announcement(spec, runner, runner.info.dtype)
        greet(links, spec, mine, ranks.failure)
    except BaseException:
        close_others()
        raise
    pipeline = None
    if spec.num_stages > 1:
        pipeline = Pipeline(links[1], links[0], spec.num_stages, wake)
    return Stages(runner, pipeline, Followers(followers), ranks.explain, close_others)


def split_layers(config: Config, files: ModelFiles) -> tuple[tuple[int, int], ...]:
    """Layers of each stage. Raises ``ConfigError``."""
    num_layers, stages = _layers_and_stages(files, config)
    given = config.parallel.pipeline_split
    if given is not None:
        return ranges(given_counts(given, num_layers, stages))
    checkpoint = open_checkpoint(files)
    head = head_layers(
        checkpoint.config["hidden_size"],
        checkpoint.config["vocab_size"],
        checkpoint.num_parameters,
        num_layers,
    )
    return ranges(layer_counts(num_layers, stages, head))


def _layers_and_stages(files: ModelFiles, config: Config) -> tuple[int, int]:
    num_layers = int(open_checkpoint(files).config["num_hidden_layers"])
    return num_layers, config.parallel.pipeline_parallel_size


def _size(
    config: Config, info: ModelInfo, stages: Sequence[StageFacts]
) -> tuple[KVSize, str | None]:
    """Sizes of the KV cache, and a note where the context was shortened to fit."""
    asked = config.model.max_model_len
    if asked is not None and asked > info.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {asked} is longer than the model's own"
            f" {info.max_position_embeddings} tokens",
            hint=f"--max-model-len {info.max_position_embeddings}",
        )
    wanted = asked or info.max_position_embeddings
    size = size_stages(
        [(stage.available_kv_bytes, stage.kv_groups) for stage in stages],
        config.cache.block_size,
        wanted,
        config.scheduler.max_num_seqs,
        config.scheduler.max_num_batched_tokens or MAX_TOKENS,
    )
    if size.max_model_len == wanted:
        return size, None
    available = min(stage.available_kv_bytes for stage in stages)
    where = " of the stage with least" if len(stages) > 1 else ""
    if asked is not None:
        raise OutOfMemory(
            f"the KV cache of one request of {asked} tokens does not fit in"
            f" {available / 2**30:.2f} GiB{where}",
            hint=f"--max-model-len {size.max_model_len}, or more memory for the cache"
            " (--gpu-memory-utilization, --kv-cache-memory-bytes)",
        )
    note = (
        f"the model's own length of {wanted} tokens does not fit in the"
        f" {available / 2**30:.2f} GiB{where} left for the KV cache: shortened to"
        f" {size.max_model_len}"
    )
    logger.warning(note)
    return size, note


def _served_name(config: Config) -> str:
    names = config.model.served_model_name
    return names[0] if names else config.model.model
