"""A stage on MLX: loads layers [a, b) of a model and runs step plans."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.switch_layers import SwitchLinear

from pippin.backends.base import GroupSpec, HiddenStates
from pippin.backends.description import read_config, rope_switch
from pippin.backends.mlx.batch import BatchBuilder
from pippin.backends.mlx.device import (
    DeviceChoice,
    MemoryLimits,
    choose_device,
    dtype_name,
    memory_errors,
    memory_limit,
    wired_advice,
)
from pippin.backends.mlx.group import Group, connect
from pippin.backends.mlx.model import SUPPORTED, StageModel, build
from pippin.backends.mlx.sampler import MlxSampler
from pippin.backends.mlx.weights import Weights
from pippin.backends.mlx.wire import from_wire, to_wire
from pippin.config import CacheConfig, Config
from pippin.errors import ConfigError, EngineError, OutOfMemory
from pippin.models.checkpoint import Checkpoint, open_checkpoint
from pippin.models.files import ModelFiles
from pippin.types.model import ModelInfo
from pippin.types.step import Chunk, StepPlan

logger = logging.getLogger(__name__)

#: On CPU, MLX is there for correctness: the pool ends at so many bytes, or at one request of full
#: length where that is more. (MLX fills what it allocates, so a large pool is really taken.)
_CPU_KV_BYTES = 512 << 20

#: Tokens of the step that is measured on CPU, where the largest one would take minutes.
_CPU_PROFILE_TOKENS = 16


class MlxRunner:
    """A ``backends.base.StageRunner``. Arrays belong to the thread that loaded it."""

    def __init__(
        self,
        model: StageModel,
        info: ModelInfo,
        choice: DeviceChoice,
        cache: CacheConfig,
        limits: MemoryLimits,
        reason: str,
        group: Group | None = None,
    ) -> None:
        self.info = info
        self.device = choice.description
        self.reason = reason
        self.splits_layers = False
        self.runs_ahead = model.head is not None and group is None
        self.sampler = MlxSampler(info.vocab_size)
        self._model = model
        self._choice = choice
        self._cache = cache
        self._limits = limits
        self._builder: BatchBuilder | None = None
        self._group = group
        self._running = False
        """Whether a step was handed to the device and not waited for."""
        self._thread = threading.get_ident()

    @property
    def gathered_bytes(self) -> int:
        """Bytes of KV pages copied for reading since the pools were made."""
        pools = [cache.pool for cache in self._model.caches]
        return sum(pool.gathered_bytes for pool in pools if pool is not None)

    def available_kv_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """See ``StageRunner``. On a GPU the largest steps are run once; on CPU a small one is, and
        the largest one's memory is computed from it. Raises ``OutOfMemory``."""
        tokens = max(1, min(max_num_batched_tokens, self.info.max_position_embeddings))
        peak = self._profile(tokens, max_num_seqs)
        free, total = memory_limit(self._choice)
        share = self._cache.gpu_memory_utilization
        if self._choice.on_gpu:
            available = int(free - (1 - share) * total) - peak
        else:
            available = int(free * share) - peak
            per_token = sum(group.bytes_per_token for group in self.info.kv_groups)
            longest = self.info.max_position_embeddings * per_token
            available = min(available, max(_CPU_KV_BYTES, longest))
        if available <= 0:
            advice = wired_advice(self.info.weights_bytes)
            raise OutOfMemory(
                f"nothing is left for the KV cache: {free / 2**30:.2f} GiB free,"
                f" {peak / 2**30:.2f} GiB needed by the largest step",
                hint="use a smaller or quantised model, lower --max-num-batched-tokens,"
                " or raise --gpu-memory-utilization" + (f"; {advice}" if advice else ""),
            )
        return available

    def allocate_kv(self, num_blocks: tuple[int, ...], block_size: int) -> None:
        groups = self.info.kv_groups
        wanted = sum(
            count * block_size * group.bytes_per_token
            for count, group in zip(num_blocks, groups, strict=True)
        )
        self._model.free_pools()
        free, _ = memory_limit(self._choice)
        what = f"the KV cache of {wanted / 2**30:.2f} GiB could not be allocated"
        hint = "lower --gpu-memory-utilization or --max-model-len"
        if wanted > free:
            # MLX's CPU build would crash.
            raise OutOfMemory(f"{what}: {free / 2**30:.2f} GiB are free", hint=hint)
        with memory_errors(what, hint):
            self._model.allocate(num_blocks, block_size)
        windows = [group.window for group in groups]
        self._builder = BatchBuilder(windows, block_size, num_blocks, self._model.pool_heads)

    def execute(
        self, plan: StepPlan, hidden: HiddenStates | None = None
    ) -> mx.array | HiddenStates | None:
        """See ``StageRunner``. The last stage returns before its step is done: what is evaluated of
        the logits waits for it. The next call prepares its step meanwhile, so a further plan may be
        executed before the tokens of this one are read. In a group steps are done on return.

        Raises ``PeerLost`` where another rank is gone."""
        assert self._builder is not None, "allocate_kv comes first"
        if threading.get_ident() != self._thread:
            raise EngineError("an MLX stage must be used from the thread that loaded it")
        if not plan.chunks:
            self._builder.forget(plan)
            return None
        given = None if hidden is None else from_wire(hidden, self._model.dtype)
        result = self._model.forward(self._builder.build(plan), given)
        # A pool that is still being read when a write to it is encoded would be copied whole, so
        # steps are prepared while the last one runs, but not handed to the device.
        self.synchronize()
        started = [*self._model.pools(), *([] if result is None else [result])]
        if self._group is not None:
            self._group.evaluate(started, plan.num_tokens)
            if self._group.rank > 0:
                return None
        if self._model.head is None and result is not None:
            mx.eval(started)
            return to_wire(result)
        if self._group is not None:
            return result
        mx.async_eval(started)  # type: ignore[no-untyped-call]
        self._running = True
        return result

    def synchronize(self) -> None:
        if self._running:
            mx.synchronize()
            self._running = False

    def close(self) -> None:
        """Free weights and pools, and put MLX's limits back."""
        self.synchronize()
        if self._group is not None:
            self._group.close()
        self._model.layers.clear()
        self._model.caches.clear()
        self._model.embedding = self._model.norm = self._model.head = None
        self._builder = None
        gc.collect()
        mx.clear_cache()
        self._limits.restore()

    def _profile(self, tokens: int, sequences: int) -> int:
        """Bytes that the largest step takes beyond weights and pools."""
        measured = tokens if self._choice.on_gpu else min(tokens, _CPU_PROFILE_TOKENS)
        block_size = self._cache.block_size
        sequences = max(1, sequences if self._choice.on_gpu else min(sequences, measured))
        blocks = -(-max(measured, sequences * block_size) // block_size)
        groups = len(self.info.kv_groups)
        self.allocate_kv((blocks,) * groups, block_size)
        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        with memory_errors(
            f"a step of {measured} tokens does not fit beside the weights",
            hint="lower --max-num-batched-tokens, or use a smaller or quantised model",
        ):
            for plan in _largest_steps(measured, sequences, block_size, groups):
                self._run_blank(plan)
                self.synchronize()
        peak = mx.get_peak_memory() - before
        self.allocate_kv((1,) * groups, block_size)
        mx.clear_cache()
        if measured == tokens:
            return peak
        # Attention without a fused kernel holds three matrices of tokens x tokens a head.
        scores = 3 * 4 * self._model.num_heads * tokens * tokens
        return peak * tokens // measured + scores

    def _run_blank(self, plan: StepPlan) -> None:
        """Run a plan without a stage before this one."""
        hidden = None
        if self._model.embedding is None:
            shape = (plan.num_tokens, self.info.hidden_size)
            hidden = to_wire(mx.zeros(shape, dtype=self._model.dtype))
        self.execute(plan, hidden)


def load(
    config: Config,
    files: ModelFiles,
    *,
    first_layer: int = 0,
    last_layer: int | None = None,
    group: GroupSpec | None = None,
) -> MlxRunner:
    """Load layers [first_layer, last_layer) of a model, or the part of one rank of ``group``.

    Raises ``UnsupportedModel``, ``ModelInvalid``, ``ConfigError``, ``OutOfMemory`` or ``PeerLost``.
    """
    return load_checkpoint(
        config,
        open_checkpoint(files),
        name=files.name,
        fingerprint=files.fingerprint,
        first_layer=first_layer,
        last_layer=last_layer,
        group=group,
    )


def load_checkpoint(
    config: Config,
    checkpoint: Checkpoint,
    *,
    name: str,
    fingerprint: str,
    first_layer: int = 0,
    last_layer: int | None = None,
    group: GroupSpec | None = None,
) -> MlxRunner:
    """As ``load``, from an open checkpoint."""
    model_config = read_config(checkpoint.config, SUPPORTED)
    choice = choose_device(config, checkpoint.config, checkpoint.quantization)
    bits = _bits(config.model.quantization)
    weights = Weights(
        checkpoint,
        choice.dtype,
        dequantize=config.model.quantization == "none",
        bits=bits,
    )
    last = model_config.num_hidden_layers if last_layer is None else last_layer
    met = None if group is None else connect(group)
    limits = MemoryLimits.take(choice)
    try:
        with memory_errors(
            f"the weights do not fit on {choice.description}",
            hint="use a smaller or quantised model, or more machines",
        ):
            model = build(model_config, weights, first_layer, last, met)
        _check_experts(model, choice)
    except BaseException:
        limits.restore()
        if met is not None:
            met.close()
        raise
    advice = wired_advice(model.weights_bytes)
    reasons = [choice.reason, *weights.reasons, *([advice] if advice else [])]
    if met is not None:
        reasons.append(met.description)
    kept = checkpoint.quantization if bits is None else f"mlx-{bits}bit"
    info = ModelInfo(
        name=name,
        architecture=_architecture(checkpoint),
        num_layers=model_config.num_hidden_layers,
        hidden_size=model_config.hidden_size,
        vocab_size=model_config.vocab_size,
        max_position_embeddings=model_config.max_position_embeddings,
        dtype=dtype_name(choice.dtype),
        quantization=kept if weights.kept_quantized else None,
        weights_bytes=model.weights_bytes,
        fingerprint=f"{fingerprint}-mlx-{dtype_name(choice.dtype)}-{config.model.quantization}",
        kv_groups=model.groups,
        rope_switch=rope_switch(model_config),
    )
    return MlxRunner(model, info, choice, config.cache, limits, "; ".join(reasons), met)


def _check_experts(model: StageModel, choice: DeviceChoice) -> None:
    modules = [module for layer in model.layers for _, module in layer.named_modules()]
    dense = any(isinstance(module, SwitchLinear) for module in modules)
    if dense and not choice.on_gpu and choice.dtype != mx.float32:
        raise ConfigError(
            "on CPU, MLX multiplies experts in float32 only", hint="--dtype float32, or auto"
        )


def _bits(quantization: str | None) -> int | None:
    """Bits to quantise to at load."""
    if quantization in (None, "none"):
        return None
    known = {f"{bits}bit": bits for bits in (2, 3, 4, 5, 6, 8)}
    if quantization not in known:
        raise ConfigError(
            f"the MLX backend does not know --quantization {quantization}",
            hint=f"none, {', '.join(known)}",
        )
    return known[quantization]


def _architecture(checkpoint: Checkpoint) -> str:
    named: Sequence[str] = checkpoint.config.get("architectures") or ()
    return named[0] if named else str(checkpoint.config.get("model_type"))


def _largest_steps(
    tokens: int, sequences: int, block_size: int, groups: int
) -> tuple[StepPlan, StepPlan]:
    """One prompt of ``tokens`` tokens; then ``sequences`` decodes."""
    prompt = Chunk(
        seq=0,
        start=0,
        token_ids=[0] * tokens,
        new_blocks=(tuple(range(-(-tokens // block_size))),) * groups,
        num_logits=1,
    )
    decodes = tuple(
        Chunk(seq=i + 1, start=0, token_ids=[0], new_blocks=((i,),) * groups, num_logits=1)
        for i in range(sequences)
    )
    return StepPlan(step=0, chunks=(prompt,)), StepPlan(step=1, chunks=decodes, freed=(0,))
