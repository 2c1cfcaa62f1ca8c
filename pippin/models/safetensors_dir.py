"""A directory with config.json and safetensors files as a ``Checkpoint`` under the hub's names."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pippin.errors import ModelInvalid, UnsupportedModel
from pippin.models import packed
from pippin.models.hub_config import Quantization, quantization_of, read_json, text_config
from pippin.models.quant import Tensor
from pippin.models.safetensors_file import SafetensorsFile
from pippin.models.tensor import DenseTensor, FloatArray

INDEX = "model.safetensors.index.json"
_REFETCH = "fetch the model again"
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")
_PARTS = {
    "gptq": (".qweight", (".qweight", ".qzeros", ".scales", ".g_idx")),
    "awq": (".qweight", (".qweight", ".qzeros", ".scales")),
    "mlx": (".scales", (".weight", ".scales", ".biases")),
    "compressed-tensors": (
        ".weight_packed",
        (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"),
    ),
    "fp8": (".weight_scale_inv", (".weight", ".weight_scale_inv", ".input_scale")),
    "fp8-rows": (".weight_scale", (".weight", ".weight_scale", ".input_scale")),
    "mxfp4": ("_blocks", ("_blocks", "_scales")),
}
"""Per method: the suffix that marks a quantised module, and all suffixes that belong to it."""
_PACKED = (".qweight", ".scales", ".absmax", ".weight_packed", ".weight_scale", "_scale_inv")
_VISION = ("vision", "visual", "multi_modal_projector", "mm_projector", "audio", "image_newline")


@dataclass(frozen=True, slots=True)
class _Source:
    """Where one hub parameter comes from."""

    module: str
    """Stored name without the suffix."""
    suffix: str
    """``.weight`` and the like; not used where ``quantized``."""
    quantized: bool
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class MlxPacked:
    """A quantised weight as MLX's kernels take it; experts are one stack."""

    words: DenseTensor
    """uint32 [..., out, in * bits / 32]"""
    scales: DenseTensor
    biases: DenseTensor | None
    bits: int
    group_size: int
    mode: str


