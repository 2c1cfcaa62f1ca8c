"""What a rank is told before it starts, and what stages tell each other before and beside work.

A rank is one process: one stage, or one of several that share a stage's layers (tensor parallel).
Each listens at one address, its inbox: rank 0 of a stage for the stage before it (stage 0 for the
leader), the others for their stage's rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pippin.backends.base import GroupSpec
from pippin.config import Config
from pippin.transport.keys import CurveKeys, derive_keys
from pippin.types.model import KVGroup


class StageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. Travels as one line of JSON."""

    config: Config
    """As this rank shall load it: device and share of the memory may differ between ranks."""
    backend: str
    stage: int
    num_stages: int
    layers: tuple[int, int]
    """[first, last)."""
    group: GroupSpec | None = None
    """None where the stage is one process."""
    cpus: tuple[int, ...] = ()
    """Cores to run on; empty: leave that to the system."""
    inbox: str | None = None
    """Address to listen at; None: nobody sends (a single stage's rank 0)."""
    next: str | None = None
    """Inbox of the next stage's rank 0; only for ranks 0, None at the end of a ring of one."""
    followers: tuple[str, ...] = ()
    """Inboxes of the other ranks of the stage; only for its rank 0."""
    node: str | None = None
    """Where it runs, for logs and errors; None: this machine."""
    secret: str | None = None
    """What the links' keys are made of; None: plain, on this machine."""

    @property
    def group_rank(self) -> int:
        return self.group.rank if self.group is not None else 0

    @property
    def name(self) -> str:
        """For logs and errors: ``stage 0 (layers 0-16)``."""
        first, last = self.layers
        rank = f", rank {self.group_rank}" if self.group is not None else ""
        where = f" on {self.node}" if self.node is not None else ""
        return f"stage {self.stage} (layers {first}-{last - 1}{rank}){where}"

    @property
    def keys(self) -> CurveKeys | None:
        return None if self.secret is None else derive_keys(self.secret)

    def __repr__(self) -> str:
        return f"<{self.name}>"  # never the secret


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the leader's process is told. Travels as one line of JSON."""

    config: Config
    rank: StageSpec | None = None
    """The leader's own, where somebody else starts the other ranks; None: it does that itself."""
    peers: dict[str, str] = {}
    """Who is at the other end of the link at an address, for errors."""


class StageFacts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a stage says of itself when it is loaded; of all its ranks together."""

    stage: int
    node: str
    pid: int
    """Of rank 0."""
    layers: tuple[int, int]
    backend: str
    device: str
    weights_bytes: int
    available_kv_bytes: int
    """Of the rank that has least."""
    kv_groups: tuple[KVGroup, ...]


class Gather(msgspec.Struct, frozen=True, array_like=True, tag="gather"):
    """Goes round; each stage adds itself."""

    stages: tuple[StageFacts, ...]


class Allocate(msgspec.Struct, frozen=True, array_like=True, tag="allocate"):
    """Goes round when it is known how many blocks fit everywhere; back when all have them."""

    num_blocks: tuple[int, ...]
    block_size: int


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """How busy a stage was of late; goes on to the leader."""

    stage: int
    busy_ratio: float
    delay: float
    """Seconds of the link to it, one way."""


Note = Gather | Allocate | Report

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Note)


def encode_note(note: Note) -> bytes:
    return _encoder.encode(note)


def decode_note(body: bytes) -> Note:
    """Raises ``msgspec.DecodeError``."""
    return _decoder.decode(body)


@dataclass(frozen=True, slots=True)
class StageLoss:
    """A process that ended, as far as its parent knows."""

    name: str
    pid: int
    status: int

    def __str__(self) -> str:
        how = (
            f"was killed by signal {-self.status}"
            if self.status < 0
            else f"ended with status {self.status}"
        )
        return f"{self.name}, process {self.pid}, {how}"
