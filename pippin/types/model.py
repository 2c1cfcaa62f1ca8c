"""Facts about a model that the engine, the planner and the server share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class KVKind(StrEnum):
    """How a group of layers keeps its context."""

    FULL = "full"
    WINDOW = "window"
    LATENT = "latent"
    STATE = "state"
    """Recurrent state. No backend runs it yet; the groups leave it a place."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table."""

    kind: KVKind
    layers: tuple[int, ...]
    """Absolute layer numbers."""
    bytes_per_token: int
    """Of all layers of the group together."""
    window: int | None = None
    """WINDOW only: a token sees itself and the ``window - 1`` before it."""

    def __post_init__(self) -> None:
        if (self.kind is KVKind.WINDOW) != (self.window is not None):
            raise ValueError("a window group, and no other, has a window")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded stage says of its model."""

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    """Rows of the head: token ids are in [0, vocab_size)."""
    max_position_embeddings: int
    """The model's own context length."""
    dtype: str
    """Of the activations: ``float32``, ``bfloat16`` or ``float16``."""
    quantization: str | None
    """Kind of the weights kept in memory, None where they are dense."""
    weights_bytes: int
    fingerprint: str
    """Hash of configuration and weights' identity: salts the prefix cache."""
    kv_groups: tuple[KVGroup, ...]
    rope_switch: int | None = None
    """Longrope: a sequence of more tokens than this turns all its positions otherwise, so what was
    computed for a shorter one is of no use to it."""
