"""Models from the Hugging Face hub, through its own client and into its own cache.

The client goes on after a cut connection and keeps finished files, also for other programs. A file
that was under way when a process ended starts anew (huggingface_hub 2; its Xet transfers aside).
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from pippin.errors import DownloadError, ModelError, ModelNotFound, UnsupportedModel
from pippin.models.hub_name import HubName, choose_gguf, parse, parts_of
from pippin.models.local import hub_models

logger = logging.getLogger(__name__)

WANTED = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt", "*.tiktoken"]
TOKENIZER = ["tokenizer*", "*.model", "*.jinja", "*.tiktoken", "vocab*", "merges.txt"]
TOKENIZER += ["special_tokens_map.json", "added_tokens.json", "generation_config.json"]
TOKENIZER += ["config.json", "chat_template.json"]
UNWANTED = ["*/*", "consolidated*", "adapter_*", "training_args*"]
"""Sub-directories hold copies in other formats (onnx, original); consolidated is Mistral's own."""


def fetch(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: bool = False,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
    weights: bool = True,
) -> Path:
    """Download what of ``model`` is not in the cache; returns the snapshot's directory or the GGUF
    file (of a split one, the first).

    ``weights=False`` takes the tokenizer's files only, and returns their directory.
    Without a network, a complete copy in the cache is used and a warning logged. ``offline`` asks
    the cache only. ``endpoint``, ``cache_dir``: None for the client's own (HF_ENDPOINT, HF_HOME).
    Raises ``ModelNotFound`` (no such repository, revision or file), ``UnsupportedModel`` (only
    pickle files) and ``DownloadError``.
    """
    name = parse(model, revision)
    if name is None:
        raise ModelNotFound(f"{model!r} is not a model's name on the hub", hint="it is org/name")
    source = _Source(name, endpoint, cache_dir, weights)
    if offline:
        return _cached_or_error(source, None)
    with _progress_bars(progress):
        try:
            files = source.list_files()
            return source.download(files)
        except hub_errors.GatedRepoError as error:
            raise DownloadError(
                f"{name.repo} is gated: its owner must let you in",
                hint=f"accept its terms at {source.url}, then log in: hf auth login (or HF_TOKEN)",
            ) from error
        except hub_errors.RepositoryNotFoundError as error:
            raise ModelNotFound(
                f"the hub has no model {name.repo!r}, or it is private",
                hint="check the spelling; for a private model log in: hf auth login (or HF_TOKEN)",
            ) from error
        except hub_errors.RevisionNotFoundError as error:
            raise ModelNotFound(
                f"{name.repo} has no revision {name.revision!r}",
                hint=f"its branches and tags: {source.url}/tree/main",
            ) from error
        except hub_errors.HfHubHTTPError as error:
            if error.response.status_code in (401, 403):
                raise DownloadError(
                    f"the hub refused to give {name.repo}: {_first_line(error)}",
                    hint="log in again (hf auth login), or correct HF_TOKEN",
                ) from error
            return _cached_or_error(source, error)
        except OSError as error:
            # Includes LocalEntryNotFoundError: the network went away in the middle.
            if error.errno is not None:
                raise _disk_error(error, source) from error
            return _cached_or_error(source, error)
        except hub_errors.HTTPError as error:
            # The HTTP library's own: no connection, time-outs, a cut that retries did not mend.
            return _cached_or_error(source, error)


