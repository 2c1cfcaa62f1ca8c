"""How a model of the hub is written: ``org/name[/file.gguf][:QUANT][@revision]``."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PART = re.compile(r"^[A-Za-z0-9_][\w.-]*$", re.ASCII)
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_PREFERRED = ("Q4_K_M", "Q8_0")
"""What a GGUF repository is read as when no file is named, as llama.cpp chooses."""


@dataclass(frozen=True, slots=True)
class HubName:
    repo: str
    """``org/name``."""
    revision: str | None = None
    """Branch, tag or commit; None: the hub's main branch."""
    file: str | None = None
    """Path of a GGUF file inside the repository."""
    quant: str | None = None
    """Part of a GGUF file's name, as in ``org/name:Q4_K_M``."""


def parse(model: str, revision: str | None = None) -> HubName | None:
    """Take a name apart; None if it cannot be one of the hub's. A ``revision`` given apart counts
    unless the name has its own."""
    rest, at, own_revision = model.partition("@")
    rest, colon, quant = rest.partition(":")
    parts = rest.split("/")
    if (at and not own_revision) or (colon and not quant) or len(parts) < 2:
        return None
    if not all(_PART.match(part) for part in parts):
        return None
    file = "/".join(parts[2:]) or None
    if file is not None and (not file.endswith(".gguf") or quant):
        return None
    return HubName("/".join(parts[:2]), own_revision or revision, file, quant or None)


def choose_gguf(files: list[str], quant: str | None) -> list[str]:
    """The GGUF file (all parts of a split one) to take from a repository's ``files``.

    With ``quant``, the one whose name has it as a word; else Q4_K_M, Q8_0 or the first. Empty if
    there is none.
    """
    models = sorted(f for f in files if f.endswith(".gguf") and "mmproj" not in f.lower())
    if quant is not None:
        chosen = [file for file in models if _has_word(file, quant)]
    else:
        ranked = [file for word in _PREFERRED for file in models if _has_word(file, word)]
        chosen = ranked or models
    return parts_of(chosen[0], models) if chosen else []


def parts_of(file: str, files: list[str]) -> list[str]:
    """``file``, or all parts among ``files`` of the split model it belongs to."""
    match = _SPLIT.search(file)
    if match is None:
        return [file]
    stem, count = file[: match.start()], match[1]
    return sorted(f for f in files if f.startswith(stem) and f.endswith(f"-of-{count}.gguf"))


def _has_word(file: str, word: str) -> bool:
    stem = file.rpartition("/")[2].removesuffix(".gguf")
    return re.search(rf"(^|[._-]){re.escape(word)}($|[.-])", stem, re.IGNORECASE) is not None
