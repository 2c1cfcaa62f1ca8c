"""Builds a stage from mlx-lm's model files, with our attention, rope and weights in them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pippin.backends.description import is_latent, kv_groups
from pippin.backends.mlx.attention import PagedCache, install
from pippin.backends.mlx.batch import Batch
from pippin.backends.mlx.group import Group
from pippin.backends.mlx.kv import Pool
from pippin.backends.mlx.mla import LatentAttention
from pippin.backends.mlx.rope import Rope, RopeSettings, settings_of, yarn_scale
from pippin.backends.mlx.shard import Head, cut_layer, shard_of
from pippin.backends.mlx.weights import Weights, arrays_of
from pippin.errors import ModelInvalid, UnsupportedModel
from pippin.types.model import KVGroup

#: Model types, each with mlx-lm's file that has its layers.
MODULES = {
    "deepseek_v3": "deepseek_v3",
    "gemma3_text": "gemma3_text",
    "glm4_moe": "glm4_moe",
    "gpt_oss": "gpt_oss",
    "llama": "llama",
    "ministral3": "ministral3",
    "mistral": "llama",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "smollm3": "smollm3",
}
SUPPORTED = tuple(sorted(MODULES))

_ACTIVATIONS = {"gemma3_text": "gelu_pytorch_tanh"}


@dataclass(slots=True)
class StageModel:
    """Layers [first, last) with the embedding on the first stage and the head on the last."""

    groups: tuple[KVGroup, ...]
    """Of the whole model, with the layers of this stage only."""
    layers: list[Any]
    caches: list[PagedCache]
    """One a layer."""
    ropes: list[Rope]
    dtype: mx.Dtype
    pool_heads: int
    pool_width: int
    num_heads: int
    embedding: nn.Module | None
    embedding_scale: float | None
    norm: nn.Module | None
    head: Callable[[mx.array], mx.array] | None
    logit_softcap: float | None
    weights_bytes: int

    def forward(self, batch: Batch, hidden: mx.array | None = None) -> mx.array | None:
        """Logits [rows, vocab] of the wanted rows on the last stage (None where no row is wanted),
        the residual stream [T, hidden_size] on others. Nothing is evaluated yet."""
        if self.embedding is not None:
            hidden = self.embedding(batch.token_ids).astype(self.dtype)
            if self.embedding_scale is not None:
                hidden = hidden * mx.array(self.embedding_scale, dtype=self.dtype)
        else:
            assert hidden is not None
            hidden = hidden[:, None]
        for rope in self.ropes:
            rope.begin(batch)
        before = hidden
        for layer, cache in zip(self.layers, self.caches, strict=True):
            before = hidden
            cache.begin(batch)
            hidden = layer(hidden, mask=None, cache=cache)
            cache.end()
        if self.head is None or self.norm is None:
            return hidden[:, 0]
        if batch.wanted is None:
            return None
        if batch.last is None:
            hidden = hidden[batch.wanted]
        else:
            # The last layer again, for the wanted rows: of the first time, nothing but keys and
            # values will be evaluated.
            hidden = self._last_layer(before[batch.wanted], batch.last)
        logits = self.head(self.norm(hidden))[:, 0]
        if self.logit_softcap is not None:
            logits = mx.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    def _last_layer(self, hidden: mx.array, batch: Batch) -> mx.array:
        for rope in self.ropes:
            rope.begin(batch)
        self.caches[-1].begin(batch, writes=False)
        out: mx.array = self.layers[-1](hidden, mask=None, cache=self.caches[-1])
        self.caches[-1].end()
        return out

    def allocate(self, num_blocks: tuple[int, ...], block_size: int) -> None:
        """Make the layers' pools."""
        for cache in self.caches:
            cache.pool = Pool(
                self.pool_heads, num_blocks[cache.group], block_size, self.pool_width, self.dtype
            )
        mx.eval(self.pools())

    def free_pools(self) -> None:
        for cache in self.caches:
            cache.pool = None

    def pools(self) -> list[mx.array]:
        return [cache.pool.slots for cache in self.caches if cache.pool is not None]