class _Source:
    """One model on one hub."""

    def __init__(
        self, name: HubName, endpoint: str | None, cache_dir: Path | None, weights: bool
    ) -> None:
        self.name = name
        self.weights = weights
        self.cache_dir = cache_dir
        self._api = huggingface_hub.HfApi(endpoint=endpoint, library_name="pippin")
        self.url = f"{self._api.endpoint}/{name.repo}"

    def list_files(self) -> list[str]:
        info = self._api.model_info(self.name.repo, revision=self.name.revision)
        return [sibling.rfilename for sibling in info.siblings or ()]

    def download(self, files: list[str]) -> Path:
        name = self.name
        if not self.weights:
            return self.snapshot(allow_patterns=TOKENIZER, ignore_patterns=UNWANTED)
        plain = any(file.endswith(".safetensors") and "/" not in file for file in files)
        if name.file is None and name.quant is None and plain:
            return self.snapshot(allow_patterns=WANTED, ignore_patterns=UNWANTED)
        chosen = self._choose(files)
        return self.snapshot(allow_patterns=chosen) / chosen[0]

    def cached(self) -> Path | None:
        """The complete copy in the cache, or None."""
        try:
            # An empty pattern list only finds the directory, whatever it has.
            folder = self.snapshot(allow_patterns=[], local_files_only=True)
            if not self.weights:
                return folder if any(folder.glob("tokenizer*")) else None
            plain = self.name.file is None and self.name.quant is None
            if plain and any(folder.glob("*.safetensors")):
                return self.snapshot(
                    allow_patterns=WANTED, ignore_patterns=UNWANTED, local_files_only=True
                )
        except hub_errors.LocalEntryNotFoundError:
            return None
        files = [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")]
        try:
            return folder / self._choose(files)[0]
        except ModelError:
            return None

    def snapshot(self, **options: Any) -> Path:
        return Path(
            self._api.snapshot_download(
                self.name.repo,
                revision=self.name.revision,
                cache_dir=self.cache_dir,
                **options,
            )
        )

    def _choose(self, files: list[str]) -> list[str]:
        """The GGUF files to take. Raises ``ModelNotFound`` or ``UnsupportedModel``."""
        name = self.name
        models = [file for file in files if file.endswith(".gguf")]
        if name.file is not None:
            chosen = parts_of(name.file, models) if name.file in models else []
        else:
            chosen = choose_gguf(models, name.quant)
        if chosen:
            return chosen
        if models:
            raise ModelNotFound(
                f"{name.repo} has no GGUF file {name.file or name.quant!r}",
                hint=f"it has {', '.join(models[:8])}{' …' if len(models) > 8 else ''}",
            )
        if name.file is not None or name.quant is not None:
            raise ModelNotFound(f"{name.repo} has no GGUF files", hint=f"try {name.repo} alone")
        raise UnsupportedModel(
            f"{name.repo} has neither safetensors nor GGUF files"
            + (" (pickle files are not read)" if _has_pickles(files) else ""),
            hint="look on the hub for a copy of the model in one of these formats",
        )


def _has_pickles(files: list[str]) -> bool:
    return any(file.endswith((".bin", ".pth", ".pt")) for file in files)


def _cached_or_error(source: _Source, failure: Exception | None) -> Path:
    """The cached copy, with a warning where the hub was asked; else ``DownloadError``."""
    found = source.cached()
    if found is not None:
        if failure is not None:
            logger.warning(
                "the hub did not answer (%s): using the copy of %s in the cache",
                type(failure).__name__,
                source.name.repo,
            )
        return found
    here = [model.name for model in hub_models(source.cache_dir)]
    others = f"on this machine: {', '.join(here)}" if here else "no other model is on this machine"
    if failure is None:
        raise DownloadError(
            f"{source.name.repo} is not completely in the cache, and offline mode is on",
            hint=f"unset HF_HUB_OFFLINE; {others}",
        )
    raise DownloadError(
        f"could not download {source.name.repo} from {source.url}: {_first_line(failure)}",
        hint=f"check the network and run again (finished files are kept); {others}",
    ) from failure


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _disk_error(error: OSError, source: _Source) -> DownloadError:
    place = source.cache_dir or huggingface_hub.constants.HF_HUB_CACHE
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(
            f"no space left in {place} for {source.name.repo}",
            hint="free some (pippin models list, pippin models rm NAME) or set HF_HOME elsewhere",
        )
    return DownloadError(
        f"cannot write {source.name.repo} to {place}: {error.strerror}",
        hint="set HF_HOME to a directory you can write to",
    )


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """The client's switch is global: put it back as it was."""
    before: Callable[[], None] = (
        disable_progress_bars if are_progress_bars_disabled() else enable_progress_bars
    )
    if not shown:
        disable_progress_bars()
    try:
        yield
    finally:
        before()
