"""Models that are on this machine: Pippin's own and those in the hub client's cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pippin.errors import ModelNotFound
from pippin.models.demo import demo_path
from pippin.models.hub_config import read_json
from pippin.models.hub_name import parse, parts_of

LocalKind = Literal["demo", "hub", "gguf"]


@dataclass(frozen=True, slots=True)
class LocalModel:
    name: str
    """What ``pippin serve`` takes."""
    path: Path
    size_bytes: int
    kind: LocalKind
    """``hub``: a directory of safetensors; ``gguf``: a GGUF file in a hub repository."""
    last_used: float | None
    """Seconds since the epoch, where the file system says so."""


def list_local(home: Path, *, cache_dir: Path | None = None) -> list[LocalModel]:
    """All models that can be served without a network, by name; the demo model first."""
    found: list[LocalModel] = []
    demo = demo_path(home)
    if demo.is_file():
        status = demo.stat()
        found.append(LocalModel("demo", demo, status.st_size, "demo", status.st_atime))
    return found + hub_models(cache_dir)


def hub_models(cache_dir: Path | None = None) -> list[LocalModel]:
    """Models in the hub client's cache (None: its own place)."""
    found: list[LocalModel] = []
    for repo in _scan(cache_dir):
        revisions = sorted(repo.revisions, key=lambda revision: revision.last_modified)
        if not revisions:
            continue
        newest = next((r for r in revisions if "main" in r.refs), revisions[-1])
        files = {str(f.file_path.relative_to(newest.snapshot_path)): f for f in newest.files}
        if _is_complete(newest.snapshot_path, set(files)):
            found.append(
                LocalModel(
                    repo.repo_id,
                    newest.snapshot_path,
                    newest.size_on_disk,
                    "hub",
                    repo.last_accessed,
                )
            )
            continue
        models = sorted(name for name in files if name.endswith(".gguf"))
        for name in models:
            parts = [files[part] for part in parts_of(name, models)]
            # A split model counts once, by its first part.
            if parts[0] is files[name]:
                found.append(
                    LocalModel(
                        f"{repo.repo_id}/{name}",
                        files[name].file_path,
                        sum(part.size_on_disk for part in parts),
                        "gguf",
                        files[name].blob_last_accessed,
                    )
                )
    return sorted(found, key=lambda model: model.name)


def _is_complete(snapshot: Path, names: set[str]) -> bool:
    """Whether a directory of safetensors has its configuration and all the files of its index."""
    if "config.json" not in names:
        return False
    index = "model.safetensors.index.json"
    if index not in names:
        return any(name.endswith(".safetensors") for name in names)
    return set(read_json(snapshot / index).get("weight_map", {}).values()) <= names


def remove(name: str, home: Path, *, cache_dir: Path | None = None) -> int:
    """Delete a model and return the bytes freed. ``org/name`` goes with all its revisions and
    files; ``org/name/file.gguf`` alone. Raises ``ModelNotFound``."""
    if name == "demo":
        path = demo_path(home)
        if path.is_file():
            size = path.stat().st_size
            path.unlink()
            return size
    wanted = parse(name)
    for repo in _scan(cache_dir):
        if wanted is None or repo.repo_id != wanted.repo:
            continue
        if wanted.file is None:
            return _remove_repo(repo, cache_dir)
        names = {
            str(file.file_path.relative_to(revision.snapshot_path))
            for revision in repo.revisions
            for file in revision.files
        }
        if wanted.file in names:
            return sum(_remove_file(repo, part) for part in parts_of(wanted.file, sorted(names)))
    here = [model.name for model in list_local(home, cache_dir=cache_dir)]
    raise ModelNotFound(
        f"there is no model {name!r} on this machine",
        hint=f"it has {', '.join(here)}" if here else "it has none",
    )


def _scan(cache_dir: Path | None) -> list[Any]:
    """The client's records (``CachedRepoInfo``) of cached models; none without a cache."""
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = huggingface_hub.scan_cache_dir(cache_dir)
    except CacheNotFound:
        return []
    return [repo for repo in cache.repos if repo.repo_type == "model"]


def _remove_repo(repo: Any, cache_dir: Path | None) -> int:
    import huggingface_hub

    size = int(repo.size_on_disk)
    hashes = [revision.commit_hash for revision in repo.revisions]
    huggingface_hub.scan_cache_dir(cache_dir).delete_revisions(*hashes).execute()
    return size


def _remove_file(repo: Any, name: str) -> int:
    """Delete one file in every revision that has it, with the blobs behind; returns bytes."""
    freed = 0
    for revision in repo.revisions:
        for file in revision.files:
            if str(file.file_path.relative_to(revision.snapshot_path)) != name:
                continue
            file.file_path.unlink()
            if file.blob_path.is_file():
                freed += file.size_on_disk
                file.blob_path.unlink()
    return freed
