"""Memory that steps need beside weights and pools: measured on accelerators, computed on CPU."""

from __future__ import annotations

from typing import Any

import torch

from pippin.types.step import Chunk, StepPlan


def step_bytes(config: Any, dtype: torch.dtype, tokens: int, sequences: int) -> int:
    """Upper estimate for a step of ``tokens`` tokens with ``sequences`` rows of logits.

    Used on CPU, where running such a step would take seconds at every start and the process's
    resident memory does not show what its allocator reuses.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    head_dim = max(head_dim, getattr(config, "qk_nope_head_dim", 0) + head_dim)
    # Residual stream, its norm, a block's output; queries, keys, values and the mixed values, the
    # first three also rotated or expanded; gate, up and their product.
    width = 4 * config.hidden_size + 4 * (heads + kv_heads) * head_dim
    width += 4 * max(config.intermediate_size, getattr(config, "moe_intermediate_size", 0) or 0)
    experts = getattr(config, "num_experts_per_tok", None) or 0
    width += experts * config.hidden_size
    # The sampler keeps float32 copies of the logits beside the head's own.
    logits = sequences * config.vocab_size * (dtype.itemsize + 4 * 4)
    return int(tokens * width * dtype.itemsize + logits)


def largest_steps(
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
        for i in range(max(1, sequences))
    )
    return StepPlan(step=-2, chunks=(prompt,)), StepPlan(step=-1, chunks=decodes, freed=(0,))
