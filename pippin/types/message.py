"""Messages between the API process and an engine's leader: msgpack over one ZeroMQ stream.

Client to leader: ``Hello``, ``Add``, ``Abort``, ``Shutdown``. Leader to client: ``Ready`` or
``Failed`` as the answer to ``Hello``, then one ``StepOutputs`` for every step that has something
for this client.
"""

from __future__ import annotations

import msgspec

from pippin.types.request import Request, SequenceOutput
from pippin.types.step import SchedulerStats


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Asks for ``Ready``; the answer comes when the model is loaded."""


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    requests: list[Request]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Finish nothing, free everything, end the process."""


class StageInfo(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One stage of the pipeline, as it stands in ``GET /api/cluster``."""

    rank: int
    node: str
    pid: int
    layers: tuple[int, int]
    """[first, last)."""
    backend: str
    device: str
    weights_bytes: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="ready"):
    """The engine is loaded. All that the API process must know of it."""

    pid: int
    model_name: str
    architecture: str
    num_layers: int
    vocab_size: int
    max_model_len: int
    max_model_len_note: str | None
    """Why the length is shorter than the model's own, None where it is not."""
    num_blocks: tuple[int, ...]
    block_size: int
    kv_tokens: int
    """Capacity of the KV cache in tokens."""
    kv_bytes: int
    weights_bytes: int
    dtype: str
    quantization: str | None
    backend: str
    backend_reason: str
    device: str
    load_seconds: float
    stages: tuple[StageInfo, ...] = ()
    """In the order of their layers; the last one leads."""


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    outputs: list[SequenceOutput]
    stats: SchedulerStats


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The engine cannot start or go on."""

    error: str
    code: str
    hint: str | None
    exit_code: int = 1


ToEngine = Hello | Add | Abort | Shutdown
FromEngine = Ready | StepOutputs | Failed
