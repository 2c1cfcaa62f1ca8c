"""What a model is, in numbers that people compare models by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pippin.models.checkpoint import open_checkpoint
from pippin.models.files import ModelFiles
from pippin.models.gguf_file import split_files


@dataclass(frozen=True, slots=True)
class ModelFacts:
    name: str
    path: Path
    architecture: str | None
    parameters: int
    quantization: str | None
    """None: the weights are dense."""
    context_length: int | None
    """In tokens."""
    size_bytes: int
    """Of the weight files."""
    layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    experts: int | None
    experts_per_token: int | None
    fingerprint: str


def describe(files: ModelFiles) -> ModelFacts:
    """Read a model's headers. Raises what ``open_checkpoint`` raises."""
    checkpoint = open_checkpoint(files)
    config = checkpoint.config
    if files.kind == "gguf":
        weights = split_files(files.path)
    else:
        weights = list(files.path.glob("*.safetensors"))
    experts = (config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    return ModelFacts(
        name=files.name,
        path=files.path,
        architecture=next(iter(config.get("architectures") or ()), None),
        parameters=checkpoint.num_parameters,
        quantization=checkpoint.quantization,
        context_length=config.get("max_position_embeddings"),
        size_bytes=sum(file.stat().st_size for file in weights),
        layers=config.get("num_hidden_layers"),
        hidden_size=config.get("hidden_size"),
        vocab_size=config.get("vocab_size"),
        experts=next((count for count in experts if count), None),
        experts_per_token=config.get("num_experts_per_tok"),
        fingerprint=files.fingerprint,
    )