def build(
    config: Any, weights: Weights, first: int, last: int, group: Group | None = None
) -> StageModel:
    """Load layers [first, last) of the model that ``config`` (transformers') describes, or one
    rank's part of them.

    Raises ``UnsupportedModel`` where mlx-lm's file cannot represent it, ``ModelInvalid`` for
    weights that do not fit, ``ConfigError`` for a group that it cannot be cut for.
    """
    tied = not weights.has("lm_head.weight")
    if tied and not getattr(config, "tie_word_embeddings", True):
        raise ModelInvalid("the checkpoint has no weight lm_head.weight")
    model = _skeleton(config, tied)
    inner = model.model
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = config.num_key_value_heads
    if group is not None:
        kv_heads = shard_of(config, group).kv_heads.count
    heads, width = 2 * kv_heads, head_dim
    if is_latent(config):
        heads, width = 1, config.kv_lora_rank + config.qk_rope_head_dim
        head_dim = config.qk_rope_head_dim
    groups, group_of = kv_groups(config, first, last, heads * width * weights.dtype.size)
    # Layers of other stages are dropped before anything of them is evaluated.
    layers: list[Any] = list(inner.layers[first:last])
    inner.layers = []
    ropes: dict[str, Rope] = {}
    for number, layer in enumerate(layers, start=first):
        _prepare(layer, config, settings_of(config, number, head_dim), ropes)
        weights.load(layer, f"model.layers.{number}")
        weights.check_all_used(f"model.layers.{number}.")
        if group is not None:
            cut_layer(layer, config, group)
    is_first, is_last = first == 0, last == config.num_hidden_layers
    embedding: Any = None
    if is_first or (is_last and tied):
        embedding = weights.load(inner.embed_tokens, "model.embed_tokens")
    norm = weights.load(inner.norm, "model.norm") if is_last else None
    head: Any = None
    if is_last:
        head = embedding if tied else weights.load(model.lm_head, "lm_head")
    part = None if tied else head
    if head is not None and group is not None:
        head = Head(head, tied, shard_of(config, group), group)
        part = head.part
    elif head is not None and tied:
        head = embedding.as_linear
    if not is_first and group is not None:
        embedding = None
    kept = [*layers, embedding, norm, part]
    scaled = config.model_type == "gemma3_text"
    return StageModel(
        groups=groups,
        layers=layers,
        caches=[PagedCache(group_of[number]) for number in range(first, last)],
        ropes=list(ropes.values()),
        dtype=weights.dtype,
        pool_heads=heads,
        pool_width=width,
        num_heads=config.num_attention_heads,
        embedding=embedding if is_first else None,
        embedding_scale=config.hidden_size**0.5 if scaled else None,
        norm=norm,
        head=head,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        weights_bytes=sum(
            array.nbytes for module in kept if module is not None for array in arrays_of(module)
        ),
    )


def _prepare(layer: Any, config: Any, settings: RopeSettings, ropes: dict[str, Rope]) -> None:
    """Put our attention and rope into one of mlx-lm's layers."""
    if is_latent(config):
        old = layer.self_attn
        layer.self_attn = LatentAttention(old.config)
        parameters = config.rope_parameters
        scale_all = parameters.get("mscale_all_dim")
        if settings.kind != "default" and scale_all:
            layer.self_attn.scale *= yarn_scale(settings.factor, scale_all) ** 2
    else:
        install(layer.self_attn)
    attention = layer.self_attn
    if type(attention.rope).__name__ == "NoPE":
        return
    own_dim = getattr(attention, "head_dim", None)
    if own_dim is not None and own_dim != settings.head_dim:
        raise UnsupportedModel(
            f"mlx-lm's {config.model_type} has heads of {own_dim}, the model of"
            f" {settings.head_dim}",
            hint="--backend torch",
        )
    interleaved = is_latent(config) and bool(getattr(config, "rope_interleave", True))
    rope = ropes.setdefault(repr(settings), Rope(settings, interleaved=interleaved))
    attention.rope = rope


def _skeleton(config: Any, tied: bool) -> Any:
    """mlx-lm's model with weights that are never evaluated."""
    kind = config.model_type
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    wanted = _ACTIVATIONS.get(kind, "silu")
    if activation != wanted:
        raise UnsupportedModel(
            f"mlx-lm's {kind} has the activation {wanted}, the model {activation}",
            hint="--backend torch",
        )
    module = importlib.import_module(f"mlx_lm.models.{MODULES[kind]}")
    try:
        return module.Model(module.ModelArgs(**_arguments(module.ModelArgs, config, tied)))
    except (TypeError, ValueError, KeyError) as error:
        raise ModelInvalid(f"config.json does not describe a {kind} model: {error}") from error


def _arguments(arguments: Any, config: Any, tied: bool) -> dict[str, Any]:
    """mlx-lm's arguments. Rope and windows are ours and told to it only as far as it insists."""
    known = inspect.signature(arguments).parameters
    # transformers may keep a value under another name; its attributes answer to both.
    values = {name: getattr(config, name) for name in known if hasattr(config, name)}
    parameters: dict[str, Any] = config.rope_parameters or {}
    mixed = ["sliding_attention", "full_attention"]
    changes = {
        "tie_word_embeddings": tied,
        "rope_theta": parameters.get("rope_theta", 10000.0),
        "rope_scaling": None,
        "rope_parameters": {
            "llama_4_scaling_beta": 0.0,
            "original_max_position_embeddings": config.max_position_embeddings,
        }
        | parameters,
        "layer_types": mixed if config.model_type == "gpt_oss" else None,
        "sliding_window": values.get("sliding_window") or 0,
        "partial_rotary_factor": parameters.get("partial_rotary_factor", 1.0),
    }
    return values | {name: value for name, value in changes.items() if name in known}