class SafetensorsCheckpoint:
    """See ``checkpoint.Checkpoint``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        whole = read_json(path / "config.json")
        self.config = text_config(whole)
        self._method: Quantization = quantization_of(self.config, path)
        self.quantization = self._method.label()
        self._files = _open_files(path)
        self._file_of = _index(self._files)
        self._refuse_unnamed_packing()
        self._sources = self._find_sources(multimodal=self.config is not whole)
        self._check_layers()

    @property
    def num_parameters(self) -> int:
        return sum(self._count(source) for source in self._sources.values())

    def names(self) -> frozenset[str]:
        return frozenset(self._sources)

    def tensor(self, name: str) -> Tensor:
        source = self._sources[name]
        if not source.quantized:
            return self._stored(source.module + source.suffix, source.expert)
        try:
            return self._quantized(source)
        except ValueError as error:
            raise ModelInvalid(
                f"{self._path}: quantised weight {source.module!r} is corrupt: {error}",
                hint=_REFETCH,
            ) from error

    def part(self, name: str, rows: slice | None, columns: slice | None) -> Tensor | None:
        """See ``checkpoint.InParts``. Only MLX's affine packing is read so."""
        source = self._sources[name]
        module = source.module
        if not source.quantized or self._method.method != "mlx":
            return None
        if self._method.mlx_mode(module) != "affine":
            return None
        group = self._method.mlx_group_size(module)
        parts = [
            self._stored(module + suffix, source.expert)
            for suffix in (".weight", ".scales", ".biases")
        ]
        words, scales, biases = (
            part if rows is None else part.rows(rows.start, rows.stop) for part in parts
        )
        if columns is not None:
            per_group = words.shape[-1] // scales.shape[-1]
            if columns.start % group or columns.stop % group or words.shape[-1] % scales.shape[-1]:
                return None
            first, last = columns.start // group, columns.stop // group
            words = words.cut(first * per_group, last * per_group)
            scales, biases = scales.cut(first, last), biases.cut(first, last)
        return packed.mlx(words.data, scales.to_float32(), biases.to_float32(), group)

    def mlx_packed(self, name: str) -> MlxPacked | None:
        """The stored parts of a weight whose packing MLX has kernels for, else None.

        The name of any expert stands for the whole stack.
        """
        source = self._sources.get(name)
        if source is None or not source.quantized:
            return None
        module = source.module
        if self._method.method == "mxfp4":
            blocks = np.ascontiguousarray(self._stored(f"{module}_blocks").data).view(np.uint32)
            words = DenseTensor(blocks.reshape(*blocks.shape[:-2], -1), "uint32")
            return MlxPacked(words, self._stored(f"{module}_scales"), None, 4, 32, "mxfp4")
        if self._method.method != "mlx":
            return None
        words, scales = self._stored(f"{module}.weight"), self._stored(f"{module}.scales")
        has_biases = f"{module}.biases" in self._file_of
        group_size = self._method.mlx_group_size(module)
        return MlxPacked(
            words=words,
            scales=scales,
            biases=self._stored(f"{module}.biases") if has_biases else None,
            bits=words.shape[-1] * 32 // (scales.shape[-1] * group_size),
            group_size=group_size,
            mode=self._method.mlx_mode(module),
        )

    def _count(self, source: _Source) -> int:
        def size(suffix: str) -> int:
            name = source.module + suffix
            shape = self._file_of[name].entries[name].shape
            return math.prod(shape if source.expert is None else shape[1:])

        if not source.quantized:
            return size(source.suffix)
        match self._method.method:
            case "mlx":
                return size(".scales") * self._method.mlx_group_size(source.module)
            case "mxfp4":
                return size("_blocks") * 2
            case "fp8":
                return size(".weight")
            case "compressed-tensors":
                out, width = self._stored(source.module + ".weight_shape").data.tolist()
                return int(out * width)
        return size(".qweight") * 32 // int(self._method.settings.get("bits", 4))

    def _stored(self, name: str, expert: int | None = None) -> DenseTensor:
        file = self._file_of.get(name)
        if file is None:
            raise ModelInvalid(f"{self._path}: tensor {name!r} is missing", hint=_REFETCH)
        tensor = file.tensor(name)
        return tensor if expert is None else DenseTensor(tensor.data[expert], tensor.dtype)

    def _quantized(self, source: _Source) -> Tensor:
        module = source.module

        def floats(suffix: str) -> FloatArray:
            return self._stored(module + suffix, source.expert).to_float32()

        def words(suffix: str) -> Any:
            return self._stored(module + suffix, source.expert).data

        match self._method.method:
            case "mlx":
                mode = self._method.mlx_mode(module)
                if mode != "affine":
                    raise UnsupportedModel(
                        f"only the MLX backend reads MLX quantisation mode {mode!r} of {module}",
                        hint="--backend mlx",
                    )
                group_size = self._method.mlx_group_size(module)
                return packed.mlx(
                    words(".weight"), floats(".scales"), floats(".biases"), group_size
                )
            case "gptq":
                version = self._method.settings.get("checkpoint_format", "gptq")
                g_idx = words(".g_idx") if module + ".g_idx" in self._file_of else None
                return packed.gptq(
                    words(".qweight"),
                    words(".qzeros"),
                    floats(".scales"),
                    g_idx,
                    zero_offset=0 if version == "gptq_v2" else 1,
                )
            case "awq":
                return packed.awq(words(".qweight"), words(".qzeros"), floats(".scales"))
            case "compressed-tensors":
                names = [module + suffix for suffix in (".weight_zero_point", ".weight_g_idx")]
                zero_point, g_idx = (
                    self._stored(name, source.expert).data if name in self._file_of else None
                    for name in names
                )
                return packed.compressed_tensors(
                    words(".weight_packed"),
                    floats(".weight_scale"),
                    zero_point,
                    g_idx,
                    width=int(words(".weight_shape")[1]),
                )
            case "fp8":
                rows, columns = self._method.settings.get("weight_block_size") or (128, 128)
                scale = floats(source.suffix)
                weight = packed.dequantize_fp8(floats(".weight"), scale, (rows, columns))
                return DenseTensor(weight, "float32")
            case "mxfp4":
                bits = packed.dequantize_mxfp4(words("_blocks"), words("_scales"))
                return DenseTensor(bits, "bfloat16")
        raise AssertionError(self._method.method)

    def _layout(self) -> str:
        method = self._method.method
        if method == "fp8" and not any(n.endswith(".weight_scale_inv") for n in self._file_of):
            return "fp8-rows"
        return method

    def _find_sources(self, *, multimodal: bool) -> dict[str, _Source]:
        """Every hub parameter's source: packed modules as one weight, stacked experts apart."""
        marker, suffixes = _PARTS.get(self._layout(), ("", ()))
        marked = [name for name in self._file_of if marker and name.endswith(marker)]
        quantized = {name.removesuffix(marker) for name in marked}
        found: dict[str, _Source] = {}
        for stored in self._file_of:
            module, suffix = _split(stored, suffixes)
            is_part = suffix in suffixes and module in quantized
            if is_part and suffix != marker:
                continue
            # GPT-OSS's experts are parameters of their own, without a ".weight".
            shown = "" if self._method.method == "mxfp4" else ".weight"
            name = _hub_name(module + (shown if is_part else suffix), multimodal)
            if name is None:
                continue
            if ".switch_mlp." not in name:
                found[name] = _Source(module, suffix, is_part)
                continue
            # mlx-lm stacks a layer's experts in one tensor.
            count = self._file_of[stored].entries[stored].shape[0]
            for expert in range(count):
                one = name.replace(".switch_mlp.", f".experts.{expert}.")
                found[one] = _Source(module, suffix, is_part, expert)
        if not multimodal and "embed_tokens.weight" in found:
            # Saved without the causal-LM class around it.
            found = {f"model.{name}": source for name, source in found.items()}
        return found

    def _refuse_unnamed_packing(self) -> None:
        """Packed integers must not be taken for weights where config.json forgets them."""
        if self._method.method != "dense":
            return
        packed_names = [name for name in self._file_of if name.endswith(_PACKED)]
        if packed_names:
            raise UnsupportedModel(
                f"{self._path}: {packed_names[0]!r} belongs to quantised weights, but config.json"
                " does not say how they are quantised",
                hint="config.json needs quantization_config (or MLX's quantization)",
            )

    def _check_layers(self) -> None:
        if "model.embed_tokens.weight" not in self._sources:
            raise ModelInvalid(
                f"{self._path}: there is no embedding (model.embed_tokens.weight) among"
                f" {len(self._sources)} tensors",
                hint="is this a decoder-only language model?",
            )
        present = {
            int(parts[2])
            for parts in (name.split(".") for name in self._sources)
            if parts[:2] == ["model", "layers"] and parts[2].isdigit()
        }
        count = self.config.get("num_hidden_layers", 0)
        missing = sorted(set(range(count)) - present)
        if missing:
            raise ModelInvalid(
                f"{self._path}: {len(missing)} of {count} layers are missing, first {missing[0]}",
                hint=_REFETCH,
            )


