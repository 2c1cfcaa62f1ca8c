"""A model's weights, one tensor at a time, whatever files they lie in."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from pippin.models.files import ModelFiles
from pippin.models.quant import QuantizedTensor, Tensor
from pippin.models.tensor import DenseTensor

__all__ = ["Checkpoint", "DenseTensor", "InParts", "QuantizedTensor", "Tensor", "open_checkpoint"]


class Checkpoint(Protocol):
    """Configuration and weights under the names that the model has on the hub.

    Opening reads headers only; ``tensor`` maps or unpacks one weight.
    """

    config: dict[str, Any]
    """As in config.json. Of a multimodal model, its text part; for GGUF, made from metadata."""
    quantization: str | None
    """E.g. ``gguf-q4_1``, ``gptq-4bit``, ``awq-4bit``, ``mlx-4bit``, ``fp8``. None: dense."""

    @property
    def num_parameters(self) -> int:
        """Weights before quantisation, counted from headers."""
        ...

    def names(self) -> frozenset[str]:
        """Hub parameter names (``model.layers.0.self_attn.q_proj.weight``).

        A quantised linear shows as its ``….weight``. Experts stand one by one
        (``model.layers.0.mlp.experts.7.up_proj.weight``) even where the file stacks them.
        ``lm_head.weight`` is absent when the embedding is used instead.
        """
        ...

    def tensor(self, name: str) -> Tensor:
        """One weight. Raises ``KeyError`` for a name that ``names`` lacks."""
        ...


@runtime_checkable
class InParts(Protocol):
    """A checkpoint that unpacks parts of weights by themselves (what is dense and stored so is a
    view of the mapped file anyway)."""

    def part(self, name: str, rows: slice | None, columns: slice | None) -> Tensor | None:
        """``[rows, columns]`` of a matrix, each with start and stop, or None where this one cannot
        be read in such parts. Raises ``KeyError`` for a name that ``names`` lacks."""
        ...


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Open a model's weights and check that they are complete.

    Raises ``ModelInvalid`` for corrupt, truncated or missing files and ``UnsupportedModel`` for a
    format that is not read here.
    """
    # Imported here, so that reading plain safetensors does not load the gguf library.
    if files.kind == "gguf":
        from pippin.models.gguf import GgufCheckpoint

        return GgufCheckpoint(files.path)
    from pippin.models.safetensors_dir import SafetensorsCheckpoint

    return SafetensorsCheckpoint(files.path)
