"""Looking at rows of logits without sorting them.

A row is seen as *lanes*: lane ``l`` of ``n`` holds tokens ``l, l + n, l + 2n, …``, sixteen at most,
so that the largest logits of all lanes are a few vectorised passes over memory. What asks for a
row's best tokens then looks into those lanes only whose largest logit shows that it must.

The order of a row's tokens, here and wherever it matters, is: logit falling, id rising.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

_INFINITY = float("inf")
_LANE = 16
#: So many more of a row's best tokens than wanted mostly hold all that are tied with the last one.
TIES = 16
#: Elements of the logits that are worked on at once, which bounds what is kept beside them.
_CPU_ELEMENTS = 1 << 21
_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Looked:
    """Logits with the largest of each lane and each row."""

    x: Tensor
    """float32 [rows, vocab_size], contiguous."""
    maxima: Tensor
    """[rows, lanes]"""
    top: Tensor
    """[rows, 1]"""


class Lanes:
    """The lanes of rows of ``vocab_size`` logits on one device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.count = -(-vocab_size // _LANE)
        self.size = -(-vocab_size // self.count)
        #: Most rows that should be worked on at once.
        self.most_rows = max(
            1, (_CPU_ELEMENTS if device.type == "cpu" else _ELEMENTS) // vocab_size
        )
        self._offsets = torch.arange(self.size, device=device) * self.count
        self._kept: dict[str, Tensor] = {}

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        """Bring an array to the device."""
        return torch.from_numpy(array).to(self.device)

    def keep(self, name: str, rows: int) -> Tensor:
        """A float32 array [rows, vocab_size] that is kept from step to step, contents undefined.

        Fresh memory of this size would be given back to the system and faulted in again each time,
        which costs more than the arithmetic does.
        """
        kept = self._kept.get(name)
        if kept is None or len(kept) < rows:
            kept = torch.empty((rows, self.vocab_size), dtype=torch.float32, device=self.device)
            self._kept[name] = kept
        return kept[:rows]

    def look(self, x: Tensor) -> Looked:
        """``x``: float32 [rows, vocab_size], contiguous."""
        maxima = self.fold(x, Tensor.amax, torch.maximum)
        return Looked(x, maxima, maxima.amax(1, keepdim=True))

    def fold(self, x: Tensor, reduce: Callable[..., Tensor], join: Callable[..., Tensor]) -> Tensor:
        """Reduce every lane: [rows, vocab_size] -> [rows, lanes]."""
        whole = (self.size - 1) * self.count
        rest = x[:, whole:]
        if not whole:
            return rest.clone()
        folded = reduce(x[:, :whole].view(len(x), -1, self.count), 1)
        part = folded[:, : rest.shape[1]]
        join(part, rest, out=part)
        return folded

    def ids(self, lane: Tensor) -> Tensor:
        """Token ids in each of ``lane``, the vocabulary's last one again past it. [n, size]."""
        return (lane[:, None] + self._offsets).clamp_(max=self.vocab_size - 1)

    def elements(self, x: Tensor, row: Tensor, lane: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and logits in ``lane[i]`` of ``row[i]``, each token once. [n, size] each.

        Past the vocabulary, logits are -inf.
        """
        ids = self.ids(lane)
        values = x.view(-1)[row[:, None] * self.vocab_size + ids]
        if self.size * self.count > self.vocab_size:
            values.masked_fill_(lane[:, None] + self._offsets >= self.vocab_size, -_INFINITY)
        return ids, values

    def first(self, looked: Looked, rows: Tensor) -> Tensor:
        """The first token of each of ``rows``: the most likely one. [rows]."""
        top = some(looked.top, rows)
        row, lane = (some(looked.maxima, rows) == top).nonzero(as_tuple=True)
        ids, values = self.elements(looked.x, rows[row], lane)
        return self.lowest(ids, values, row, top[:, 0])

    def lowest(self, ids: Tensor, values: Tensor, row: Tensor, best: Tensor) -> Tensor:
        """The lowest id in each row whose value is that row's ``best``. [rows]."""
        # Ids as float32, exact below 2**24: quick on the CPU, and known to every device's scatter.
        past = float(self.vocab_size)
        marked = ids.float().masked_fill_(values != best[row, None], past).amin(1)
        lowest = torch.full((len(best),), past, device=self.device)
        return lowest.scatter_reduce_(0, row, marked, "amin").long()

    def best(self, looked: Looked, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The ``count`` largest logits of each of ``rows`` and their ids, in order.

        Of tokens tied with the last one, any may be missing. [rows, count] each.
        """
        if self.count >= 2 * count:
            # These lanes' maxima are ``count`` logits already, so no other lane has a larger one.
            lane = some(looked.maxima, rows).topk(count, 1, sorted=False).indices
            row = rows.repeat_interleave(count)
            ids, values = self.elements(looked.x, row, lane.reshape(-1))
            values = values.view(len(rows), count * self.size)
            values, place = values.topk(count, 1, sorted=False)
            ids = ids.view(len(rows), count * self.size).gather(1, place)
        else:
            values, ids = looked.x[rows].topk(count, 1, sorted=False)
        ids, place = ids.sort(1)
        values, place = values.gather(1, place).sort(dim=1, descending=True, stable=True)
        return values, ids.gather(1, place)

    def count_above(self, looked: Looked, values: Tensor) -> Tensor:
        """How many logits of each row are above ``values`` [rows, 1]. int64 [rows]."""
        row, lane = (looked.maxima > values).nonzero(as_tuple=True)
        _, logits = self.elements(looked.x, row, lane)
        counts = torch.zeros(len(values), device=self.device)
        return counts.scatter_add_(0, row, (logits > values[row]).float().sum(1)).long()


def some(x: Tensor, rows: Tensor) -> Tensor:
    """``x[rows]`` for rising ``rows``, without a copy where these are all rows."""
    return x if len(rows) == len(x) else x[rows]
