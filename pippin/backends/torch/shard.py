"""A stage's part of each layer, and the sums that make the parts of all ranks one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from pippin.backends.shard import Shard, Span
from pippin.backends.torch.group import Group
from pippin.backends.torch.linear import Linear
from pippin.backends.torch.weights import Part, Pieces


class FeedForward(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``residual + self(x)``; ``residual`` may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """What of each layer is this rank's, and the group to add it up in."""

    shard: Shard
    group: Group | None
    """None: the stage has all of its layers."""

    def rows(self, name: str, spans: Sequence[Span]) -> list[Part]:
        """Rows of a weight, where it is cut."""
        return [Part(name)] if self.group is None else [Part(name, rows=span) for span in spans]

    def columns(self, name: str, span: Span) -> Part:
        return Part(name) if self.group is None else Part(name, columns=span)

    def bias(self, names: Sequence[str]) -> list[Part]:
        """Of a weight that is cut along its columns: one rank adds it."""
        return [Part(name) for name in names] if self.shard.first else []

    def summed(self, linear: Linear) -> Linear:
        return linear if self.group is None else SummedLinear(linear, self.group)

    def summed_block(self, block: FeedForward) -> FeedForward:
        return block if self.group is None else SummedBlock(block, self.group)

    def choose(self, path: str, owner: nn.Module, name: str) -> Pieces | None:
        """Of a mixture-of-experts block of transformers: see ``weights.Choose``."""
        if self.group is None:
            return None
        if hasattr(owner, "gate_up_proj"):
            return self._expert(owner, name)
        projection = path.rpartition(".")[2]
        if projection in ("gate_proj", "up_proj") and isinstance(owner, nn.Linear):
            return Pieces(0, (self.shard.columns(owner.out_features),))
        if projection == "down_proj" and isinstance(owner, nn.Linear):
            if name == "bias":
                return Pieces(0, (Span(0, owner.out_features),), zero=not self.shard.first)
            return Pieces(1, (self.shard.columns(owner.in_features),))
        return None  # The router, which every rank has.

    def _expert(self, experts: nn.Module, name: str) -> Pieces | None:
        """Shapes: gate_up [E, 2 I, H], down [E, H, I]; GPT-OSS has them transposed, with gate and
        up taking turns."""
        down = experts.get_parameter("down_proj")
        transposed = bool(getattr(experts, "is_transposed", False))
        width = down.shape[1 if transposed else 2]
        span = self.shard.columns(width)
        if name == "down_proj":
            return Pieces(1 if transposed else 2, (span,))
        if name == "gate_up_proj" and not transposed:
            return Pieces(1, (span, span.shift(width)))
        if name in ("gate_up_proj", "gate_up_proj_bias"):
            return Pieces(2 if name == "gate_up_proj" else 1, (span.times(2),))
        if name == "down_proj_bias":
            return Pieces(1, (Span(0, down.shape[-1]),), zero=not self.shard.first)
        return None


class SummedLinear:
    """A linear that is cut along its inputs."""

    def __init__(self, linear: Linear, group: Group) -> None:
        self._linear = linear
        self._group = group
        self.nbytes = linear.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.sum(self._linear(x))

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._group.add(self._linear(x), residual)


class SummedBlock:
    """A feed-forward block that is cut along its intermediate."""

    def __init__(self, block: FeedForward, group: Group) -> None:
        self._block = block
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.sum(self._block(x))

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._group.add(self._block(x), residual)


class Head:
    """The last stage's linear to the vocabulary. Logits [rows, vocab] on rank 0, None on others."""

    def __init__(self, linear: Linear, group: Group | None, widths: Sequence[int]) -> None:
        """``widths``: each rank's rows of the weight."""
        self._linear = linear
        self._group = group
        self._widths = widths

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        logits = self._linear(x)
        return logits if self._group is None else self._group.gather(logits, self._widths)


class Embedding:
    """The first stage's rows of token ids [T], as [T, hidden]."""

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        first: int = 0,
        group: Group | None = None,
    ) -> None:
        """``weight``: all rows, or those from ``first`` on, of a vocabulary that the ranks of
        ``group`` share. ``scale``: what rows are multiplied by."""
        self._weight = weight
        self._scale = scale
        self._first = first
        self._group = group

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            hidden = F.embedding(token_ids, self._weight)
        else:
            own = token_ids - self._first
            elsewhere = (own < 0) | (own >= len(self._weight))
            hidden = F.embedding(own.masked_fill_(elsewhere, 0), self._weight)
            hidden = self._group.sum(hidden.masked_fill_(elsewhere[:, None], 0))
        return hidden if self._scale is None else hidden * self._scale