def _split(name: str, suffixes: tuple[str, ...]) -> tuple[str, str]:
    """Into a module and one of the suffixes, or the part behind the last dot."""
    for suffix in suffixes:
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    module, dot, last = name.rpartition(".")
    return module, dot + last


def _hub_name(name: str, multimodal: bool) -> str | None:
    """The name in the text-only model; None for parts of the other modalities."""
    if not multimodal:
        return name
    for prefix, replacement in (
        ("language_model.", ""),
        ("model.language_model.", "model."),
    ):
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    head = name.removeprefix("model.")
    return None if head.startswith(_VISION) else name


def _open_files(path: Path) -> list[SafetensorsFile]:
    index = path / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelInvalid(f"{index} has no weight_map", hint=_REFETCH)
        wanted = sorted({str(name) for name in weight_map.values()})
        missing = [name for name in wanted if not (path / name).is_file()]
        if missing:
            raise ModelInvalid(
                f"{path}: {len(missing)} of {len(wanted)} weight files are missing, first"
                f" {missing[0]}",
                hint=_REFETCH,
            )
        files = [SafetensorsFile(path / name) for name in wanted]
        by_name = {file.path.name: file for file in files}
        for tensor, name in weight_map.items():
            if tensor not in by_name[name].entries:
                raise ModelInvalid(
                    f"{path / name}: tensor {tensor!r}, named in {INDEX}, is missing", hint=_REFETCH
                )
        return files
    found = sorted(path.glob("*.safetensors"))
    # Mistral ships a second copy of the same weights under its own names; adapters are no model.
    own = [file for file in found if not file.name.startswith(("consolidated", "adapter_"))]
    if not own:
        raise _no_weights(path, found)
    for file in own:
        match = _SHARD.match(file.name)
        if match is None:
            continue
        stem, count = match["stem"], match["count"]
        for number in range(1, int(count) + 1):
            part = path / f"{stem}-{number:05d}-of-{count}.safetensors"
            if not part.is_file():
                raise ModelInvalid(f"{path}: weight file {part.name} is missing", hint=_REFETCH)
    return [SafetensorsFile(file) for file in own]


def _no_weights(path: Path, found: list[Path]) -> ModelInvalid | UnsupportedModel:
    if any(file.name.startswith("adapter_") for file in found):
        return UnsupportedModel(
            f"{path} holds an adapter, not a model", hint="merge it into its base model first"
        )
    if found:
        return UnsupportedModel(
            f"{path}: weights under Mistral's own names (consolidated.safetensors) are not read",
            hint="fetch the model's files in the hub's format (model*.safetensors)",
        )
    pickles = sorted([*path.glob("*.bin"), *path.glob("*.pth"), *path.glob("*.pt")])
    if pickles:
        return UnsupportedModel(
            f"{path}: weights in pickle files ({pickles[0].name}) are not read",
            hint="convert them to safetensors (transformers: save_pretrained)",
        )
    below = sorted(path.glob("*/*.safetensors"))
    if below:
        return ModelInvalid(
            f"{path} has no weights itself",
            hint=f"they may be in {below[0].parent}: give that path",
        )
    return ModelInvalid(f"{path} has no *.safetensors files", hint=_REFETCH)


def _index(files: list[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    file_of: dict[str, SafetensorsFile] = {}
    for file in files:
        for name in file.entries:
            other = file_of.setdefault(name, file)
            if other is not file:
                raise ModelInvalid(
                    f"tensor {name!r} is in both {other.path} and {file.path}",
                    hint="remove the weight files that do not belong to this model",
                )
    return file_of
