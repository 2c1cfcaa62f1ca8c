"""Tokenizers of model directories: ``tokenizer.json`` and the files beside it.

The API process reads them with ``tokenizers`` alone, SentencePiece BPE models as well. Where there
is only another slow tokenizer (a unigram ``tokenizer.model``, or ``vocab.json`` with
``merges.txt``), transformers converts it once, in a process of its own, and the result is kept
under Pippin's home.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors

from pippin.errors import ModelInvalid
from pippin.models.gguf_tokenizer import from_metadata
from pippin.models.spm_model import read_bpe_model
from pippin.models.tokenizer_parts import TokenizerParts, end_of_turn_ids

logger = logging.getLogger(__name__)

#: Files a slow tokenizer may consist of; one of the first four makes a directory convertible.
_SLOW_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "config.json",
)
_HINT = "the model directory needs tokenizer.json; or name another tokenizer with --tokenizer"
_CONVERTER = Path(__file__).with_name("convert_tokenizer.py")
_CONVERT_SECONDS = 600

#: transformers sets the post-processor of these classes from ``add_bos_token``/``add_eos_token``,
#: whatever ``tokenizer.json`` holds.
_CLASSES_WITH_FLAGS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")

#: vLLM's ``--generation-config auto`` takes these.
_SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}

_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def read_directory(path: Path, home: Path) -> TokenizerParts:
    """The tokenizer of a model directory, or of one ``tokenizer.json`` file.

    Raises ``ModelInvalid`` where there is none or it cannot be read.
    """
    directory = path.parent if path.is_file() else path
    config = _read_json(directory / "tokenizer_config.json")
    backend, special = _backend(path if path.is_file() else None, directory, home, config)
    backend.no_truncation()
    backend.no_padding()
    _add_missing_tokens(backend, config, _read_json(directory / "added_tokens.json"))
    special |= _special_tokens(config, _read_json(directory / "special_tokens_map.json"))
    _apply_flags(backend, config, special)
    templates = _chat_templates(directory, config)
    generation = _read_json(directory / "generation_config.json")
    model_config = _read_json(directory / "config.json")
    bos = special.get("bos_token")
    return TokenizerParts(
        backend=backend,
        special_tokens=special,
        bos_token_id=None if bos is None else backend.token_to_id(bos),
        eos_token_ids=_eos_ids(backend, special, generation, model_config, templates),
        chat_templates=templates,
        default_sampling={
            ours: generation[theirs]
            for theirs, ours in _SAMPLING_KEYS.items()
            if isinstance(generation.get(theirs), int | float)
        },
        vocab_size=_vocab_size(backend),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Contents of an optional JSON object; empty where there is no file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelInvalid(f"cannot read {path}: {error}", hint="fetch the file again") from error
    if not isinstance(value, dict):
        raise ModelInvalid(f"{path} does not hold a JSON object", hint="fetch the file again")
    return value


def _backend(
    file: Path | None, directory: Path, home: Path, config: Mapping[str, Any]
) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer, and the special tokens that it names itself."""
    if file is None:
        file = directory / "tokenizer.json"
    if not file.is_file():
        model = next(filter(Path.is_file, (directory / name for name in _SLOW_FILES[:3])), None)
        metadata = None if model is None else read_bpe_model(model)
        if metadata is not None:
            return _of_bpe_model(metadata, str(model), config)
        file = _converted(directory, home)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelInvalid(f"cannot read {file}: {error}", hint=_HINT) from error
    try:
        return Tokenizer.from_str(text), {}
    except Exception as error:  # tokenizers raises no other class
        raise ModelInvalid(f"{file} is not a valid tokenizer: {error}", hint=_HINT) from error


def _of_bpe_model(
    metadata: Mapping[str, Any], name: str, config: Mapping[str, Any]
) -> tuple[Tokenizer, dict[str, str]]:
    parts = from_metadata(metadata, name)
    if config.get("legacy") is False and metadata["tokenizer.ggml.add_space_prefix"]:
        # Later Llama tokenizers put the space before the text only, not after each special token.
        parts.backend.normalizer = None
        parts.backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return parts.backend, dict(parts.special_tokens)


