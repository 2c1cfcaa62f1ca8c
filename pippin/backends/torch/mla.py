"""Multi-head latent attention (DeepSeek): latent pages, absorbed decode, expanded prefill.

A page holds, per token, the normed latent [rank] and the rotated shared key [rope_dim]. Decode
never expands it: with ``kv_b = [W_k; W_v]`` per head, ``q · (W_k c) = (W_kᵀ q) · c``, so queries
are brought into the latent space once and outputs out of it once. Prefill has many rows per latent,
so it expands keys and values instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from pippin.backends.torch.attention import attention, merge, read_prefix
from pippin.backends.torch.batch import Batch, DecodeSet, Prefill
from pippin.backends.torch.kv import Pool
from pippin.backends.torch.layers import RMSNorm
from pippin.backends.torch.linear import Linear
from pippin.backends.torch.rope import uses_pairs
from pippin.backends.torch.shard import Cut
from pippin.backends.torch.weights import Part, Weights


@dataclass(slots=True)
class LatentAttention:
    """Needs a group without a window."""

    down: Linear
    """Hidden to [q latent or queries | kv latent | rope key]."""
    q_norm: RMSNorm | None
    q_up: Linear | None
    """None where queries are not compressed."""
    kv_norm: RMSNorm
    key_up: torch.Tensor
    """[heads, nope_dim, rank]."""
    value_up: torch.Tensor
    """[heads, value_dim, rank]."""
    heads: int
    nope_dim: int
    rope_dim: int
    scale: float
    group: int
    rope: int
    pool: Pool | None = None

    @property
    def pool_heads(self) -> int:
        return 1

    @property
    def rank(self) -> int:
        return self.key_up.shape[2]

    @property
    def pool_width(self) -> int:
        return self.rank + self.rope_dim

    @property
    def value_width(self) -> int:
        return self.value_up.shape[1]

    def __call__(
        self, x: torch.Tensor, batch: Batch, rows: torch.Tensor | slice | None
    ) -> torch.Tensor:
        assert self.pool is not None
        count = x.shape[0]
        mixed = self.down(x)
        width = self.rank + self.rope_dim
        query, latent = mixed[:, :-width], mixed[:, -width:].contiguous()
        if self.q_up is not None and self.q_norm is not None:
            query = self.q_up(self.q_norm(query))
        query = query.reshape(count, self.heads, self.nope_dim + self.rope_dim)
        rotate = batch.rotations[self.rope]
        rotate(query[..., self.nope_dim :])
        rotate(latent[:, None, self.rank :])
        latent[:, : self.rank] = self.kv_norm(latent[:, : self.rank])
        group = batch.groups[self.group]
        self.pool.write(latent[:, None], group.slots, group.run)
        out = query.new_empty(count, self.heads, self.value_up.shape[1])
        for decode in group.decodes:
            out[decode.rows] = self._decode(query[decode.rows], decode)
        for prefill in group.prefills:
            chunk = slice(prefill.first, prefill.last)
            out[chunk] = self._prefill(query[chunk], latent[chunk], prefill)
        result = out.flatten(1)
        return result if rows is None else result[rows]

    def _decode(self, query: torch.Tensor, decode: DecodeSet) -> torch.Tensor:
        """[count, heads, value_dim] in the latent space: one shared key and value head."""
        assert self.pool is not None
        count = query.shape[0]
        if decode.run is not None:
            pages = self.pool.view(decode.run, decode.length)
        else:
            assert decode.blocks is not None
            pages = self.pool.gather(decode.blocks)
        pages = pages.reshape(count, decode.length, self.pool_width)
        absorbed = torch.bmm(query[..., : self.nope_dim].transpose(0, 1), self.key_up)
        full = torch.cat((absorbed.transpose(0, 1), query[..., self.nope_dim :]), -1)
        scores = torch.bmm(full, pages.transpose(1, 2)).mul_(self.scale)
        if decode.mask is not None:
            scores.add_(decode.mask)
        seen = torch.bmm(scores.softmax(-1), pages[..., : self.rank])
        return torch.bmm(seen.transpose(0, 1), self.value_up.transpose(1, 2)).transpose(0, 1)

    def _prefill(self, query: torch.Tensor, latent: torch.Tensor, prefill: Prefill) -> torch.Tensor:
        assert self.pool is not None
        query = query.transpose(0, 1)[:, None]
        out, total = self._expanded(query, latent, causal=True)
        if prefill.prefix:
            before = read_prefix(self.pool, prefill)[0]
            out, _ = merge(out, total, *self._expanded(query, before, causal=False))
        return out[:, 0, :, : self.value_up.shape[1]].transpose(0, 1)

    def _expanded(
        self, query: torch.Tensor, latent: torch.Tensor, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of ``query`` [heads, 1, n, d] to ``latent`` [L, rank + rope_dim]."""
        compressed = latent[:, : self.rank]
        nope = torch.matmul(compressed, self.key_up.transpose(1, 2))
        turned = latent[:, self.rank :].expand(self.heads, -1, -1)
        values = torch.matmul(compressed, self.value_up.transpose(1, 2))
        keys = torch.cat((nope, turned), -1)
        # The fused kernels want one width: values are filled up with zeros.
        values = F.pad(values, (0, keys.shape[-1] - values.shape[-1]))
        return attention(query, keys, values, self.scale, causal=causal)


