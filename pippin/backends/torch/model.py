"""Builds a stage: transformers describes the model, the checkpoint fills our layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from pippin.backends.description import is_latent, kv_groups
from pippin.backends.torch.assemble import assemble, load_norm
from pippin.backends.torch.batch import Batch, Paged
from pippin.backends.torch.kv import Pool, Scratch
from pippin.backends.torch.layers import Attention, Layer, RMSNorm
from pippin.backends.torch.linear import Linear
from pippin.backends.torch.rope import Rope
from pippin.backends.torch.weights import Weights
from pippin.errors import ModelInvalid
from pippin.types.model import KVGroup

#: Architectures whose layers are known to be described fully by what ``assemble`` reads.
SUPPORTED = (
    "deepseek_v3",
    "gemma3_text",
    "gpt_oss",
    "llama",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)

_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Part:
    """The last rows of a batch, which run through layers [first, last) only."""

    count: int
    first: int
    last: int
    hidden: torch.Tensor | None
    """[count, hidden_size] behind layer ``first``; None at the first layer."""


@dataclass(slots=True)
class StageModel:
    """Layers [first, last) with the embedding on the first stage and the head on the last."""

    config: Any
    groups: tuple[KVGroup, ...]
    """Of the whole model, with the layers of this stage only."""
    layers: list[Layer]
    ropes: list[Rope]
    dtype: torch.dtype
    embedding: torch.Tensor | None
    embedding_scale: torch.Tensor | None
    norm: RMSNorm | None
    head: Linear | None
    logit_softcap: float | None

    @property
    def kv_heads(self) -> int:
        """Matrices of keys a sequence has in a layer: 1 for latent attention."""
        return 1 if is_latent(self.config) else int(self.config.num_key_value_heads)

    @property
    def paged(self) -> Paged:
        """Which chunks the compiled kernel takes. It computes in float32: prompts in bfloat16 are
        left to torch, which uses the CPU's matrix instructions."""
        if not all(
            isinstance(layer.attention, Attention) and layer.attention.kernels is not None
            for layer in self.layers
        ):
            return "none"
        return "all" if self.dtype == torch.float32 else "decodes"

    def forward(self, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor | None:
        """Logits [rows, vocab] of the wanted rows on the last stage (None where no row is wanted),
        the residual stream [T, hidden_size] on others."""
        if hidden is None:
            hidden = self._embed(batch)
        self._rotate(batch)
        if self.head is None or self.norm is None:
            return self._run(hidden, batch, 0, len(self.layers))
        return self._finish(self._run(hidden, batch, 0, len(self.layers) - 1), batch)

    def forward_part(
        self, batch: Batch | None, joint: Batch, part: Part
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """As ``forward``, where the last rows of ``joint`` run through some of the layers only.

        ``batch`` is the step without them (None where it is empty). Returns the logits, and the
        hidden states of those rows where layers are left. Only for a stage with all layers.
        """
        rows = part.hidden
        if rows is None:
            rows = self._embed(joint)[-part.count :]
        count, end = len(self.layers), part.last
        self._rotate(joint)
        if batch is None:
            if end == count:
                return self._finish(self._run(rows, joint, part.first, end - 1), joint), None
            return None, self._run(rows, joint, part.first, end)
        self._rotate(batch)
        hidden = self._run(self._embed(batch), batch, 0, part.first)
        hidden = torch.cat((hidden, rows))
        if end == count:
            return self._finish(self._run(hidden, joint, part.first, end - 1), joint), None
        hidden = self._run(hidden, joint, part.first, end)
        hidden, rows = hidden[: -part.count], hidden[-part.count :].clone()
        return self._finish(self._run(hidden, batch, end, count - 1), batch), rows

    def _embed(self, batch: Batch) -> torch.Tensor:
        assert self.embedding is not None
        hidden = nn.functional.embedding(batch.token_ids, self.embedding)
        return hidden if self.embedding_scale is None else hidden * self.embedding_scale

    def _rotate(self, batch: Batch) -> None:
        for rope in self.ropes:
            batch.rotations.append(rope.rotation(batch))

    def _run(self, hidden: torch.Tensor, batch: Batch, first: int, last: int) -> torch.Tensor:
        for layer in self.layers[first:last]:
            hidden = layer(hidden, batch)
        return hidden

    def _finish(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        """The last layer and the head, for the wanted rows."""
        assert self.head is not None and self.norm is not None
        wanted: torch.Tensor | slice = slice(0, 0) if batch.wanted is None else batch.wanted
        hidden = self.layers[-1](hidden, batch, wanted)
        if batch.wanted is None:
            return None
        logits = self.head(self.norm(hidden))
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    def allocate(self, num_blocks: tuple[int, ...], block_size: int, device: torch.device) -> None:
        """Make the layers' pools."""
        scratch = Scratch()
        for layer in self.layers:
            attention = layer.attention
            attention.pool = Pool(
                attention.pool_heads,
                num_blocks[attention.group],
                block_size,
                attention.pool_width,
                self.dtype,
                device,
                scratch,
            )


def build(config: Any, weights: Weights, first: int, last: int) -> StageModel:
    """Load layers [first, last) of the model that ``config`` describes."""
    inner = _skeleton(config, weights.dtype).model
    if is_latent(config):
        width = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        width = 2 * config.num_key_value_heads * inner.layers[0].self_attn.head_dim
    itemsize = weights.dtype.itemsize
    groups, group_of = kv_groups(config, first, last, width * itemsize)
    rope_types = _rope_types(config)
    rotary = type(inner.rotary_emb)(config=config)
    ropes = [Rope(rotary, config, kind, weights.device, weights.dtype) for kind in rope_types]
    layers = [
        assemble(
            inner.layers[i],
            f"model.layers.{i}",
            config,
            weights,
            group=group_of[i],
            rope=_rope_of(config, i),
            rotary_dim=ropes[_rope_of(config, i)].rotary_dim,
        )
        for i in range(first, last)
    ]
    is_last = last == config.num_hidden_layers
    norm = load_norm(inner.norm, "model.norm", weights) if is_last else None
    scale = getattr(inner.embed_tokens, "scalar_embed_scale", None)
    return StageModel(
        config=config,
        groups=groups,
        layers=layers,
        ropes=ropes,
        dtype=weights.dtype,
        embedding=weights.dense(_EMBEDDING) if first == 0 else None,
        embedding_scale=None
        if scale is None
        else torch.tensor(scale, dtype=weights.dtype, device=weights.device),
        norm=norm,
        head=_head(config, weights) if is_last else None,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
    )


def count_parameters(config: Any, first: int, last: int) -> int:
    """Weights of a stage of layers [first, last), a tied head counted by itself."""
    skeleton = _skeleton(config, torch.float32)
    modules = list(skeleton.model.layers[first:last])
    if first == 0:
        modules.append(skeleton.model.embed_tokens)
    if last == config.num_hidden_layers:
        modules.append(skeleton.lm_head)
    return sum(p.numel() for module in modules for p in module.parameters())


def _skeleton(config: Any, dtype: torch.dtype) -> Any:
    """The model without weights, in the dtypes that it wants."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _head(config: Any, weights: Weights) -> Linear:
    name = "lm_head.weight"
    if not weights.has(name):
        if not getattr(config, "tie_word_embeddings", True):
            raise ModelInvalid(f"the checkpoint has no weight {name}")
        name = _EMBEDDING
    biases = ("lm_head.bias",) if weights.has("lm_head.bias") else ()
    return weights.linear((name,), biases)


def _rope_types(config: Any) -> list[str | None]:
    """Layer types with rope parameters of their own; [None] where all layers share them."""
    parameters = config.rope_parameters
    kinds = set(getattr(config, "layer_types", None) or ())
    return sorted(kinds & set(parameters)) or [None]


def _rope_of(config: Any, layer: int) -> int:
    kinds = _rope_types(config)
    return 0 if kinds == [None] else kinds.index(config.layer_types[layer])
