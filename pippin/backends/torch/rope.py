"""Rotary embeddings, evaluated for each sequence by its own length.

transformers computes the frequencies (``ROPE_INIT_FUNCTIONS``); here they are applied, because its
own modules pick them by the largest position of a batch and keep state between calls.

A head's rotary columns come in one of two orders. ``halves`` is the checkpoints': column ``i``
turns with column ``i + rotary_dim / 2``. ``pairs`` puts the two side by side, as one complex
number, so that turning is one multiplication; the weights of queries and keys are reordered at
load, and their dot products stay the same. Used in
float32, whose complex numbers torch multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pippin.backends.torch.batch import Batch


class Rotation:
    """The turns of a step's tokens."""

    def __init__(self, turns: torch.Tensor, dtype: torch.dtype) -> None:
        """``turns``: complex64 [T, 1, rotary_dim / 2]."""
        self.turns = turns
        self._pairs = uses_pairs(dtype)
        self._cos, self._sin = turns.real.to(dtype), turns.imag.to(dtype)

    def __call__(self, x: torch.Tensor) -> None:
        """Turn the first ``rotary_dim`` columns of ``x`` [T, heads, d] in place."""
        half = self.turns.shape[-1]
        if self._pairs:
            if 2 * half != x.shape[-1]:
                x = x[..., : 2 * half]
            x.view(torch.complex64).mul_(self.turns)
            return
        first, second = x[..., :half], x[..., half : 2 * half]
        turned = first * self._cos
        turned.addcmul_(second, self._sin, value=-1)
        second.mul_(self._cos).addcmul_(first, self._sin)
        first.copy_(turned)


class Rope:
    """The angles of one kind of layers."""

    def __init__(
        self,
        rotary: torch.nn.Module,
        config: Any,
        layer_type: str | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """``rotary``: the model's own rotary module, made on the CPU."""
        prefix = f"{layer_type}_" if layer_type else ""
        kinds: Any = rotary.rope_type
        self._kind: str = kinds[layer_type] if layer_type else kinds
        self._config = config
        self._layer_type = layer_type
        self._device = device
        self._dtype = dtype
        inv_freq: torch.Tensor = getattr(rotary, f"{prefix}inv_freq")
        self._inv_freq = inv_freq.float().to(device)
        self._scaling = float(getattr(rotary, f"{prefix}attention_scaling"))
        parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
        self._original = parameters.get("original_max_position_embeddings")
        self._long = None
        if self._kind == "longrope":
            self._long = self._frequencies(self._original + 1)

    @property
    def rotary_dim(self) -> int:
        """Columns of a head that turn."""
        return 2 * self._inv_freq.shape[0]

    def rotation(self, batch: Batch) -> Rotation:
        """Evaluated in float32, scaled as the variant asks."""
        angles = batch.positions[:, None].float() * self._row_frequencies(batch)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        if self._scaling != 1.0:
            cos, sin = cos * self._scaling, sin * self._scaling
        return Rotation(torch.complex(cos, sin), self._dtype)

    def _row_frequencies(self, batch: Batch) -> torch.Tensor:
        """[T or 1, rotary_dim / 2]."""
        if self._long is not None:
            long = self._long
            return self._choose(batch, lambda length: length > self._original, lambda _: long)
        if self._kind == "dynamic":
            longest = self._config.max_position_embeddings
            return self._choose(batch, lambda length: length > longest, self._frequencies)
        return self._inv_freq[None]

    def _choose(
        self,
        batch: Batch,
        is_long: Callable[[int], bool],
        frequencies: Callable[[int], torch.Tensor],
    ) -> torch.Tensor:
        if not any(is_long(length) for _, _, length in batch.lengths):
            return self._inv_freq[None]
        rows = self._inv_freq.repeat(batch.positions.shape[0], 1)
        for first, end, length in batch.lengths:
            if is_long(length):
                rows[first:end] = frequencies(length)
        return rows

    def _frequencies(self, length: int) -> torch.Tensor:
        inv_freq, _ = ROPE_INIT_FUNCTIONS[self._kind](
            self._config, torch.device("cpu"), seq_len=length, layer_type=self._layer_type
        )
        result: torch.Tensor = inv_freq.float().to(self._device)
        return result


def uses_pairs(dtype: torch.dtype) -> bool:
    """Whether rotary columns are in pairs."""
    return dtype == torch.float32


def pairs_from_halves(heads: int, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """[heads * head_dim]: a projection's rows in ``halves`` order, listed in ``pairs`` order."""
    one = torch.arange(head_dim)
    one[:rotary_dim] = one[:rotary_dim].view(2, -1).t().reshape(-1)
    return (torch.arange(heads)[:, None] * head_dim + one).reshape(-1)
