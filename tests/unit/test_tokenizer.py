"""Tokenizers of model directories, and what the API process asks of any tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hub_standin import Hub, serve
from text_samples import differences, gguf_of_byte_level, samples
from tokenizer_standins import (
    CHATML,
    byte_fallback_backend,
    byte_level_backend,
    tokenizer,
    wordpiece_backend,
)
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from pippin.errors import DownloadError, InvalidRequest, ModelError, ModelInvalid
from pippin.models import hub, tokenizer_files
from pippin.models.files import ModelFiles
from pippin.models.tokenizer_files import read_directory
from pippin.models.tokenizer_parts import TokenizerParts
from pippin.server.tokenizer import Tokenizer, load_tokenizer

START, END = 1, 2  # ids of the stand-in's <|im_start|> and <|im_end|>


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory with nothing but ``tokenizer.json``."""
    directory = tmp_path / "model"
    directory.mkdir()
    byte_level_backend().save(str(directory / "tokenizer.json"))
    return directory


def write(directory: Path, name: str, value: Any) -> None:
    text = value if isinstance(value, str) else json.dumps(value)
    (directory / name).write_text(text, encoding="utf-8")


def read(directory: Path) -> TokenizerParts:
    return read_directory(directory, directory / "home")


# -- directories ---------------------------------------------------------------------------------


def test_only_a_tokenizer_json(model: Path) -> None:
    parts = read(model)
    backend = byte_level_backend()
    assert not differences(
        lambda text: parts.backend.encode(text).ids,
        lambda text: backend.encode(text).ids,
        samples(200),
    )
    assert parts.vocab_size == backend.get_vocab_size()
    assert (parts.bos_token_id, parts.eos_token_ids, dict(parts.chat_templates)) == (None, (), {})


def test_truncation_and_padding_of_the_file_are_off(model: Path) -> None:
    backend = Backend.from_file(str(model / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(model / "tokenizer.json"))
    ids = read(model).backend.encode("one two three four five six").ids
    assert ids == byte_level_backend().encode("one two three four five six").ids


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, (2,)),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}}}, (2,)),
        ({"special_tokens_map.json": {"eos_token": "<|im_end|>"}}, (2,)),
        ({"config.json": {"eos_token_id": 0}}, (0,)),
        ({"config.json": {"eos_token_id": [0, 2]}}, (0, 2)),
        ({"config.json": {"eos_token_id": None}}, ()),
        (
            {
                "generation_config.json": {"eos_token_id": [2, 0]},
                "config.json": {"eos_token_id": 1},
            },
            (2, 0),
        ),
        (
            {
                "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
                "generation_config.json": {"eos_token_id": 2},
            },
            (0, 2),
        ),
        # A base model's end of text, and a template that ends turns with another token.
        (
            {"tokenizer_config.json": {"eos_token": "<|endoftext|>", "chat_template": CHATML}},
            (0, 2),
        ),
    ],
)
def test_end_of_sequence(model: Path, files: dict[str, Any], expected: tuple[int, ...]) -> None:
    for name, value in files.items():
        write(model, name, value)
    assert read(model).eos_token_ids == expected


def test_default_sampling(model: Path) -> None:
    generation = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": None,
        "repetition_penalty": 1.05,
        "max_new_tokens": 64,
        "do_sample": True,
        "pad_token_id": 3,
    }
    write(model, "generation_config.json", generation)
    assert read(model).default_sampling == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.05,
        "max_tokens": 64,
    }


def test_chat_templates(model: Path) -> None:
    write(model, "tokenizer_config.json", {"chat_template": "inline"})
    assert read(model).chat_templates == {"default": "inline"}
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write(model, "tokenizer_config.json", {"chat_template": named})
    assert read(model).chat_templates == {"default": "d", "tool_use": "t"}
    write(model, "chat_template.jinja", "file")
    (model / "additional_chat_templates").mkdir()
    write(model, "additional_chat_templates/rag.jinja", "r")
    assert read(model).chat_templates == {"default": "file", "tool_use": "t", "rag": "r"}


def test_tokens_that_only_the_configuration_adds(model: Path) -> None:
    size = byte_level_backend().get_vocab_size()
    decoder = {
        str(size + 1): {"content": "<two>", "special": False, "normalized": False},
        str(size): {"content": "<one>", "special": True},
        "1": {"content": "<|im_start|>", "special": True},
    }
    write(model, "tokenizer_config.json", {"added_tokens_decoder": decoder})
    parts = read(model)
    assert parts.backend.encode("<one><two><|im_start|>").ids == [size, size + 1, 1]
    assert parts.backend.decode([size, size + 1]) == "<two>"
    assert parts.vocab_size == size + 2