def load_latent(
    module: Any, prefix: str, weights: Weights, cut: Cut, group: int, rope: int
) -> LatentAttention:
    """``module``: transformers' attention module, for its sizes.

    In a tensor-parallel group heads are cut, and what is compressed stands on every rank.
    """
    nope, rope_dim, rank = module.qk_nope_head_dim, module.qk_rope_head_dim, module.kv_lora_rank
    heads = cut.shard.heads.count
    query_rows = cut.shard.heads.times(nope + rope_dim)
    interleaved = bool(getattr(module.config, "rope_interleave", True))
    other_order = interleaved != uses_pairs(weights.dtype)
    compressed = module.q_lora_rank is not None
    if compressed:
        query = weights.stacked([Part(f"{prefix}.q_a_proj.weight")])
    else:
        query = weights.stacked(cut.rows(f"{prefix}.q_proj.weight", [query_rows]))
    latent = weights.stacked([Part(f"{prefix}.kv_a_proj_with_mqa.weight")])
    bias = None
    if module.kv_a_proj_with_mqa.bias is not None:
        # Only the compressed projection has a bias.
        bias = (
            weights.stacked([Part(f"{prefix}.q_a_proj.bias")])
            if compressed
            else query.new_zeros(query.shape[0])
        )
        latent_bias = weights.stacked([Part(f"{prefix}.kv_a_proj_with_mqa.bias")])
        if other_order:
            latent_bias = _reorder(latent_bias, rank, rope_dim)
        bias = torch.cat((bias, latent_bias))
    up = None
    if compressed:
        up = weights.stacked(cut.rows(f"{prefix}.q_b_proj.weight", [query_rows]))
    if other_order:
        latent = _reorder(latent, rank, rope_dim)
        turned = (query if up is None else up).view(heads, nope + rope_dim, -1)
        turned = _reorder(turned, nope, rope_dim, axis=1).flatten(0, 1)
        query, up = (turned, None) if up is None else (query, turned)
    kv_rows = cut.shard.heads.times(nope + module.v_head_dim)
    kv_b = weights.stacked(cut.rows(f"{prefix}.kv_b_proj.weight", [kv_rows]))
    kv_b = kv_b.view(heads, -1, rank)
    key_up, value_up = kv_b[:, :nope].contiguous(), kv_b[:, nope:].contiguous()
    weights.nbytes += kv_b.nbytes
    norm = f"{prefix}.q_a_layernorm.weight"
    return LatentAttention(
        down=weights.make(torch.cat((query, latent)), bias),
        q_norm=_norm(module.q_a_layernorm, norm, weights) if compressed else None,
        q_up=weights.make(up, None) if up is not None else None,
        kv_norm=_norm(module.kv_a_layernorm, f"{prefix}.kv_a_layernorm.weight", weights),
        key_up=key_up,
        value_up=value_up,
        heads=heads,
        nope_dim=nope,
        rope_dim=rope_dim,
        scale=module.scaling,
        group=group,
        rope=rope,
    )


def _norm(module: Any, name: str, weights: Weights) -> RMSNorm:
    return RMSNorm(weights.dense(name, torch.float32), module.variance_epsilon)


def _reorder(weight: torch.Tensor, before: int, rope_dim: int, axis: int = 0) -> torch.Tensor:
    """Bring the rotary rows behind ``before`` from the one order to the other (see ``rope``)."""
    shape = (2, -1) if uses_pairs(weight.dtype) else (-1, 2)
    turned = torch.arange(rope_dim).view(shape).t().reshape(-1) + before
    order = torch.cat((torch.arange(before), turned)).to(weight.device)
    return weight.index_select(axis, order)
