"""What a stage says of itself before any work is sent to it, and whether stages fit together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

#: Version of the messages between stages; raised whenever their meaning or layout changes.
PROTOCOL = 2


class Announcement(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Sent by both ends of a link as their first message."""

    protocol: int = PROTOCOL
    version: str
    """Pippin's."""
    rank: int
    """Place of the stage in the pipeline; the last one leads."""
    layers: tuple[int, int]
    """Layers [first, last) that the stage holds."""
    num_layers: int
    """Of the whole model."""
    hidden_size: int
    vocab_size: int
    dtype: str
    """Of the hidden states that travel: ``float32``, ``bfloat16`` or ``float16``."""
    fingerprint: str
    """Of the model: equal only if configuration and weights are."""
    backend: str
    device: str
    tensor_parallel_size: int = 1
    pid: int = 0


#: What all stages of a pipeline have in common, with the words and the way out for a message.
_COMMON = (
    ("protocol", "link protocol", "install the same Pippin on both machines"),
    ("version", "Pippin version", "install the same Pippin on both machines"),
    ("fingerprint", "model fingerprint", "give both the same model files and revision"),
    ("num_layers", "number of layers", "give both the same model files and revision"),
    ("hidden_size", "hidden size", "give both the same model files and revision"),
    ("vocab_size", "vocabulary", "give both the same model files and revision"),
    ("dtype", "dtype", "give both the same --dtype"),
)


def mismatch(a: Announcement, b: Announcement, *, follows: bool) -> str | None:
    """Why ``a`` and ``b`` cannot work together, None if they can.

    ``follows``: the layers of ``b`` must begin where those of ``a`` end. The link from the leader
    back to the first stage carries plans only and has no such rule.
    """
    for field, words, way_out in _COMMON:
        mine, theirs = getattr(a, field), getattr(b, field)
        if mine != theirs:
            return f"stage {a.rank} has {words} {mine}, stage {b.rank} has {theirs}: {way_out}"
    if a.rank == b.rank:
        return f"both ends say that they are stage {a.rank}"
    if follows and a.layers[1] != b.layers[0]:
        return (
            f"stage {a.rank} ends before layer {a.layers[1]}, but stage {b.rank}, which follows,"
            f" begins at layer {b.layers[0]}"
        )
    return None


def check_ring(stages: Sequence[Announcement]) -> str | None:
    """Why these stages, in the order in which the layers run, are not one whole pipeline.

    None if they are: ranks count up from 0, they agree on the model, the dtype, the protocol and
    the version, and hold every layer exactly once.
    """
    if not stages:
        return "a pipeline needs at least one stage"
    for place, stage in enumerate(stages):
        if stage.rank != place:
            return f"stage {stage.rank} stands at place {place} of the pipeline"
        first, last = stage.layers
        if not first < last:
            return f"stage {stage.rank} has no layers: [{first}, {last})"
    for before, after in pairwise(stages):
        reason = mismatch(before, after, follows=True)
        if reason is not None:
            return reason
    if stages[0].layers[0] != 0:
        return f"no stage has layer 0: the first begins at layer {stages[0].layers[0]}"
    end, whole = stages[-1].layers[1], stages[-1].num_layers
    if end != whole:
        return f"the last stage ends before layer {end}, but the model has {whole} layers"
    return None
