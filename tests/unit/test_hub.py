"""Hub downloads, against a stand-in for the hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
from hub_standin import Hub, commit_of, serve
from safetensors.numpy import save

from pippin.errors import DownloadError, ModelNotFound, UnsupportedModel
from pippin.models import hub, local
from pippin.models.hub_name import HubName, choose_gguf, parse

WEIGHTS = save({"model.embed_tokens.weight": np.arange(50_000, dtype=np.float32)})
CONFIG = json.dumps({"model_type": "llama"}).encode()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def standin():
    model = {
        "config.json": CONFIG,
        "tokenizer.json": b"{}",
        "tokenizer.model": b"spm",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors": WEIGHTS,
        "pytorch_model.bin": b"pickle",
        "original/consolidated.00.pth": b"pickle",
        "onnx/model.safetensors": b"copy",
        "README.md": b"text",
    }
    gguf = {
        "m-Q4_K_M.gguf": b"GGUF" + b"4" * 100,
        "m-Q8_0.gguf": b"GGUF" + b"8" * 100,
        "BF16/m-BF16-00001-of-00002.gguf": b"GGUF1",
        "BF16/m-BF16-00002-of-00002.gguf": b"GGUF2",
        "mmproj-Q8_0.gguf": b"GGUFv",
    }
    pickled = {"config.json": CONFIG, "pytorch_model.bin": b"pickle"}
    with serve(Hub({"org/plain": model, "org/quants": gguf, "org/pickled": pickled})) as running:
        yield running


def fetch(standin: Hub, cache: Path, model: str, **options) -> Path:
    return hub.fetch(model, endpoint=standin.url, cache_dir=cache, **options)


def names_in(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubName("org/name")),
        ("org/name@v1", HubName("org/name", "v1")),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1")),
        ("org/name:Q4_K_M", HubName("org/name", quant="Q4_K_M")),
        ("org/name-GGUF/a/file.gguf@v1", HubName("org/name-GGUF", "v1", "a/file.gguf")),
        ("demo", None),
        ("./org/name", None),
        ("/tmp/name", None),
        ("org/name/file.bin", None),
        ("org/", None),
        ("org/name@", None),
        ("../name", None),
        ("https://hub/org/name", None),
    ],
)
def test_names(text: str, expected: HubName | None):
    assert parse(text) == expected


def test_revision_in_the_name_goes_before_the_flag():
    assert parse("org/name@v1", "v2") == HubName("org/name", "v1")
    assert parse("org/name", "v2") == HubName("org/name", "v2")


def test_gguf_choice_takes_whole_words_and_all_parts():
    files = ["m-Q4_K_M.gguf", "m-UD-Q4_K.gguf", "m.Q8_0.gguf", "b/m-f16-00001-of-00002.gguf"]
    files += ["b/m-f16-00002-of-00002.gguf", "mmproj-m-Q4_K_M.gguf"]
    assert choose_gguf(files, None) == ["m-Q4_K_M.gguf"]
    assert choose_gguf(files, "q4_k") == ["m-UD-Q4_K.gguf"]
    assert choose_gguf(files, "F16") == [files[3], files[4]]
    assert choose_gguf(files, "Q5_0") == []
    assert choose_gguf(["only-IQ2_XS.gguf"], None) == ["only-IQ2_XS.gguf"]


def test_fetches_the_model_and_nothing_else(standin: Hub, cache: Path):
    folder = fetch(standin, cache, "org/plain")
    assert names_in(folder) == {
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "model.safetensors",
    }
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert folder.name == commit_of("org/plain")


def test_second_fetch_downloads_nothing(standin: Hub, cache: Path):
    first = fetch(standin, cache, "org/plain")
    standin.requests.clear()
    assert fetch(standin, cache, "org/plain@v1") == first
    assert not [
        path for method, path, _ in standin.requests if method == "GET" and "resolve" in path
    ]


def test_gguf_by_default_tag_and_path(standin: Hub, cache: Path):
    default = fetch(standin, cache, "org/quants")
    assert default.read_bytes() == standin.repos["org/quants"]["m-Q4_K_M.gguf"]
    assert fetch(standin, cache, "org/quants:q8_0").name == "m-Q8_0.gguf"
    split = fetch(standin, cache, "org/quants:BF16")
    assert split.name == "m-BF16-00001-of-00002.gguf"
    assert split.with_name("m-BF16-00002-of-00002.gguf").read_bytes() == b"GGUF2"
    assert fetch(standin, cache, "org/quants/m-Q8_0.gguf").name == "m-Q8_0.gguf"
    assert not (default.parent / "mmproj-Q8_0.gguf").exists()


def test_unknown_gguf_lists_what_there_is(standin: Hub, cache: Path):
    with pytest.raises(ModelNotFound) as caught:
        fetch(standin, cache, "org/quants:Q5_K_M")
    assert "m-Q8_0.gguf" in (caught.value.hint or "")
    with pytest.raises(ModelNotFound, match="no GGUF files"):
        fetch(standin, cache, "org/plain:Q8_0")


def test_pickles_are_refused_before_the_download(standin: Hub, cache: Path):
    with pytest.raises(UnsupportedModel, match="pickle"):
        fetch(standin, cache, "org/pickled")
    assert standin.ranges_of("pytorch_model.bin") == []


def test_unknown_repository_and_revision(standin: Hub, cache: Path):
    with pytest.raises(ModelNotFound, match="no model 'org/none'"):
        fetch(standin, cache, "org/none")
    with pytest.raises(ModelNotFound, match="no revision 'v9'"):
        fetch(standin, cache, "org/plain@v9")


def test_gated_says_where_to_ask(standin: Hub, cache: Path):
    standin.gated.add("org/plain")
    with pytest.raises(DownloadError, match="gated") as caught:
        fetch(standin, cache, "org/plain")
    assert f"{standin.url}/org/plain" in (caught.value.hint or "")


def test_a_refused_token_is_named(standin: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "stale")
    with pytest.raises(DownloadError, match="refused") as caught:
        fetch(standin, cache, "org/plain")
    assert "hf auth login" in (caught.value.hint or "")


def test_a_cut_connection_is_resumed(standin: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch):
    # The client writes whole chunks, of 10 MB unless told otherwise.
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    standin.cuts["model.safetensors"] = [70_000]
    folder = fetch(standin, cache, "org/plain")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert standin.ranges_of("model.safetensors") == [None, "bytes=70000-"]


def test_a_failed_download_keeps_the_finished_files(
    standin: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        huggingface_hub.file_download, "time", SimpleNamespace(sleep=lambda _: None)
    )
    standin.cuts["model.safetensors"] = [0] * 6  # as often as the client tries
    with pytest.raises(DownloadError, match="could not download org/plain"):
        fetch(standin, cache, "org/plain")
    with pytest.raises(DownloadError, match="not completely"):
        fetch(standin, cache, "org/plain", offline=True)
    folder = fetch(standin, cache, "org/plain")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert len(standin.ranges_of("model.safetensors")) == 7
    for name in ("config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"):
        assert len(standin.ranges_of("/" + name)) == 1


def test_offline_uses_the_cache(standin: Hub, cache: Path):
    online = fetch(standin, cache, "org/plain")
    quant = fetch(standin, cache, "org/quants:Q8_0")
    standin.requests.clear()
    assert fetch(standin, cache, "org/plain", offline=True) == online
    assert fetch(standin, cache, "org/quants:Q8_0", offline=True) == quant
    assert fetch(standin, cache, "org/quants", offline=True) == quant
    assert standin.requests == []
    with pytest.raises(DownloadError) as caught:
        fetch(standin, cache, "org/quants:Q4_K_M", offline=True)
    assert "org/plain" in (caught.value.hint or "")


def test_a_hub_that_does_not_answer(standin: Hub, cache: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("WARNING", logger="pippin")  # whatever a command set before
    online = fetch(standin, cache, "org/plain")
    gone = Hub(url="http://127.0.0.1:9")
    assert fetch(gone, cache, "org/plain") == online
    assert "using the copy of org/plain" in caplog.text
    with pytest.raises(DownloadError, match="could not download org/quants") as caught:
        fetch(gone, cache, "org/quants")
    assert "org/plain" in (caught.value.hint or "")


def test_the_environment_of_the_hubs_client_is_obeyed(standin: Hub, tmp_path: Path):
    """``resolve`` takes no endpoint: HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE are the client's."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from pippin.config import environment\n"
        "from pippin.models.files import resolve\n"
        "env = environment()\n"
        "print(resolve('org/plain', home=env.home, offline=env.hub_offline).path)\n"
    )
    env = os.environ | {"HF_ENDPOINT": standin.url, "HF_HOME": str(tmp_path / "hf")}

    def run(**extra: str) -> str:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=env | extra, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    first = run()
    assert first.startswith(str(tmp_path / "hf"))
    asked = len(standin.requests)
    assert run(HF_HUB_OFFLINE="1") == first
    assert len(standin.requests) == asked