def test_flags_of_llama_tokenizers(model: Path) -> None:
    """transformers adds begin and end for these classes by flags, not by ``tokenizer.json``."""
    text = byte_level_backend().encode("hello").ids
    config = {
        "tokenizer_class": "LlamaTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }
    for flags, expected in (
        ({}, [START, *text]),
        ({"add_bos_token": False}, text),
        ({"add_eos_token": True}, [START, *text, END]),
    ):
        write(model, "tokenizer_config.json", {**config, **flags})
        backend = read(model).backend
        assert backend.encode("hello").ids == expected
        assert backend.encode("hello", add_special_tokens=False).ids == text
    write(model, "tokenizer_config.json", {**config, "tokenizer_class": "Qwen2TokenizerFast"})
    assert read(model).backend.encode("hello").ids == text
    # What tokenizer.json adds counts for other classes, and does not for these.
    own = Backend.from_file(str(model / "tokenizer.json"))
    own.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", START)]
    )
    own.save(str(model / "tokenizer.json"))
    assert read(model).backend.encode("hello").ids == [START, *text]
    write(model, "tokenizer_config.json", {**config, "add_bos_token": False})
    assert read(model).backend.encode("hello").ids == text


def test_missing_and_damaged_files(model: Path) -> None:
    write(model, "tokenizer_config.json", "{")
    with pytest.raises(ModelInvalid, match="tokenizer_config"):
        read(model)
    (model / "tokenizer_config.json").unlink()
    whole = (model / "tokenizer.json").read_text()
    for text in (whole[:1000], "[]", '{"model": {}}', ""):
        write(model, "tokenizer.json", text)
        with pytest.raises(ModelInvalid, match=r"tokenizer\.json is not a valid tokenizer"):
            read(model)
    (model / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelInvalid):
        read(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelInvalid, match="no tokenizer") as caught:
        read(model)
    assert "--tokenizer" in str(caught.value.hint)
    write(model, "merges.txt", "a b\n")
    with pytest.raises(ModelInvalid, match="no tokenizer"):
        read(model)


