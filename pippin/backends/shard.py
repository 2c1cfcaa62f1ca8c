"""How a stage is cut inside its layers among the ranks of a tensor-parallel group.

Pure: decides which heads, columns and rows a rank has, from the configuration alone. Shared by all
backends.

    queries, keys, values    by heads (rows of the weight); a KV head that ranks share is on each
    output projection        by the same heads (columns), partial sums added over the group
    gate, up / down          by columns of the intermediate (rows / columns), sums added
    experts                  each one's intermediate, as above. Expert parallelism would leave ranks
                             idle: with 8 of 128 experts a token on 2 ranks, the busier one has 5.1
                             of them on average; this way each has half of every one, no token
                             travels, and the sum is the one that a dense layer needs anyway
    latent attention         by heads; the latent, its projection and its pages stand on each rank
    head, embedding          by rows of the vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pippin.backends.description import is_latent
from pippin.errors import ConfigError

#: Multiples that dense weights are cut at, the better first: vectors of kernels stay whole, and
#: rows begin where grouped products want them to (16 bytes).
_GRAINS = (16, 8)
#: Rows of the vocabulary that stay together.
_VOCAB_GRAIN = 64
#: Embeddings up to so many bytes stand whole on every rank, which saves a sum over the group.
_WHOLE_EMBEDDING = 64 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """[start, stop) of an axis."""

    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def times(self, width: int) -> Span:
        """The same part of an axis with ``width`` elements for each of this one's."""
        return Span(self.start * width, self.stop * width)

    def shift(self, offset: int) -> Span:
        return Span(self.start + offset, self.stop + offset)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of a model decides how it can be cut."""

    heads: int
    kv_heads: int | None
    """None for latent attention, which every rank keeps whole."""
    value_width: int
    """Columns of a head in the output projection."""
    intermediates: tuple[int, ...]
    """Widths of the kinds of feed-forward blocks: dense, one expert, shared experts."""
    vocab: int
    unit: int = 1
    """Columns of a quantised weight that cannot be parted; 1 where weights are dense."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one rank."""

    rank: int
    size: int
    heads: Span
    kv_heads: Span
    """Empty for latent attention."""
    unit: int = 1

    @property
    def first(self) -> bool:
        """Whether this rank adds what must be added once (biases)."""
        return self.rank == 0

    def columns(self, width: int) -> Span:
        """Of an intermediate of ``width`` columns."""
        return split(width, self.size, _grain(width, self.size, self.unit))[self.rank]

    def vocabulary(self, rows: int) -> tuple[Span, ...]:
        """Every rank's rows of a head or embedding of ``rows`` rows."""
        return split(rows, self.size, _VOCAB_GRAIN if rows >= 4 * _VOCAB_GRAIN * self.size else 1)


def sizes_of(config: Any, unit: int = 1) -> Sizes:
    """``config``: transformers' configuration (``description.read_config``)."""
    latent = is_latent(config)
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    expert = int(getattr(config, "moe_intermediate_size", None) or 0)
    shared = expert * int(getattr(config, "n_shared_experts", None) or 0)
    return Sizes(
        heads=heads,
        kv_heads=None if latent else int(config.num_key_value_heads),
        value_width=int(config.v_head_dim) if latent else head_dim,
        intermediates=tuple(w for w in (int(config.intermediate_size), expert, shared) if w),
        vocab=int(config.vocab_size),
        unit=unit,
    )


def make_shard(sizes: Sizes, rank: int, size: int) -> Shard:
    """Raises ``ConfigError``, naming the sizes that are possible, where ``size`` is not."""
    problem = _problem(sizes, size)
    if problem is not None:
        allowed = [str(n) for n in allowed_sizes(sizes)]
        listed = ", ".join(allowed[:-1]) + " or " + allowed[-1] if len(allowed) > 1 else "only 1"
        raise ConfigError(
            f"the model cannot be cut among {size} tensor-parallel ranks: {problem}",
            hint=f"--tensor-parallel-size can be {listed} for this model",
        )
    return Shard(
        rank=rank,
        size=size,
        heads=split(sizes.heads, size)[rank],
        kv_heads=_kv_heads(sizes.kv_heads, rank, size),
        unit=sizes.unit,
    )


def whole(sizes: Sizes) -> Shard:
    """All of the model: a stage without tensor parallelism."""
    return make_shard(sizes, 0, 1)


def allowed_sizes(sizes: Sizes) -> tuple[int, ...]:
    return tuple(n for n in range(1, sizes.heads + 1) if _problem(sizes, n) is None)


def split(count: int, size: int, grain: int = 1) -> tuple[Span, ...]:
    """``size`` neighbouring parts of [0, count), equal but for one ``grain``, whose multiples they
    begin at."""
    grains = -(-count // grain)
    borders = [min(count, grains * i // size * grain) for i in range(size + 1)]
    return tuple(Span(a, b) for a, b in pairwise(borders))


def splits_embedding(rows: int, width: int, itemsize: int, size: int) -> bool:
    """Whether ranks keep their own rows of the embedding only: by the bytes that this saves, at one
    more sum over the group a step."""
    return size > 1 and rows * width * itemsize > _WHOLE_EMBEDDING


def _kv_heads(kv_heads: int | None, rank: int, size: int) -> Span:
    if kv_heads is None:
        return Span(0, 0)
    if kv_heads >= size:
        return split(kv_heads, size)[rank]
    shared = rank * kv_heads // size
    return Span(shared, shared + 1)


def _problem(sizes: Sizes, size: int) -> str | None:
    """Why a model cannot be cut among ``size`` ranks."""
    if size == 1:
        return None
    kv_heads, unit = sizes.kv_heads, sizes.unit
    if sizes.heads % size:
        return f"its {sizes.heads} attention heads are not a multiple of {size}"
    if kv_heads is not None and kv_heads % size and size % kv_heads:
        return f"its {kv_heads} KV heads are neither a multiple nor a divisor of {size}"
    columns = sizes.heads // size * sizes.value_width
    if columns % unit:
        return (
            f"a rank's {columns} columns of the attention output are not whole groups of {unit}"
            " quantised weights"
        )
    for width in sizes.intermediates:
        if -(-width // _grain(width, size, unit)) < size:
            return f"an intermediate of {width} columns has too few groups of {unit}"
    if sizes.vocab < size:
        return f"its vocabulary has {sizes.vocab} tokens"
    return None


def _grain(width: int, size: int, unit: int) -> int:
    """What the columns of an intermediate are cut at: for equal parts where that can be."""
    if unit > 1:
        return unit
    for grain in _GRAINS:
        if width % (grain * size) == 0:
            return grain
    for grain in _GRAINS:
        if width % grain == 0 and width >= 2 * grain * size:
            return grain
    return 1 if width % _GRAINS[-1] else _GRAINS[-1]
