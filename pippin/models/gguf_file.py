"""A GGUF file, mapped: its metadata and its tensors' bytes.

The gguf library's own reader fails with library-internal exceptions on damaged files, and makes two
arrays for every token of a vocabulary (seconds for the demo model).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from pippin.errors import ModelInvalid, UnsupportedModel
from pippin.models.gguf_metadata import REFETCH, TensorHeader, map_file, read_header

_SPLIT = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """Row-major, as in numpy: [out, in] for a linear's weight (GGUF itself lists it reversed)."""
    offset: int
    """Bytes from the start of the file."""
    nbytes: int
    file: GgufFile

    def raw(self) -> NDArray[np.uint8]:
        """The bytes, [..., bytes of a row], as a view of the mapped file."""
        block, size = GGML_QUANT_SIZES[self.kind]
        flat = np.frombuffer(self.file.buffer, np.uint8, self.nbytes, self.offset)
        return flat.reshape(*self.shape[:-1], self.shape[-1] // block * size)


class GgufFile:
    """One GGUF file, mapped. Raises ``ModelInvalid`` if it is damaged or cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.buffer = map_file(path)
        header = read_header(self.buffer, path)
        self.metadata = header.metadata
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelInvalid(f"{path}: general.alignment is {alignment!r}", hint=REFETCH)
        self.header_bytes = header.nbytes
        start = -(-header.nbytes // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for tensor in header.tensors:
            if tensor.name in self.tensors:
                raise ModelInvalid(f"{path}: tensor {tensor.name!r} appears twice", hint=REFETCH)
            self.tensors[tensor.name] = self._locate(tensor, start + tensor.offset)

    def _locate(self, tensor: TensorHeader, offset: int) -> GgufTensor:
        name, shape = tensor.name, tensor.shape
        try:
            kind = GGMLQuantizationType(tensor.kind)
        except ValueError as error:
            raise UnsupportedModel(
                f"{self.path}: tensor {name!r} has type {tensor.kind}, unknown to the gguf library",
                hint="pip install --upgrade gguf",
            ) from error
        block, size = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ModelInvalid(
                f"{self.path}: rows of {name!r} ({shape[-1]}) are not whole blocks of {block}",
                hint=REFETCH,
            )
        nbytes = math.prod(shape) // block * size
        if offset + nbytes > len(self.buffer):
            raise ModelInvalid(
                f"{self.path} is truncated: tensor {name!r} ends at byte {offset + nbytes},"
                f" the file at {len(self.buffer)}",
                hint=REFETCH,
            )
        return GgufTensor(name, kind, shape, offset, nbytes, self)


def split_files(path: Path) -> list[Path]:
    """All parts of a model that is split as ``name-00001-of-00003.gguf``, in order; else itself.

    Raises ``ModelInvalid`` naming a missing part.
    """
    match = _SPLIT.match(path.name)
    if match is None:
        return [path]
    stem, count = match["stem"], int(match["count"])
    parts = [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelInvalid(
            f"{path.parent}: {len(missing)} of {count} parts are missing, first {missing[0]}",
            hint="fetch all parts of the split model into one directory",
        )
    return parts
