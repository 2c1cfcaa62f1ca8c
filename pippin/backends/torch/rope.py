"""Rotary embeddings, evaluated for each sequence by its own length.

transformers computes the frequencies (``ROPE_INIT_FUNCTIONS``); here they are applied, because its
own modules pick them by the largest position of a batch and keep state between calls.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pippin.backends.torch.batch import Batch


class Rope:
    """cos and sin for one kind of layers."""

    def __init__(
        self, rotary: torch.nn.Module, config: Any, layer_type: str | None, device: torch.device
    ) -> None:
        """``rotary``: the model's own rotary module, made on the CPU."""
        prefix = f"{layer_type}_" if layer_type else ""
        kinds: Any = rotary.rope_type
        self._kind: str = kinds[layer_type] if layer_type else kinds
        self._config = config
        self._layer_type = layer_type
        self._device = device
        inv_freq: torch.Tensor = getattr(rotary, f"{prefix}inv_freq")
        self._inv_freq = inv_freq.float().to(device)
        self._scaling = float(getattr(rotary, f"{prefix}attention_scaling"))
        parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
        self._original = parameters.get("original_max_position_embeddings")
        self._long = None
        if self._kind == "longrope":
            self._long = self._frequencies(self._original + 1)

    def angles(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [T, rotary_dim / 2], scaled as the variant asks."""
        angles = batch.positions[:, None].float() * self._row_frequencies(batch)
        return angles.cos() * self._scaling, angles.sin() * self._scaling

    def _row_frequencies(self, batch: Batch) -> torch.Tensor:
        """[T or 1, rotary_dim / 2]."""
        if self._long is not None:
            return self._choose(batch, lambda length: length > self._original, lambda _: self._long)
        if self._kind == "dynamic":
            longest = self._config.max_position_embeddings
            return self._choose(batch, lambda length: length > longest, self._frequencies)
        return self._inv_freq[None]

    def _choose(self, batch: Batch, is_long: Any, frequencies: Any) -> torch.Tensor:
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


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate ``x`` [T, heads, d] in place: its first ``2 * cos.shape[-1]`` columns, half against
    half. ``cos``, ``sin``: [T, 1, rotary_dim / 2], of x's dtype."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = first * cos
    turned.addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)
