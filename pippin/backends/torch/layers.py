"""One decoder layer: norms, fused attention, feed-forward, over a flat batch [T, hidden]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from pippin.backends.torch.attention import attend, attend_prefills
from pippin.backends.torch.batch import Batch, GroupBatch
from pippin.backends.torch.kv import Pool
from pippin.backends.torch.linear import Linear
from pippin.backends.torch.native.ops import AttendCall, Kernels, MixCall
from pippin.backends.torch.shard import FeedForward

Activation = Callable[[torch.Tensor], torch.Tensor]


class RMSNorm:
    """``x / rms(x) * weight`` over the last axis, computed in float32."""

    def __init__(self, weight: torch.Tensor, eps: float, kernels: Kernels | None = None) -> None:
        """``weight``: float32 [width], or [heads, width] for norms of single heads."""
        self.eps = eps
        self.weight = weight
        self._size = weight.shape[-1]
        self._kernels = kernels
        # x / rms(x) = x * sqrt(size) / hypot(|x|, sqrt(size * eps)): three kernels on the CPU,
        # where rms_norm is made of seven.
        self._by_length = weight.device.type == "cpu" and kernels is None
        self._floor = torch.tensor((self._size * eps) ** 0.5, device=weight.device)
        if self._by_length:
            self.weight = weight * self._size**0.5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernels is not None:
            return self._kernels.rms_norm(x, self.weight, self.eps)
        wide = x.float()
        if self._by_length:
            length = torch.linalg.vector_norm(wide, 2, -1, True)
            normed = torch.div(wide, torch.hypot(length, self._floor, out=length))
        else:
            normed = F.rms_norm(wide, (self._size,), None, self.eps)
        return normed.mul_(self.weight).to(x.dtype)


class AttentionBlock(Protocol):
    """Everything between a layer's first norm and its first residual add."""

    pool: Pool | None
    group: int

    @property
    def pool_heads(self) -> int: ...

    @property
    def pool_width(self) -> int: ...

    @property
    def value_width(self) -> int:
        """Columns that a head brings to the output projection."""
        ...

    def __call__(
        self, x: torch.Tensor, batch: Batch, rows: torch.Tensor | slice | None
    ) -> torch.Tensor:
        """[T, heads * d], of ``rows`` only if given; the output projection is left out."""
        ...


@dataclass(slots=True)
class Attention:
    """Multi-head attention with one matrix product for queries, keys and values."""

    qkv: Linear
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    group: int
    """KV group of this layer."""
    rope: int | None
    """Which of the batch's angles; None for layers without positions."""
    qk_norm: RMSNorm | None = None
    """Of each query and key head, weights [heads + kv_heads, head_dim]."""
    sinks: torch.Tensor | None = None
    """float32 [heads]."""
    kernels: Kernels | None = None
    pool: Pool | None = None

    @property
    def pool_heads(self) -> int:
        return 2 * self.kv_heads

    @property
    def pool_width(self) -> int:
        return self.head_dim

    @property
    def value_width(self) -> int:
        return self.head_dim

    def __call__(
        self, x: torch.Tensor, batch: Batch, rows: torch.Tensor | slice | None
    ) -> torch.Tensor:
        assert self.pool is not None
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, self.head_dim)
        if self.kernels is not None:
            out = self._compiled(self.kernels, qkv, self.pool, batch)
        else:
            turned = qkv[:, : heads + kv_heads]
            if self.qk_norm is not None:
                turned.copy_(self.qk_norm(turned))
            if self.rope is not None:
                batch.rotations[self.rope](turned)
            group = batch.groups[self.group]
            self.pool.write(qkv[:, heads:], group.slots, group.run)
            out = attend(*self._parts(qkv), self.pool, group, self.scale, self.sinks)
        out = out.flatten(1)
        return out if rows is None else out[rows]

    def _compiled(
        self, kernels: Kernels, qkv: torch.Tensor, pool: Pool, batch: Batch
    ) -> torch.Tensor:
        group = batch.groups[self.group]
        key = (self.group, self.rope)
        if key not in batch.calls:
            batch.calls[key] = self._calls(kernels, qkv, pool, batch, group)
        mix, attend_pages = batch.calls[key]
        mix(qkv, pool.data, None if self.qk_norm is None else self.qk_norm.weight)
        out = qkv.new_empty(qkv.shape[0], self.heads, self.head_dim)
        if attend_pages is not None:
            attend_pages(qkv, pool.data, self.sinks, out)
        if group.prefills:
            attend_prefills(out, *self._parts(qkv), pool, group, self.scale, self.sinks)
        return out

    def _calls(
        self, kernels: Kernels, qkv: torch.Tensor, pool: Pool, batch: Batch, group: GroupBatch
    ) -> tuple[MixCall, AttendCall | None]:
        assert group.slots is not None
        turns = None if self.rope is None else batch.rotations[self.rope].turns
        eps = 0.0 if self.qk_norm is None else self.qk_norm.eps
        mix = kernels.mix_call(qkv, self.heads, turns, group.slots, pool.data, eps)
        if group.paged is None:
            return mix, None
        chunks, blocks = group.paged.chunks, group.paged.blocks
        return mix, kernels.attend_call(
            qkv, self.heads, pool.data, self.scale, group.window, chunks, blocks
        )

    def _parts(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values."""
        values = self.heads + self.kv_heads
        return qkv[:, : self.heads], qkv[:, self.heads : values], qkv[:, values:]


@dataclass(slots=True)
class GatedMLP:
    """``down(act(gate(x)) * up(x))`` with gate and up in one matrix product."""

    gate_up: Linear
    down: Linear
    act: Activation
    kernels: Kernels | None = None
    kernel_act: int = 0
    """The activation's number in ``native.ops.ACTIVATIONS``."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up(x)
        if self.kernels is not None:
            return self.kernels.gated(gate_up, self.kernel_act)
        gate, up = gate_up.chunk(2, -1)
        return self.act(gate).mul_(up)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.hidden(x))

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.down.add(self.hidden(x), residual)


@dataclass(slots=True)
class ModuleMLP:
    """A feed-forward module of transformers (mixture of experts)."""

    module: torch.nn.Module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.module(x[None])
        if isinstance(out, tuple):  # GPT-OSS also returns its router's scores.
            out = out[0]
        result: torch.Tensor = out[0]
        return result

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))


@dataclass(slots=True)
class Layer:
    """Pre-norm residual blocks, with norms behind them where the model has those (Gemma)."""

    attention_norm: RMSNorm
    attention: AttentionBlock
    output: Linear
    mlp_norm: RMSNorm
    mlp: FeedForward
    attention_post_norm: RMSNorm | None = None
    mlp_post_norm: RMSNorm | None = None

    def __call__(
        self, x: torch.Tensor, batch: Batch, rows: torch.Tensor | slice | None = None
    ) -> torch.Tensor:
        """Takes and gives the residual stream [T, hidden], which it may overwrite.

        With ``rows``, only those go on behind the attention (the last layer, where few are wanted).
        """
        mixed = self.attention(self.attention_norm(x), batch, rows)
        if rows is not None:
            x = x[rows]
        if self.attention_post_norm is None:
            x = self.output.add(mixed, x)
        else:
            x = x + self.attention_post_norm(self.output(mixed))
        normed = self.mlp_norm(x)
        if self.mlp_post_norm is None:
            return self.mlp.add(normed, x)
        return x + self.mlp_post_norm(self.mlp(normed))
