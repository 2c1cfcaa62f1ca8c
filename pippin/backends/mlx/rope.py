"""Rotary embeddings, evaluated for each sequence by its own length.

mlx-lm's rope modules see positions only; longrope and dynamic scaling depend on how long a sequence
is, so one module of ours takes the place of them all. Frequencies follow transformers'
``modeling_rope_utils`` (which needs torch, and is therefore not called here).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.batch import Batch
from pippin.errors import UnsupportedModel
from pippin.models.tensor import FloatArray


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """One kind of rotary embedding of a model."""

    kind: str
    parameters: dict[str, Any]
    head_dim: int
    max_position_embeddings: int

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.parameters.get("partial_rotary_factor", 1.0))

    @property
    def original(self) -> int:
        """Length in training, where the variant scales beyond it."""
        named = self.parameters.get("original_max_position_embeddings")
        return int(named or self.max_position_embeddings)

    @property
    def factor(self) -> float:
        named = self.parameters.get("factor")
        return float(self.max_position_embeddings / self.original if named is None else named)

    def depends_on(self, length: int) -> bool:
        """Whether a sequence of this length has frequencies of its own."""
        limit = {"longrope": self.original, "dynamic": self.max_position_embeddings}
        return length > limit.get(self.kind, length)

    def inverse_frequencies(self, length: int) -> FloatArray:
        """[rotary_dim / 2], for a sequence of ``length`` tokens."""
        dim, base = self.rotary_dim, float(self.parameters["rope_theta"])
        exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
        match self.kind:
            case "linear":
                inverse = _inverse(base, exponents)
                return np.asarray(inverse / self.factor, dtype=np.float32)
            case "dynamic":
                most = max(length, self.max_position_embeddings)
                stretch = self.factor * most / self.max_position_embeddings - (self.factor - 1)
                return _inverse(base * float(stretch ** (dim / (dim - 2))), exponents)
            case "llama3":
                return self._llama3(_inverse(base, exponents))
            case "yarn":
                return self._yarn(_inverse(base, exponents), base)
            case "longrope":
                name = "long_factor" if self.depends_on(length) else "short_factor"
                factors = np.array(self.parameters[name], dtype=np.float32)
                return np.asarray(_inverse(base, exponents) / factors, dtype=np.float32)
        return _inverse(base, exponents)

    def attention_scaling(self) -> float:
        """Factor of rotated queries and keys."""
        named = self.parameters.get("attention_factor")
        if self.kind not in ("yarn", "longrope") or named is not None:
            return float(named or 1.0)
        if self.kind == "yarn":
            scale, scale_all = (self.parameters.get(k) for k in ("mscale", "mscale_all_dim"))
            if scale and scale_all:
                return yarn_scale(self.factor, scale) / yarn_scale(self.factor, scale_all)
            return yarn_scale(self.factor, 1.0)
        if self.factor <= 1.0:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original))

    def _llama3(self, inverse: FloatArray) -> FloatArray:
        low, high = self.parameters["low_freq_factor"], self.parameters["high_freq_factor"]
        wavelength = 2 * np.float32(math.pi) / inverse
        smooth = (self.original / wavelength - low) / (high - low)
        between = (1 - smooth) * inverse / self.factor + smooth * inverse
        scaled = np.where(wavelength > self.original / low, inverse / self.factor, inverse)
        medium = (wavelength >= self.original / high) & (wavelength <= self.original / low)
        return np.asarray(np.where(medium, between, scaled), dtype=np.float32)

    def _yarn(self, inverse: FloatArray, base: float) -> FloatArray:
        dim = self.rotary_dim

        def correction(rotations: float) -> float:
            return (dim * math.log(self.original / (rotations * 2 * math.pi))) / (
                2 * math.log(base)
            )

        low = correction(self.parameters.get("beta_fast") or 32)
        high = correction(self.parameters.get("beta_slow") or 1)
        if self.parameters.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
        return np.asarray(inverse / self.factor * ramp + inverse * (1 - ramp), dtype=np.float32)


_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def settings_of(config: Any, layer: int, head_dim: int) -> RopeSettings:
    """Of one layer. Raises ``UnsupportedModel`` for a variant that is not known here."""
    parameters: dict[str, Any] = config.rope_parameters
    if "rope_type" not in parameters:
        parameters = parameters[config.layer_types[layer]]
    kind = parameters.get("rope_type", "default")
    if kind not in _KINDS:
        raise UnsupportedModel(f"rope type {kind!r} is not supported by the MLX backend")
    return RopeSettings(kind, dict(parameters), head_dim, config.max_position_embeddings)


def yarn_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


class Rope:
    """Stands where mlx-lm's attention has its ``rope``. Shared by layers with the same settings."""

    def __init__(self, settings: RopeSettings, *, interleaved: bool) -> None:
        """``interleaved``: pairs are neighbours, not halves (DeepSeek)."""
        self._settings = settings
        self._interleaved = interleaved
        self._dims = settings.rotary_dim
        self._scaling = settings.attention_scaling()
        self._usual = settings.inverse_frequencies(0)
        # mx.fast.rope divides by these.
        self._periods = mx.array(1.0 / self._usual)
        self._angles: mx.array | None = None

    def begin(self, batch: Batch) -> None:
        """Look whether a sequence of this step has frequencies of its own."""
        self._angles = None
        if not any(self._settings.depends_on(length) for _, _, length in batch.lengths):
            return
        rows = np.tile(self._usual, (batch.lengths[-1][1], 1))
        for first, end, length in batch.lengths:
            if self._settings.depends_on(length):
                rows[first:end] = self._settings.inverse_frequencies(length)
        self._angles = batch.positions[:, None].astype(mx.float32) * mx.array(rows)

    def __call__(self, x: mx.array, offset: mx.array) -> mx.array:
        """``x`` [T, heads, 1, d] at positions ``offset`` [T]; rotates its first columns."""
        if self._angles is not None:
            return self._rotate(x, self._angles[:, None, None])
        if self._scaling != 1.0:
            if self._dims == x.shape[-1]:
                x = x * self._scaling
            else:
                head, tail = x[..., : self._dims], x[..., self._dims :]
                x = mx.concatenate([head * self._scaling, tail], axis=-1)
        return mx.fast.rope(
            x,
            self._dims,
            traditional=self._interleaved,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._periods,
        )

    def _rotate(self, x: mx.array, angles: mx.array) -> mx.array:
        """With angles [T, 1, 1, rotary_dim / 2] that differ in more than the position."""
        cos, sin = mx.cos(angles) * self._scaling, mx.sin(angles) * self._scaling
        head = x[..., : self._dims].astype(mx.float32)
        if self._interleaved:
            first, second = head[..., ::2], head[..., 1::2]
        else:
            first, second = head[..., : self._dims // 2], head[..., self._dims // 2 :]
        pair = [first * cos - second * sin, second * cos + first * sin]
        if self._interleaved:
            turned = mx.stack(pair, axis=-1).reshape(head.shape)
        else:
            turned = mx.concatenate(pair, axis=-1)
        return mx.concatenate([turned.astype(x.dtype), x[..., self._dims :]], axis=-1)


def _inverse(base: float, exponents: FloatArray) -> FloatArray:
    return np.asarray(1.0 / np.float32(base) ** exponents, dtype=np.float32)