def test_a_split_model_counts_once_and_goes_as_one(standin: Hub, cache: Path, tmp_path: Path):
    fetch(standin, cache, "org/quants:BF16")
    (model,) = local.list_local(tmp_path, cache_dir=cache)
    assert model.name == "org/quants/BF16/m-BF16-00001-of-00002.gguf"
    assert model.size_bytes == 10
    assert local.remove(model.name, tmp_path, cache_dir=cache) == 10
    assert local.list_local(tmp_path, cache_dir=cache) == []


def test_a_model_with_missing_shards_is_not_listed(standin: Hub, cache: Path, tmp_path: Path):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    standin.repos["org/plain"]["model.safetensors.index.json"] = json.dumps(index).encode()
    fetch(standin, cache, "org/plain")
    assert local.list_local(tmp_path, cache_dir=cache) == []


def test_list_and_remove(standin: Hub, cache: Path, tmp_path: Path):
    fetch(standin, cache, "org/plain")
    fetch(standin, cache, "org/quants:Q8_0")
    fetch(standin, cache, "org/quants:Q4_K_M")
    found = {model.name: model for model in local.list_local(tmp_path, cache_dir=cache)}
    assert set(found) == {"org/plain", "org/quants/m-Q4_K_M.gguf", "org/quants/m-Q8_0.gguf"}
    assert found["org/plain"].size_bytes > len(WEIGHTS)
    assert found["org/plain"].kind == "hub"
    assert found["org/quants/m-Q8_0.gguf"].kind == "gguf"
    freed = local.remove("org/quants/m-Q8_0.gguf", tmp_path, cache_dir=cache)
    assert freed == len(standin.repos["org/quants"]["m-Q8_0.gguf"])
    assert local.remove("org/plain", tmp_path, cache_dir=cache) > len(WEIGHTS)
    left = [model.name for model in local.list_local(tmp_path, cache_dir=cache)]
    assert left == ["org/quants/m-Q4_K_M.gguf"]
    assert not list(cache.glob("models--org--plain"))
    with pytest.raises(ModelNotFound, match="on this machine"):
        local.remove("org/plain", tmp_path, cache_dir=cache)
