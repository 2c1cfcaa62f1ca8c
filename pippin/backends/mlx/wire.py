"""Hidden states between stages: MLX arrays to bytes and back."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from pippin.backends.base import HiddenStates
from pippin.backends.mlx.device import dtype_name
from pippin.errors import ProtocolError

#: NumPy has no bfloat16: its bits travel as integers.
_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def to_wire(hidden: mx.array) -> HiddenStates:
    """``hidden`` [T, hidden_size]; evaluates it. The bytes are the array's own memory."""
    name = dtype_name(hidden.dtype)
    rows, width = hidden.shape
    plain = mx.contiguous(hidden.view(mx.uint16) if name == "bfloat16" else hidden)
    bits = np.array(plain, copy=False).view(np.uint8).reshape(-1)
    return HiddenStates(name, (rows, width), bits.data)


def from_wire(hidden: HiddenStates, dtype: mx.Dtype) -> mx.array:
    """[T, hidden_size] in ``dtype``. A copy: the bytes belong to the link.

    Raises ``ProtocolError`` for a dtype that is none of a stage's.
    """
    kind = _NUMPY.get(hidden.dtype)
    if kind is None:
        raise ProtocolError(f"hidden states of dtype {hidden.dtype!r} are not known")
    array = mx.array(np.frombuffer(hidden.data, dtype=kind).reshape(hidden.shape))
    return (array.view(mx.bfloat16) if hidden.dtype == "bfloat16" else array).astype(dtype)
