"""From what the user typed to files on this machine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pippin.errors import ModelInvalid, ModelNotFound
from pippin.models.hub_name import parse

Kind = Literal["directory", "gguf"]
_SAMPLES = 8
_SAMPLE_BYTES = 4096
_HEAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine."""

    name: str
    """As the user gave it."""
    path: Path
    """The directory, or the GGUF file (of a split one, the first)."""
    kind: Kind
    fingerprint: str
    """The same on every machine that has the same files; cheap (see ``fingerprint_of``)."""


def resolve(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    home: Path,
    progress: bool = False,
) -> ModelFiles:
    """Find a model, and fetch it if it is not here.

    ``model``: ``demo``, a directory, a GGUF file, or a hub id: ``org/name``, ``org/name@revision``,
    ``org/name:Q4_K_M`` (a GGUF file by its quantisation) or ``org/name/file.gguf``. A path on this
    machine goes before a hub id. ``home`` is Pippin's own directory; hub models go to the hub
    client's cache. Raises ``ModelNotFound``, ``ModelInvalid`` or ``DownloadError``.
    """
    if model == "demo":
        from pippin.models.demo import fetch_demo

        return _gguf(model, fetch_demo(home, offline=offline, progress=progress))
    path = Path(model).expanduser()
    if path.is_dir():
        return local_directory(model, path)
    if path.is_file():
        return _local_file(model, path)
    if parse(model) is None:
        raise ModelNotFound(
            f"no model at {model!r}: there is no such file or directory, and it is no hub id",
            hint="give a directory, a .gguf file, demo, or a hub id such as"
            " HuggingFaceTB/SmolLM2-135M-Instruct",
        )
    from pippin.models.hub import fetch

    found = fetch(model, revision=revision, offline=offline, progress=progress)
    return local_directory(model, found) if found.is_dir() else _gguf(model, found)


def local_directory(name: str, path: Path) -> ModelFiles:
    """A model directory; one that only holds a GGUF file stands for that file."""
    if (path / "config.json").is_file():
        return ModelFiles(name, path, "directory", fingerprint_of(path))
    found = sorted(path.glob("*.gguf"))
    first = [file for file in found if "-of-" not in file.name or "-00001-of-" in file.name]
    if len(first) == 1:
        return _gguf(name, first[0])
    if first:
        raise ModelInvalid(
            f"{path} holds {len(first)} GGUF models", hint=f"name one of them, such as {first[0]}"
        )
    below = sorted(path.glob("*/config.json"))
    raise ModelInvalid(
        f"{path} has no config.json and no GGUF file",
        hint=f"did you mean {below[0].parent}?" if below else "give a model's directory",
    )


def _local_file(name: str, path: Path) -> ModelFiles:
    if path.suffix == ".gguf":
        return _gguf(name, path)
    if path.suffix in (".safetensors", ".json"):
        raise ModelInvalid(
            f"{path} is one file of a model", hint=f"give its directory: {path.parent}"
        )
    with path.open("rb") as stream:
        if stream.read(4) == b"GGUF":
            return _gguf(name, path)
    raise ModelInvalid(f"{path} is not a model", hint="give a directory or a .gguf file")


def _gguf(name: str, path: Path) -> ModelFiles:
    from pippin.models.gguf_file import split_files

    # The first part of a split model has the metadata, whichever part was named.
    first = split_files(path)[0]
    return ModelFiles(name, first, "gguf", fingerprint_of(first))


def fingerprint_of(path: Path) -> str:
    """Identity of a model's content: hash of its configuration, and of each weight file's name,
    size, header and a few samples. It neither reads gigabytes nor depends on place or time."""
    digest = hashlib.sha256()
    if path.is_dir():
        for name in ("config.json", "model.safetensors.index.json"):
            if (path / name).is_file():
                digest.update((path / name).read_bytes())
        files = sorted(path.glob("*.safetensors"))
    else:
        from pippin.models.gguf_file import split_files

        files = split_files(path)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_HEAD_BYTES))
            for sample in range(_SAMPLES):
                stream.seek(sample * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
