"""Paged attention over a flat batch: decodes of many sequences at once, prefill chunk by chunk."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pippin.backends.torch.batch import DecodeSet, GroupBatch, Prefill
from pippin.backends.torch.kv import Pool

#: Rows of a prefill under a window that share one mask.
_WINDOW_ROWS = 256


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: Pool,
    batch: GroupBatch,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of ``query`` [T, heads, d] to its own sequences; returns [T, heads, d].

    ``key`` and ``value`` [T, kv_heads, d] are this step's, and must already be in ``pool``.
    ``sinks`` [heads] are logits of a position without a value (GPT-OSS).
    """
    if not batch.prefills and len(batch.decodes) == 1:
        return _decode(query, pool, batch.decodes[0], scale, sinks)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for decode in batch.decodes:
        out[decode.rows] = _decode(query[decode.rows], pool, decode, scale, sinks)
    attend_prefills(out, query, key, value, pool, batch, scale, sinks)
    return out


def attend_prefills(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: Pool,
    batch: GroupBatch,
    scale: float,
    sinks: torch.Tensor | None,
) -> None:
    """Write the rows of ``out`` that belong to prefill chunks; arguments as for ``attend``."""
    for prefill in batch.prefills:
        rows = slice(prefill.first, prefill.last)
        out[rows] = _prefill(
            query[rows], key[rows], value[rows], pool, batch.window, prefill, scale, sinks
        )


def _decode(
    query: torch.Tensor,
    pool: Pool,
    decode: DecodeSet,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[count, heads, d]: batched matrix products, one per sequence and KV head."""
    count, heads, width = query.shape
    kv_heads = pool.data.shape[0] // 2
    group = heads // kv_heads
    rows = kv_heads * count
    if decode.run is not None:
        pages = pool.view(decode.run, decode.length)
    else:
        assert decode.blocks is not None
        pages = pool.gather(decode.blocks).view(2 * rows, decode.length, width)
    keys, values = pages[:rows].transpose(1, 2), pages[rows:]
    query = query.view(count, kv_heads, group, width)
    if count > 1:
        query = query.transpose(0, 1)
    query = query.reshape(rows, group, width)
    if decode.mask is not None:
        scores = torch.baddbmm(decode.mask, query, keys, alpha=scale)
    else:
        scores = torch.bmm(query, keys)
        if scale != 1.0:
            scores.mul_(scale)
    out = torch.bmm(scores.softmax(-1), values)
    if sinks is not None:
        total = scores.float().logsumexp(-1).view(kv_heads, count, group)
        share = torch.sigmoid(total - sinks.view(kv_heads, 1, group).float())
        out.mul_(share.view(rows, group, 1))
    if count > 1:
        out = out.view(kv_heads, count, group, width).transpose(0, 1)
    return out.reshape(count, heads, width)


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: Pool,
    window: int | None,
    prefill: Prefill,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[n, heads, d] of one sequence's chunk over its cached prefix and itself."""
    kv_heads = key.shape[1]
    heads = query.shape[1]
    # [kv_heads, group, n, d] against [kv_heads, 1 -> group, n, d]: no copies of grouped heads.
    query = query.view(-1, kv_heads, heads // kv_heads, query.shape[2]).permute(1, 2, 0, 3)
    keys, values = key.transpose(0, 1), value.transpose(0, 1)
    prefix_keys = prefix_values = None
    if prefill.prefix:
        pages = read_prefix(pool, prefill)
        prefix_keys, prefix_values = pages[:kv_heads], pages[kv_heads:]
    if window is not None and prefill.start + prefill.count > window:
        if prefix_keys is not None and prefix_values is not None:
            keys = torch.cat((prefix_keys, keys), 1)
            values = torch.cat((prefix_values, values), 1)
        out, total = _windowed(query, keys, values, prefill.prefix, window, scale)
    else:
        out, total = attention(query, keys, values, scale, causal=True)
        if prefix_keys is not None and prefix_values is not None:
            before, before_total = attention(query, prefix_keys, prefix_values, scale, causal=False)
            out, total = merge(out, total, before, before_total)
    if sinks is not None:
        share = torch.sigmoid(total - sinks.view(kv_heads, -1, 1).float())
        out = out * share[..., None].to(out.dtype)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def read_prefix(pool: Pool, prefill: Prefill) -> torch.Tensor:
    """[heads, prefix, d]: positions [low, start) from the pool."""
    if prefill.run is not None:
        return pool.view(prefill.run + prefill.skip, prefill.prefix)
    assert prefill.blocks is not None
    return pool.gather(prefill.blocks)[:, prefill.skip : prefill.skip + prefill.prefix]


def _windowed(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    prefix: int,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in parts, each with the keys that it can see and a mask of that size."""
    outs, totals = [], []
    count = query.shape[2]
    for first in range(0, count, _WINDOW_ROWS):
        last = min(first + _WINDOW_ROWS, count)
        low = max(0, prefix + first - window + 1)
        end = prefix + last
        row = torch.arange(prefix + first, end, device=query.device)[:, None]
        column = torch.arange(low, end, device=query.device)
        hidden = (column > row) | (column <= row - window)
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
        mask.masked_fill_(hidden, -torch.inf)
        out, total = attention(
            query[:, :, first:last],
            keys[:, low:end],
            values[:, low:end],
            scale,
            mask=mask,
        )
        outs.append(out)
        totals.append(total)
    return torch.cat(outs, 2), torch.cat(totals, 2)


def merge(
    out: torch.Tensor, total: torch.Tensor, other: torch.Tensor, other_total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over two sets of keys, from the softmax over each and their log-sum-exps."""
    share = torch.sigmoid(other_total - total)[..., None].to(out.dtype)
    return torch.lerp(out, other, share), torch.logaddexp(total, other_total)


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention and its log-sum-exp.

    ``query`` [kv_heads, group, n, d]; ``keys``, ``values`` [kv_heads, L, d]; ``mask`` [n, L] is
    added. ``causal`` needs n == L. Returns [kv_heads, group, n, d] and float32
    [kv_heads, group, n].
    """
    group = query.shape[1]
    keys = keys[:, None].expand(-1, group, -1, -1)
    values = values[:, None].expand(-1, group, -1, -1)
    if query.device.type == "cpu":
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, causal, attn_mask=mask, scale=scale
        )
        return out, total
    if query.device.type == "cuda":
        return _cuda(query, keys, values, scale, causal, mask)
    scores = torch.matmul(query, keys.transpose(2, 3)).float() * scale
    if causal:
        mask = torch.full(scores.shape[2:], -torch.inf, device=scores.device).triu_(1)
    if mask is not None:
        scores += mask
    return torch.matmul(F.softmax(scores, -1).to(values.dtype), values), scores.logsumexp(-1)


def _cuda(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    causal: bool,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fused kernels that also return the log-sum-exp."""
    width = query.shape[-1]
    if width % 8:
        query, keys, values = (F.pad(each, (0, -width % 8)) for each in (query, keys, values))
        out, total = _cuda(query, keys, values, scale, causal, mask)
        return out[..., :width], total
    if mask is None and query.dtype != torch.float32 and query.shape[-1] <= 256:
        out, total, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, causal, False, scale=scale
        )
        return out, total
    if mask is not None:
        rows, columns = mask.shape
        # Rows of the bias must be aligned.
        aligned = mask.new_zeros(rows, -(-columns // 16) * 16)[:, :columns]
        mask = aligned.copy_(mask).expand(*query.shape[:2], -1, -1)
    out, total, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, keys, values, mask, True, 0.0, causal, scale=scale
    )
    return out, total[..., : query.shape[2]]
