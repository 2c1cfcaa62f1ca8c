"""A GGUF model (one file or split) as a ``Checkpoint`` under the hub's names."""

from __future__ import annotations

import math
from pathlib import Path

from gguf.constants import GGMLQuantizationType, LlamaFileType

from pippin.errors import ModelInvalid, UnsupportedModel
from pippin.models.gguf_blocks import in_blocks, read
from pippin.models.gguf_config import make_config, read_metadata
from pippin.models.gguf_file import GgufFile, split_files
from pippin.models.gguf_names import recipes
from pippin.models.quant import Tensor

_FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


class GgufCheckpoint:
    """See ``checkpoint.Checkpoint``. ``path`` is the file, or the first part of a split model."""

    def __init__(self, path: Path) -> None:
        self._meta = read_metadata([GgufFile(part) for part in split_files(path)])
        self.config = make_config(self._meta)
        try:
            self._recipes = recipes(self._meta.architecture, self.config, self._meta.tensors)
        except KeyError as error:
            raise UnsupportedModel(
                f"{path}: tensor {error.args[0]!r} is unknown in architecture"
                f" {self._meta.architecture!r}",
                hint="the file was made by a newer or changed converter; choose another one",
            ) from error
        self.quantization = self._quantization()
        self._check_layers(path)

    @property
    def num_parameters(self) -> int:
        used = {source for recipe in self._recipes.values() for source in recipe.sources}
        return sum(math.prod(self._meta.tensors[source].shape) for source in used)

    def names(self) -> frozenset[str]:
        return frozenset(self._recipes)

    def tensor(self, name: str) -> Tensor:
        recipe = self._recipes[name]
        try:
            return recipe(self._meta.tensors)
        except ValueError as error:
            raise ModelInvalid(
                f"{self._meta.path}: {', '.join(recipe.sources)} do not fit the metadata: {error}",
                hint="fetch the file again, or choose another one",
            ) from error

    def part(self, name: str, rows: slice | None, columns: slice | None) -> Tensor | None:
        """See ``checkpoint.InParts``."""
        recipe = self._recipes[name]
        tensor = self._meta.tensors[recipe.sources[0]]
        matrix = len(tensor.shape) == (2 if recipe.expert is None else 3)
        if recipe.make is not None or not matrix:
            return None
        if columns is not None and not in_blocks(tensor, columns):
            return None
        return read(tensor, recipe.expert, rows, columns)

    def _quantization(self) -> str | None:
        kinds = {tensor.kind for tensor in self._meta.tensors.values()}
        if kinds <= set(_FLOATS):
            return None
        number = self._meta.values.get("general.file_type")
        if number in {int(kind) for kind in LlamaFileType}:
            return "gguf-" + str(LlamaFileType(number).name).lower().removeprefix("mostly_")
        sizes: dict[str, int] = {}
        for tensor in self._meta.tensors.values():
            sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + tensor.nbytes
        return "gguf-" + max(sizes, key=lambda kind: sizes[kind]).lower()

    def _check_layers(self, path: Path) -> None:
        count = self.config["num_hidden_layers"]
        for layer in range(count):
            if f"model.layers.{layer}.input_layernorm.weight" not in self._recipes:
                raise ModelInvalid(
                    f"{path}: layer {layer} of {count} is missing",
                    hint="fetch the whole file again",
                )
