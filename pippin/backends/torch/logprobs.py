"""Log probabilities of sampled and prompt tokens, from raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pippin.backends.sampler import LOWEST_LOGPROB
from pippin.backends.torch.lanes import TIES, Lanes
from pippin.types.request import Logprobs


def report(lanes: Lanes, x: Tensor, tokens: Tensor, tops: Sequence[int]) -> list[Logprobs]:
    """``tokens[i]`` and the ``tops[i]`` most likely tokens of row ``i``.

    ``x``: raw logits, float32 [rows, vocab_size], contiguous; ``tokens``: int64 [rows].
    """
    looked = lanes.look(x)
    weights = torch.sub(x, looked.top, out=lanes.keep("scratch", len(x))).exp_()
    normaliser = looked.top + weights.sum(1, keepdim=True).log_()
    own = x.gather(1, tokens[:, None])
    ranks: list[int] = (lanes.count_above(looked, own) + 1).tolist()
    rows = torch.arange(len(x), device=lanes.device)
    values, ids = lanes.best(looked, rows, min(max(tops) + TIES, lanes.vocab_size))
    shown = torch.cat((own, values), 1) - normaliser
    # Neither -inf nor NaN (of broken logits) may reach a client's JSON.
    shown = shown.nan_to_num_(nan=LOWEST_LOGPROB).clamp_(min=LOWEST_LOGPROB)
    logprobs: list[list[float]] = shown.tolist()
    named: list[list[int]] = torch.cat((tokens[:, None], ids), 1).tolist()
    return [
        Logprobs(named[r][: 1 + top], logprobs[r][: 1 + top], ranks[r])
        for r, top in enumerate(tops)
    ]