def test_ids_with_holes(model: Path) -> None:
    data = json.loads((model / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    vocab[max(vocab, key=vocab.get)] = 5000
    data["added_tokens"] = data["added_tokens"][:3]
    write(model, "tokenizer.json", data)
    assert read(model).vocab_size == 5001


# -- slow tokenizers -----------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [True, False])
def test_sentencepiece_model(legacy: bool, tmp_path: Path) -> None:
    """Without transformers, with the begin token, and equal to sentencepiece."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(t.replace("\n", " ") for t in samples(800)), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=1600,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    write(
        tmp_path, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "legacy": legacy}
    )
    parts = read(tmp_path)
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    texts = [
        text
        for text in samples(400)
        if text
        and not any(marker in text for marker in ("<s>", "</s>", "<unk>", "\0"))
        # The later kind adds no second space before a space (Hugging Face's fast tokenizers).
        and (legacy or not text.startswith((" ", "▁")))
    ]
    assert not differences(
        lambda text: parts.backend.encode(text).ids, lambda text: [1, *original.encode(text)], texts
    )
    behind = parts.backend.encode("</s>a", add_special_tokens=False).ids
    spaced = original.encode("a")
    assert (behind == [2, *spaced]) is legacy
    assert not (tmp_path / "home").exists()


def test_conversion_by_transformers(tmp_path: Path) -> None:
    """``vocab.json`` with ``merges.txt``: converted once, then kept."""
    data = json.loads(byte_level_backend().to_str())["model"]
    write(tmp_path, "vocab.json", data["vocab"])
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["merges"]]
    write(tmp_path, "merges.txt", "#version: 0.2\n" + "\n".join(merges) + "\n")
    tokens = {"eos_token": "<|im_end|>", "bos_token": "<|im_end|>", "unk_token": "<|im_end|>"}
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", **tokens})
    write(tmp_path, "config.json", {"model_type": "gpt2"})
    parts = read(tmp_path)
    backend = byte_level_backend()
    texts = [text for text in samples(300) if "<|" not in text and "<tool" not in text]
    assert not differences(
        lambda text: parts.backend.encode(text).ids, lambda text: backend.encode(text).ids, texts
    )
    assert parts.eos_token_ids == (END,)
    kept = list((tmp_path / "home").rglob("tokenizer*.json"))
    assert len(kept) == 1
    stamp = kept[0].stat().st_mtime_ns
    assert read(tmp_path).backend.encode("abc").ids == parts.backend.encode("abc").ids
    assert kept[0].stat().st_mtime_ns == stamp


def test_conversion_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "vocab.json", {})
    write(tmp_path, "merges.txt", "")
    converter = tmp_path / "converter.py"
    monkeypatch.setattr(tokenizer_files, "_CONVERTER", converter)
    converter.write_text("raise ValueError('bad merges')")
    with pytest.raises(ModelInvalid, match=r"convert .*: ValueError: bad merges") as caught:
        read(tmp_path)
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    converter.write_text("")  # says nothing and writes nothing
    with pytest.raises(ModelInvalid, match="no message"):
        read(tmp_path)
    converter.write_text("import threading; threading.Event().wait()")
    monkeypatch.setattr(tokenizer_files, "_CONVERT_SECONDS", 0.5)
    with pytest.raises(ModelInvalid, match="hangs"):
        read(tmp_path)


# -- load_tokenizer ------------------------------------------------------------------------------


def files(path: Path) -> ModelFiles:
    kind = "gguf" if path.suffix == ".gguf" else "directory"
    return ModelFiles(name=str(path), path=path, kind=kind, fingerprint="")


def test_load(model: Path, tmp_path: Path) -> None:
    write(model, "tokenizer_config.json", {"chat_template": CHATML})
    of_directory = load_tokenizer(files(model), home=tmp_path)
    path = gguf_of_byte_level(
        model / "tokenizer.json", tmp_path / "m.gguf", "gpt-2", chat_template=CHATML
    )
    of_gguf = load_tokenizer(files(path), home=tmp_path)
    chat = [{"role": "user", "content": "hi"}]
    assert of_gguf.apply_chat_template(chat) == of_directory.apply_chat_template(chat)
    elsewhere = tmp_path / "empty"
    elsewhere.mkdir()
    for other in (model, model / "tokenizer.json", path):
        other_tokenizer = load_tokenizer(files(elsewhere), str(other), home=tmp_path)
        assert other_tokenizer.encode("hello") == of_directory.encode("hello")
    with pytest.raises(ModelInvalid, match="no tokenizer"):
        load_tokenizer(files(elsewhere), home=tmp_path)
    with pytest.raises(ModelError):
        load_tokenizer(files(model), "/no/such/place", home=tmp_path)


def test_tokenizer_of_the_hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tokenizer's files are fetched; they are found again offline."""
    repo = {
        "config.json": b'{"eos_token_id": 2}',
        "tokenizer.json": (model / "tokenizer.json").read_bytes(),
        "tokenizer_config.json": json.dumps({"chat_template": CHATML}).encode(),
        "model.safetensors": b"weights",
        "README.md": b"text",
    }
    elsewhere = tmp_path / "empty"
    elsewhere.mkdir()
    fetch = hub.fetch
    with serve(Hub({"org/name": repo})) as standin:
        monkeypatch.setattr(
            hub, "fetch", partial(fetch, endpoint=standin.url, cache_dir=tmp_path / "cache")
        )
        tok = load_tokenizer(files(elsewhere), "org/name", home=tmp_path)
        assert tok.encode("hello") == tokenizer().encode("hello")
        assert (tok.eos_token_ids, tok.has_chat_template) == ((2,), True)
        assert not standin.ranges_of("model.safetensors")
        assert not standin.ranges_of("README.md")
    again = load_tokenizer(files(elsewhere), "org/name", home=tmp_path, offline=True)
    assert again.encode("hello") == tok.encode("hello")
    with pytest.raises(DownloadError):
        load_tokenizer(files(elsewhere), "org/other", home=tmp_path, offline=True)


def test_operators_template(model: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    text = load_tokenizer(files(model), chat_template="{{ 1 + 1 }}", home=tmp_path)
    assert text.render_chat(chat) == "2"
    write(tmp_path, "t.jinja", "from a file")
    file = load_tokenizer(files(model), chat_template=str(tmp_path / "t.jinja"), home=tmp_path)
    assert file.render_chat(chat) == "from a file"
    with pytest.raises(ModelInvalid, match="chat template"):
        load_tokenizer(files(model), chat_template=str(tmp_path / "none.jinja"), home=tmp_path)


def test_imports_stay_light() -> None:
    code = (
        "import sys, pippin.server.tokenizer, pippin.server.detokenizer\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


# -- Tokenizer -----------------------------------------------------------------------------------


def test_markers_in_a_prompt_are_control_tokens() -> None:
    tok = tokenizer()
    assert tok.encode("a<|im_start|>b<|im_end|>")[1::2] == [START, END]
    assert tok.decode([START, *tok.encode("a")]) == "a"
    assert tok.decode([START, *tok.encode("a")], skip_special_tokens=False) == "<|im_start|>a"
    assert tok.is_special(START)
    assert not tok.is_special(tok.encode("<tool_call>")[0])


def test_encode_batch_equals_encode() -> None:
    tok = tokenizer()
    texts = samples(200)
    assert tok.encode_batch(texts) == [tok.encode(text) for text in texts]


def test_encode_equals_the_library() -> None:
    for backend in (byte_level_backend(), byte_fallback_backend(), wordpiece_backend()):
        tok = tokenizer(backend)
        assert not differences(
            tok.encode, lambda text, backend=backend: backend.encode(text).ids, samples(200)
        )


def test_text_that_is_not_unicode() -> None:
    tok = tokenizer()
    for call in (tok.encode, lambda text: tok.encode_batch([text])):
        with pytest.raises(InvalidRequest, match="surrogate"):
            call("a\ud800b")
    with pytest.raises(InvalidRequest, match="surrogate"):
        tok.apply_chat_template([{"role": "user", "content": "<|im_end|>\udfff"}])


@pytest.mark.parametrize("bad", [-1, 2**31, 2**40])
def test_decode_of_ids_that_cannot_be(bad: int) -> None:
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        tokenizer().decode([1, bad])


def test_ids_behind_the_vocabulary_have_no_text() -> None:
    tok = tokenizer()
    behind = tok.vocab_size + 3
    assert tok.decode([*tok.encode("a"), behind]) == "a"
    assert (tok.token_text(behind), tok.token_bytes(behind)) == ("", b"")


def test_bytes_of_every_token() -> None:
    """Joined bytes decode to what the library decodes."""
    for backend in (byte_level_backend(), byte_fallback_backend()):
        tok = tokenizer(backend)
        for text in samples(300):
            ids = tok.encode(text)
            data = b"".join(map(tok.token_bytes, ids))
            if tok.bytes.strips_first_space:
                data = data.removeprefix(b" ")
            assert data.decode() == backend.decode(ids, skip_special_tokens=False)
    tok = tokenizer()
    assert tok.token_bytes(START) == b"<|im_start|>"
    assert tok.token_text(tok.encode("🚀")[0]).startswith(("🚀", "\ufffd"))


def test_bad_words() -> None:
    """Both forms are banned, also where they differ in length."""
    tok = tokenizer()
    assert len(tok.encode("quick")) > 1
    assert len(tok.encode(" quick")) == 1
    banned = tok.bad_words_token_ids(["quick"])
    assert tuple(tok.encode("quick")) in banned
    assert tuple(tok.encode(" quick")) in banned
    assert set(tok.bad_words_token_ids([" quick"])) == set(banned)
    assert len(banned) == len(set(banned))
    assert tok.bad_words_token_ids([]) == ()


def test_bad_words_of_sentencepiece() -> None:
    """Also inside a word, where no space comes first."""
    tok = tokenizer(byte_fallback_backend())
    id_of = byte_fallback_backend().token_to_id
    banned = tok.bad_words_token_ids(["ab"])
    assert (id_of("▁ab"),) in banned
    assert (id_of("ab"),) in banned


@pytest.mark.parametrize("word", ["", " ", "\n\t"])
def test_blank_bad_words(word: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer().bad_words_token_ids(["fine", word])
    assert caught.value.param == "bad_words"


def test_threads() -> None:
    """Encoding, decoding and rendering from many threads give what one thread gives."""
    tok = tokenizer()
    texts = samples(300)

    def work(text: str) -> tuple[list[int], str, list[int], bytes]:
        ids = tok.encode(text)
        chat = [{"role": "user", "content": text}]
        data = b"".join(map(tok.token_bytes, ids))
        return ids, tok.decode(ids), tok.apply_chat_template(chat), data

    expected = [work(text) for text in texts]
    fresh: Tokenizer = tokenizer()
    tok = fresh
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, texts)) == expected
