"""Multi-head latent attention (DeepSeek): latent pages, absorbed decode, expanded prefill.

A page holds, per token, the normed latent [rank] and the rotated shared key [rope_dim], and nothing
a head. Decode brings queries into the latent space and outputs out of it; prefill has many rows per
latent, so it expands keys and values instead.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.deepseek_v3 import DeepseekV3Attention

from pippin.backends.mlx.attention import PagedCache, in_order, read_decode, read_prefill
from pippin.backends.mlx.batch import DecodeSet, Prefill
from pippin.backends.mlx.kv import Pool


class LatentAttention(DeepseekV3Attention):  # type: ignore[misc]
    """mlx-lm's parameters under our computation. Needs a group without a window."""

    def __call__(
        self, x: mx.array, mask: mx.array | None = None, cache: Any | None = None
    ) -> mx.array:
        """``x`` [T, 1, hidden_size], with a ``PagedCache``."""
        assert isinstance(cache, PagedCache)
        assert cache.pool is not None
        count = x.shape[0]
        if self.q_lora_rank is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.reshape(count, self.num_heads, 1, self.q_head_dim)
        nope, turned = mx.split(query, [self.qk_nope_head_dim], axis=-1)
        latent, key = mx.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
        turned = self.rope(turned, offset=cache.offset)
        key = self.rope(key[:, None], offset=cache.offset)
        row = mx.concatenate([self.kv_a_layernorm(latent)[:, None], key], axis=-1)
        cache.write(row)
        outs = [self._decode(nope, turned, cache.pool, one) for one in cache.batch.decodes]
        query = mx.concatenate([nope, turned], axis=-1)
        outs += [self._prefill(query, row, cache.pool, one) for one in cache.batch.prefills]
        out: mx.array = self.o_proj(in_order(outs, cache.batch).reshape(count, 1, -1))
        return out

    def _decode(self, nope: mx.array, turned: mx.array, pool: Pool, decode: DecodeSet) -> mx.array:
        """[count, heads, 1, value_dim] in the latent space: one shared key and value head."""
        pages = read_decode(pool, decode)
        absorbed = self.embed_q(nope[decode.rows])
        seen = mx.fast.scaled_dot_product_attention(
            mx.concatenate([absorbed, turned[decode.rows]], axis=-1),
            pages,
            pages[..., : self.kv_lora_rank],
            scale=self.scale,
            mask=decode.mask,
        )
        out: mx.array = self.unembed_out(seen)
        return out

    def _prefill(self, query: mx.array, row: mx.array, pool: Pool, prefill: Prefill) -> mx.array:
        """[n, heads, 1, value_dim]"""
        if prefill.prefix:
            pages = read_prefill(pool, prefill)
        else:
            pages = row[prefill.rows].transpose(2, 1, 0, 3)
        latent, turned = mx.split(pages, [self.kv_lora_rank], axis=-1)
        nope = self.embed_q(latent, transpose=False)
        turned = mx.broadcast_to(turned, (*nope.shape[:-1], turned.shape[-1]))
        out = mx.fast.scaled_dot_product_attention(
            query[prefill.rows].transpose(2, 1, 0, 3),
            mx.concatenate([nope, turned], axis=-1),
            self.unembed_out(latent),
            scale=self.scale,
            mask="causal",
        )
        return out.transpose(2, 1, 0, 3)