def _converted(directory: Path, home: Path) -> Path:
    """Path of the converted slow tokenizer, made if it is not there yet."""
    sources = [directory / name for name in _SLOW_FILES if (directory / name).is_file()]
    names = {source.name for source in sources}
    if not names & set(_SLOW_FILES[:3]) and not {"vocab.json", "merges.txt"} <= names:
        raise ModelInvalid(f"no tokenizer in {directory}", hint=_HINT)
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    target = home / "tokenizers" / digest.hexdigest()[:24] / "tokenizer.json"
    if target.is_file():
        return target
    logger.info("converting the tokenizer of %s (once)", directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f"tokenizer.{os.getpid()}.json")
    command = [sys.executable, "-P", str(_CONVERTER), str(directory)]  # -P: not among our modules
    try:
        done = subprocess.run(
            [*command, str(scratch)],
            capture_output=True,
            text=True,
            timeout=_CONVERT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelInvalid(f"converting the tokenizer of {directory} hangs", hint=_HINT) from error
    if done.returncode != 0 or not scratch.is_file():
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ModelInvalid(f"cannot convert the tokenizer of {directory}: {lines[-1]}", hint=_HINT)
    scratch.replace(target)
    return target


def _content(value: Any) -> str | None:
    """A special token's text: a string, or an object with ``content``."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _special_tokens(config: Mapping[str, Any], map_: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like; ``tokenizer_config.json`` wins."""
    tokens = {}
    for source in (map_, config):
        for key, value in source.items():
            is_role = key.removesuffix("_token") in _ROLES
            if (is_role or (source is config and key.endswith("_token"))) and _content(value):
                tokens[key] = str(_content(value))
    return tokens


def _added_tokens(config: Mapping[str, Any]) -> Iterator[tuple[int, AddedToken]]:
    decoder = config.get("added_tokens_decoder")
    if not isinstance(decoder, Mapping):
        return
    for key, entry in decoder.items():
        if isinstance(entry, Mapping) and key.isdecimal() and _content(entry):
            yield (
                int(key),
                AddedToken(
                    str(_content(entry)),
                    single_word=bool(entry.get("single_word", False)),
                    lstrip=bool(entry.get("lstrip", False)),
                    rstrip=bool(entry.get("rstrip", False)),
                    normalized=bool(entry.get("normalized", True)),
                    special=bool(entry.get("special", False)),
                ),
            )


def _add_missing_tokens(
    backend: Tokenizer, config: Mapping[str, Any], older: Mapping[str, Any]
) -> None:
    """Tokens that ``tokenizer_config.json``, or the older ``added_tokens.json``, adds, by id."""
    present = backend.get_added_tokens_decoder()
    added = list(_added_tokens(config)) or [
        (token_id, AddedToken(token, normalized=False))
        for token, token_id in older.items()
        if isinstance(token_id, int)
    ]
    for token_id, token in sorted(added, key=lambda entry: entry[0]):
        if token_id not in present:
            backend.add_tokens([token])


def _apply_flags(backend: Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    name = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    if name not in _CLASSES_WITH_FLAGS:
        return
    llama_like = name != "CohereTokenizer"
    single, used = ["$A:0"], []
    for role, default in (("bos", llama_like), ("eos", False)):
        token = special.get(f"{role}_token")
        if token is None or not config.get(f"add_{role}_token", default):
            continue
        token_id = backend.token_to_id(token)
        if token_id is None:
            continue
        single.insert(0 if role == "bos" else len(single), f"{token}:0")
        used.append((token, token_id))
    pair = [part.replace("$A:0", "$B:1").replace(":0", ":1") for part in single]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=single + pair, special_tokens=used
    )


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files win over ``tokenizer_config.json``, as in transformers."""
    templates: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, list):
        for entry in inline:
            if isinstance(entry, Mapping) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name", "default"))] = entry["template"]
    processor = _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(processor, str):
        templates["default"] = processor
    files = [("default", directory / "chat_template.jinja")]
    extra = directory / "additional_chat_templates"
    if extra.is_dir():
        files += [(file.stem, file) for file in sorted(extra.glob("*.jinja"))]
    for name, file in files:
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ModelInvalid(f"cannot read {file}: {error}") from error
    return templates


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _eos_ids(
    backend: Tokenizer,
    special: Mapping[str, str],
    generation: Mapping[str, Any],
    model_config: Mapping[str, Any],
    templates: Mapping[str, str],
) -> tuple[int, ...]:
    """The tokenizer's own end of sequence, then ``generation_config.json``'s, as in vLLM.

    Without the latter: ``config.json``'s, and the end of turn that the chat template writes.
    """
    eos = special.get("eos_token")
    ids = _ids(backend.token_to_id(eos)) if eos is not None else []
    configured = _ids(generation.get("eos_token_id"))
    if not configured:
        configured = _ids(model_config.get("eos_token_id"))
        configured += end_of_turn_ids(backend, templates)
    return tuple(dict.fromkeys([*ids, *configured]))


def _vocab_size(backend: Tokenizer) -> int:
    """One above the largest id; ids may have holes."""
    size = int(backend.get_vocab_size(with_added_tokens=True))
    highest = max(backend.get_added_tokens_decoder(), default=-1) + 1
    if max(size, highest) == size and backend.id_to_token(size - 1) is not None:
        return size
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
