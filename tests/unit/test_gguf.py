"""GGUF files: the container, damage, metadata to configuration, names."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pippin.errors import ModelInvalid, UnsupportedModel
from pippin.models import gguf_blocks
from pippin.models.checkpoint import open_checkpoint
from pippin.models.files import ModelFiles
from pippin.models.gguf import GgufCheckpoint
from pippin.models.gguf_config import llama3_divisors
from pippin.models.gguf_file import GgufFile, split_files
from pippin.models.quant import QuantizedTensor

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, LAYERS = 64, 96, 4, 2, 40, 2


def llama_tensors(layers: int = LAYERS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(layers):
        block = f"blk.{layer}."
        shapes |= {
            block + "attn_norm.weight": (HIDDEN,),
            block + "attn_q.weight": (HIDDEN, HIDDEN),
            block + "attn_k.weight": (kv, HIDDEN),
            block + "attn_v.weight": (kv, HIDDEN),
            block + "attn_output.weight": (HIDDEN, HIDDEN),
            block + "ffn_norm.weight": (HIDDEN,),
            block + "ffn_gate.weight": (INNER, HIDDEN),
            block + "ffn_up.weight": (INNER, HIDDEN),
            block + "ffn_down.weight": (HIDDEN, INNER),
        }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    extra: dict[str, object] | None = None,
    **kwargs: object,
) -> Path:
    """A small model. ``extra`` overrides metadata under the architecture; None drops a key."""
    writer = gguf.GGUFWriter(path, architecture, **kwargs)
    values: dict[str, object] = {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    for key, value in (values | (extra or {})).items():
        full = f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, list):
            writer.add_array(full, value)
        elif value is not None:
            writer.add_uint32(full, value)
    for name, data in tensors.items():
        kind = GGMLQuantizationType.F32
        if data.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "m.gguf", llama_tensors())


# -- Container ------------------------------------------------------------------------------------


def test_the_reader_agrees_with_the_gguf_library(model: Path):
    ours, theirs = GgufFile(model), gguf.GGUFReader(model)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(n) for n in tensor.shape[::-1])
        assert (mine.kind, mine.offset) == (tensor.tensor_type, tensor.data_offset)
        np.testing.assert_array_equal(mine.raw().view(np.uint8), tensor.data.view(np.uint8))
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields


def test_metadata_of_every_type(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -100)
    writer.add_uint16("a.u16", 60_000)
    writer.add_int16("a.i16", -30_000)
    writer.add_int32("a.i32", -5)
    writer.add_uint64("a.u64", 2**40)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_array("a.strings", ["x", "é", "🙂"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_tensor("t", np.zeros((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = GgufFile(tmp_path / "types.gguf").metadata
    expected = {
        "u8": 200, "i8": -100, "u16": 60_000, "i16": -30_000, "i32": -5, "u64": 2**40,
        "i64": -(2**40), "f64": 0.1, "bool": True, "strings": ["x", "é", "🙂"], "ints": [1, -2, 3],
    }  # fmt: skip
    assert {k.removeprefix("a."): v for k, v in values.items() if k.startswith("a.")} == expected


def dequantizable(raw: np.ndarray, kind: GGMLQuantizationType) -> bool:
    if kind in gguf_blocks._DENSE:
        return True
    try:
        dequantize(raw, kind)
    except NotImplementedError:
        return False
    return True


def test_every_type_of_the_gguf_library_is_read_or_refused(tmp_path: Path):
    """A type that the library gains must not fall through to wrong numbers."""
    floats = (GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.F64)
    for kind in GGMLQuantizationType:
        block, size = GGML_QUANT_SIZES[kind]
        raw = np.zeros((2, 2 * size * (32 if block == 1 else 1)), np.uint8)
        writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
        writer.add_tensor("t", raw, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        tensor = GgufFile(tmp_path / "t.gguf").tensors["t"]
        if not dequantizable(raw, kind):
            with pytest.raises(UnsupportedModel, match=kind.name):
                gguf_blocks.read_float32(tensor)
            continue
        read = gguf_blocks.read_float32(tensor)
        assert read.shape == tensor.shape
        if kind not in floats and not kind.name.startswith("I"):
            np.testing.assert_array_equal(read, dequantize(raw, kind).reshape(read.shape))


@pytest.mark.parametrize("keep", [0.999, 0.9, 0.5, 0.05, 0.01])
def test_truncation_anywhere_is_named(model: Path, keep: float):
    size = model.stat().st_size
    with model.open("r+b") as stream:
        stream.truncate(int(size * keep))
    with pytest.raises(ModelInvalid, match="truncated") as caught:
        GgufFile(model)
    assert str(model) in caught.value.message
    assert caught.value.hint


def test_truncation_at_every_byte_of_a_header_is_an_error(model: Path):
    raw = model.read_bytes()
    header = GgufFile(model).header_bytes
    for size in range(0, header, 5):
        model.write_bytes(raw[:size])
        with pytest.raises((ModelInvalid, UnsupportedModel)):
            GgufFile(model)


def test_random_damage_to_the_header_never_escapes_as_another_error(model: Path):
    raw = bytearray(model.read_bytes())
    header = GgufFile(model).header_bytes
    rng = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(raw)
        for at in rng.integers(0, header, 3):
            damaged[at] = rng.integers(0, 256)
        model.write_bytes(damaged)
        try:
            GgufCheckpoint(model)
        except (ModelInvalid, UnsupportedModel):
            continue


def test_other_files_are_refused(tmp_path: Path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelInvalid, match="not a GGUF file"):
        GgufFile(path)
    path.write_bytes(b"")
    with pytest.raises(ModelInvalid, match="not a GGUF file"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("version", "message"), [(1, "version 1"), (9, "version 9"), (3 << 24, "big-endian")]
)
def test_other_versions_are_refused(model: Path, version: int, message: str):
    raw = bytearray(model.read_bytes())
    raw[4:8] = struct.pack("<I", version)
    model.write_bytes(raw)
    with pytest.raises(UnsupportedModel, match=message):
        GgufFile(model)


def test_split_models(tmp_path: Path):
    tensors = llama_tensors()
    write(tmp_path / "m.gguf", tensors, split_max_tensors=8)
    first, *rest = split_files(tmp_path / "m-00001-of-00003.gguf")
    assert [part.name for part in rest] == ["m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]
    checkpoint = GgufCheckpoint(first)
    assert len(checkpoint.names()) == len(tensors)
    rest[0].unlink()
    with pytest.raises(ModelInvalid, match="1 of 3 parts are missing, first m-00002-of-00003"):
        GgufCheckpoint(first)


# -- Checkpoint -----------------------------------------------------------------------------------


def test_llama(model: Path):
    checkpoint = open_checkpoint(ModelFiles("m", model, "gguf", ""))
    assert checkpoint.quantization == "gguf-q8_0"
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.config["tie_word_embeddings"] is True
    assert checkpoint.config["head_dim"] == 16
    source = llama_tensors()
    assert checkpoint.num_parameters == sum(tensor.size for tensor in source.values())
    up = checkpoint.tensor("model.layers.1.mlp.up_proj.weight")
    assert isinstance(up, QuantizedTensor)
    assert (up.bits, up.group_size) == (8, 32)
    np.testing.assert_allclose(up.dequantize(), source["blk.1.ffn_up.weight"], atol=0.02)
    norm = checkpoint.tensor("model.norm.weight")
    np.testing.assert_array_equal(norm.to_float32(), source["output_norm.weight"])
    with pytest.raises(KeyError):
        checkpoint.tensor("model.layers.9.mlp.up_proj.weight")


def test_q_and_k_rows_are_put_back_in_the_hubs_order(model: Path):
    """llama.cpp's converter: reshape(heads, 2, half, in).swapaxes(1, 2)."""
    stored = llama_tensors()["blk.0.attn_k.weight"]
    ours = GgufCheckpoint(model).tensor("model.layers.0.self_attn.k_proj.weight").dequantize()
    head = HIDDEN // HEADS
    forward = ours.reshape(KV_HEADS, 2, head // 2, HIDDEN).swapaxes(1, 2).reshape(stored.shape)
    np.testing.assert_allclose(forward, stored, atol=0.02)
    assert np.abs(ours - stored).max() > 0.5


def test_output_weight_unties_the_head(tmp_path: Path):
    tensors = llama_tensors() | {"output.weight": np.ones((VOCAB, HIDDEN), np.float32)}
    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf", tensors))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in checkpoint.names()


def test_a_missing_layer_is_named(tmp_path: Path):
    with pytest.raises(ModelInvalid, match="layer 1 of 2 is missing"):
        GgufCheckpoint(write(tmp_path / "m.gguf", llama_tensors(layers=1)))


def test_missing_metadata_is_named(tmp_path: Path):
    path = write(tmp_path / "m.gguf", llama_tensors(), extra={"embedding_length": None})
    with pytest.raises(ModelInvalid, match="embedding_length"):
        GgufCheckpoint(path)


def test_unknown_architecture_lists_the_known(tmp_path: Path):
    path = write(tmp_path / "m.gguf", llama_tensors(), architecture="rwkv7")
    with pytest.raises(UnsupportedModel, match="architecture 'rwkv7'") as caught:
        GgufCheckpoint(path)
    assert "llama" in (caught.value.hint or "")


def test_unknown_tensor_is_an_error_not_ignored(tmp_path: Path):
    tensors = llama_tensors() | {"blk.0.attn_sink_gate.weight": np.ones((HIDDEN,), np.float32)}
    with pytest.raises(UnsupportedModel, match="attn_sink_gate"):
        GgufCheckpoint(write(tmp_path / "m.gguf", tensors))


def test_heads_that_differ_between_layers_are_refused(tmp_path: Path):
    path = write(tmp_path / "m.gguf", llama_tensors(), extra={"attention.head_count": [4, 8]})
    with pytest.raises(UnsupportedModel, match="differs between layers"):
        GgufCheckpoint(path)


# -- Rope scaling ---------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_in_the_divisors(tmp_path: Path, factor: float):
    """Divisors as llama.cpp's converter writes them, step by step."""
    head, theta = HIDDEN // HEADS, 500000.0
    divisors = []
    for i in range(0, head, 2):
        wavelength = 2 * np.pi * theta ** (i / head)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    tensors = llama_tensors() | {"rope_freqs.weight": np.array(divisors, np.float32)}
    extra = {"rope.freq_base": theta}
    config = GgufCheckpoint(write(tmp_path / "m.gguf", tensors, extra=extra)).config
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    tensors["rope_freqs.weight"][3] *= 1.5
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        GgufCheckpoint(write(tmp_path / "n.gguf", tensors, extra=extra))


def test_llama3_divisors_are_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, rope_parameters=dict(scaling)
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 500000.0 ** (np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(
        plain / scaled.numpy(), llama3_divisors(scaling, 128, 500000.0), rtol=1e-5
    )


def test_linear_and_yarn_scaling(tmp_path: Path):
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    config = GgufCheckpoint(write(tmp_path / "l.gguf", llama_tensors(), extra=linear)).config
    assert config["rope_scaling"] == {"type": "linear", "rope_type": "linear", "factor": 4.0}
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 2.0,
        "rope.scaling.original_context_length": 128,
        "rope.scaling.yarn_beta_fast": 16.0,
    }
    config = GgufCheckpoint(write(tmp_path / "y.gguf", llama_tensors(), extra=yarn)).config
    assert config["rope_scaling"] == {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
    }
    other = {"rope.scaling.type": "ntk", "rope.scaling.factor": 2.0}
    with pytest.raises(UnsupportedModel, match="'ntk'"):
        GgufCheckpoint(write(tmp_path / "o.gguf", llama_tensors(), extra=other))
