"""Safetensors directories: names, formats, and what is wrong with damaged ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pippin.errors import ModelInvalid, PippinError, UnsupportedModel
from pippin.models.checkpoint import Checkpoint, open_checkpoint
from pippin.models.files import ModelFiles
from pippin.models.quant import QuantizedTensor
from pippin.models.safetensors_dir import SafetensorsCheckpoint
from pippin.models.safetensors_file import SafetensorsFile

EMBED = "model.embed_tokens.weight"
NORM = "model.layers.0.input_layernorm.weight"
PROJ = "model.layers.0.self_attn.q_proj"
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}


def plain() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        EMBED: rng.normal(size=(8, 64)).astype(np.float32),
        NORM: rng.normal(size=64).astype(np.float16),
        f"{PROJ}.weight": rng.normal(size=(64, 64)).astype(np.float32),
    }


def directory(path: Path, tensors: dict[str, np.ndarray], config: object = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    save_file(tensors, path / "model.safetensors")
    return path


def sharded(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for number, (name, tensor) in enumerate(plain().items(), 1):
        file = f"model-{number:05d}-of-00003.safetensors"
        save_file({name: tensor}, path / file)
        weight_map[name] = file
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(ModelFiles("m", path, "directory", ""))


def raw_safetensors(path: Path, header: object, data: bytes = b"") -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


# -- Plain ----------------------------------------------------------------------------------------


def test_values_and_types(tmp_path: Path):
    checkpoint = opened(directory(tmp_path / "m", plain()))
    assert checkpoint.names() == frozenset(plain())
    assert checkpoint.quantization is None
    assert checkpoint.config == CONFIG
    for name, expected in plain().items():
        tensor = checkpoint.tensor(name)
        assert tensor.dtype == expected.dtype.name
        np.testing.assert_array_equal(tensor.data, expected)
    with pytest.raises(KeyError):
        checkpoint.tensor("model.layers.7.none.weight")


def test_bfloat16_and_fp8_keep_their_bits(tmp_path: Path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    path = directory(tmp_path / "m", plain())
    save_torch(
        {"a": values.bfloat16(), "b": values.to(torch.float8_e4m3fn), "c": torch.empty(0, 4)},
        path / "model-extra.safetensors",
    )
    checkpoint = opened(path)
    a, b = checkpoint.tensor("a"), checkpoint.tensor("b")
    assert (a.dtype, b.dtype) == ("bfloat16", "float8_e4m3")
    np.testing.assert_array_equal(a.to_float32(), values.bfloat16().float().numpy())
    np.testing.assert_array_equal(b.to_float32(), values.to(torch.float8_e4m3fn).float().numpy())
    assert checkpoint.tensor("c").shape == (0, 4)


def test_tensors_are_views_of_the_file(tmp_path: Path):
    tensor = opened(directory(tmp_path / "m", plain())).tensor(EMBED)
    assert not tensor.data.flags.writeable
    assert not tensor.data.flags.owndata


def test_shards(tmp_path: Path):
    checkpoint = opened(sharded(tmp_path / "m"))
    for name, expected in plain().items():
        np.testing.assert_array_equal(checkpoint.tensor(name).data, expected)


def test_files_of_other_formats_beside_the_model_are_ignored(tmp_path: Path):
    path = directory(tmp_path / "m", plain())
    save_file({"tok_embeddings.weight": np.zeros(4)}, path / "consolidated.safetensors")
    save_file({"lora_A": np.zeros(4)}, path / "adapter_model.safetensors")
    assert opened(path).names() == frozenset(plain())


def test_names_without_the_class_around_them(tmp_path: Path):
    bare = {name.removeprefix("model."): tensor for name, tensor in plain().items()}
    assert opened(directory(tmp_path / "m", bare)).names() == frozenset(plain())


@pytest.mark.parametrize("style", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_multimodal_model(tmp_path: Path, style: str):
    tensors = {name.replace("model.", style, 1): tensor for name, tensor in plain().items()}
    head = "language_model.lm_head.weight" if style[0] == "l" else "lm_head.weight"
    tensors[head] = np.zeros((8, 64), np.float32)
    tensors["vision_tower.patch.weight"] = np.zeros(3, np.float32)
    tensors["model.multi_modal_projector.w"] = np.zeros(3, np.float32)
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 1},
        "vision_config": {},
    }
    checkpoint = opened(directory(tmp_path / "m", tensors, config))
    assert checkpoint.names() == frozenset(plain()) | {"lm_head.weight"}
    assert checkpoint.config == {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 1,
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
    }


# -- Quantised ------------------------------------------------------------------------------------


def test_gptq_shows_as_one_weight(tmp_path: Path):
    tensors = plain()
    del tensors[f"{PROJ}.weight"]
    tensors |= {
        f"{PROJ}.qweight": np.full((8, 64), 0x33333333, np.int32),
        f"{PROJ}.qzeros": np.full((2, 8), 0x77777777, np.int32),
        f"{PROJ}.scales": np.full((2, 64), 0.5, np.float16),
        f"{PROJ}.g_idx": np.repeat(np.arange(2, dtype=np.int32), 32),
        f"{PROJ}.bias": np.zeros(64, np.float32),
    }
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    path = directory(tmp_path / "m", tensors, CONFIG | {"quantization_config": settings})
    checkpoint = opened(path)
    assert checkpoint.quantization == "gptq-4bit"
    assert checkpoint.num_parameters == 8 * 64 + 64 + 64 * 64 + 64
    assert checkpoint.names() == frozenset(plain()) | {f"{PROJ}.bias"}
    weight = checkpoint.tensor(f"{PROJ}.weight")
    assert isinstance(weight, QuantizedTensor)
    assert (weight.dequantize() == 0.5 * (3 - 8)).all()
    settings["checkpoint_format"] = "gptq_v2"
    directory(path, tensors, CONFIG | {"quantization_config": settings})
    assert (opened(path).tensor(f"{PROJ}.weight").dequantize() == 0.5 * (3 - 7)).all()


def test_mlx_with_mixed_bits_and_groups(tmp_path: Path):
    tensors = plain()
    other = "model.layers.0.self_attn.k_proj"
    tensors |= {
        f"{PROJ}.weight": np.zeros((64, 8), np.uint32),
        f"{PROJ}.scales": np.ones((64, 1), np.float16),
        f"{PROJ}.biases": np.ones((64, 1), np.float16),
        f"{other}.weight": np.zeros((64, 16), np.uint32),
        f"{other}.scales": np.ones((64, 2), np.float16),
        f"{other}.biases": np.ones((64, 2), np.float16),
    }
    settings = {
        "group_size": 64,
        "bits": 4,
        other: {"group_size": 32, "bits": 8},
        "lm_head": False,
    }
    checkpoint = opened(directory(tmp_path / "m", tensors, CONFIG | {"quantization": settings}))
    assert checkpoint.quantization == "mlx-4bit-mixed"
    assert checkpoint.num_parameters == 8 * 64 + 64 + 2 * 64 * 64
    first, second = checkpoint.tensor(f"{PROJ}.weight"), checkpoint.tensor(f"{other}.weight")
    assert (first.bits, first.group_size, first.shape) == (4, 64, (64, 64))
    assert (second.bits, second.group_size, second.shape) == (8, 32, (64, 64))


def test_mlx_stacked_experts_stand_one_by_one(tmp_path: Path):
    module = "model.layers.0.mlp.switch_mlp.up_proj"
    rng = np.random.default_rng(0)
    tensors = plain() | {
        f"{module}.weight": rng.integers(0, 2**32, (3, 16, 8), dtype=np.uint32),
        f"{module}.scales": rng.normal(size=(3, 16, 1)).astype(np.float32),
        f"{module}.biases": rng.normal(size=(3, 16, 1)).astype(np.float32),
    }
    config = CONFIG | {"quantization": {"group_size": 64, "bits": 4}}
    checkpoint = opened(directory(tmp_path / "m", tensors, config))
    names = {f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in range(3)}
    assert checkpoint.names() == frozenset(plain()) | names
    assert checkpoint.num_parameters == 8 * 64 + 64 + 64 * 64 + 3 * 16 * 64
    one = checkpoint.tensor("model.layers.0.mlp.experts.2.up_proj.weight")
    assert one.shape == (16, 64)
    np.testing.assert_array_equal(one.scales, tensors[f"{module}.scales"][2])


def test_fp8_with_block_scales(tmp_path: Path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(192, 256, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2, generator=generator)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = directory(tmp_path / "m", plain(), CONFIG | {"quantization_config": settings})
    module = "model.layers.0.mlp.up_proj"
    save_torch(
        {f"{module}.weight": weight, f"{module}.weight_scale_inv": scale},
        path / "model-b.safetensors",
    )
    checkpoint = opened(path)
    assert checkpoint.quantization == "fp8"
    assert checkpoint.num_parameters == 8 * 64 + 64 + 64 * 64 + 192 * 256
    assert f"{module}.weight_scale_inv" not in checkpoint.names()
    result = checkpoint.tensor(f"{module}.weight").to_float32()
    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:192]
    np.testing.assert_array_equal(result, (weight.float() * full).numpy())


@pytest.mark.parametrize("rows", [True, False])
def test_fp8_with_a_scale_a_row_or_a_weight(tmp_path: Path, rows: bool):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    weight = torch.randn(64, 256).to(torch.float8_e4m3fn)
    scale = torch.rand(64, 1) if rows else torch.rand(1)
    settings = {"quant_method": "fp8"}
    if rows:
        weights = {"weights": {"num_bits": 8, "type": "float"}}
        settings = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": weights},
        }
    path = directory(tmp_path / "m", plain(), CONFIG | {"quantization_config": settings})
    module = "model.layers.0.mlp.up_proj"
    parts = {"weight": weight, "weight_scale": scale, "input_scale": torch.ones(1)}
    save_torch({f"{module}.{k}": v for k, v in parts.items()}, path / "model-b.safetensors")
    checkpoint = opened(path)
    assert checkpoint.names() == frozenset(plain()) | {f"{module}.weight"}
    result = checkpoint.tensor(f"{module}.weight").to_float32()
    np.testing.assert_array_equal(result, (weight.float() * scale).numpy())


@pytest.mark.parametrize("name", [f"{PROJ}.qweight", f"{PROJ}.scales", f"{PROJ}.weight_scale_inv"])
def test_packed_weights_without_a_word_in_the_configuration(tmp_path: Path, name: str):
    path = directory(tmp_path / "m", plain() | {name: np.zeros((2, 2), np.int32)})
    refused(path, "does not say how", UnsupportedModel)


def test_mxfp4_experts_are_dequantised_exactly(tmp_path: Path):
    """GPT-OSS: [experts, 2 inner, hidden / 32, 16] bytes; nibbles in turn, low first."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 8, 3, 16), dtype=np.uint8)
    scales = rng.integers(120, 130, (2, 8, 3), dtype=np.uint8)
    prefix = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = plain() | {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
    config = CONFIG | {"quantization_config": {"quant_method": "mxfp4"}}
    checkpoint = opened(directory(tmp_path / "m", tensors, config))
    assert checkpoint.names() == frozenset(plain()) | {prefix}
    assert checkpoint.num_parameters == 8 * 64 + 64 + 64 * 64 + 2 * 8 * 96
    result = checkpoint.tensor(prefix)
    assert (result.dtype, result.shape) == ("bfloat16", (2, 96, 8))
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    values = result.to_float32()
    for expert, row, group, byte in ((0, 0, 0, 0), (1, 7, 2, 15), (1, 3, 1, 4)):
        scale = 2.0 ** (int(scales[expert, row, group]) - 127)
        pair = blocks[expert, row, group, byte]
        column = group * 32 + 2 * byte
        assert values[expert, column, row] == table[pair & 15] * scale
        assert values[expert, column + 1, row] == table[pair >> 4] * scale


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "exl2"}}, "exl2"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5}}, "5 bits"),
        (
            {
                "quantization_config": {
                    "quant_method": "gptq",
                    "bits": 4,
                    "checkpoint_format": "marlin",
                }
            },
            "marlin",
        ),
        ({"quantization_config": {"quant_method": "awq", "version": "gemv"}}, "gemv"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "marlin-24"}},
            "marlin-24",
        ),
        ({"quantization": {"group_size": 16, "bits": 4, "mode": "nf4"}}, "nf4"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, config: dict, message: str):
    path = directory(tmp_path / "m", plain(), CONFIG | config)
    with pytest.raises(UnsupportedModel, match=message) as caught:
        opened(path)
    assert "GPTQ" in (caught.value.hint or "")


def test_mlx_float_modes_are_for_mlx_only(tmp_path: Path):
    """Their parts are handed over as stored; nothing else can read the weight."""
    words, scales = np.zeros((64, 8), np.uint32), np.full((64, 4), 56, np.uint8)
    tensors = plain() | {f"{PROJ}.weight": words, f"{PROJ}.scales": scales}
    settings = {"quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4"}}
    checkpoint = opened(directory(tmp_path / "m", tensors, CONFIG | settings))
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    packed = checkpoint.mlx_packed(f"{PROJ}.weight")
    assert packed is not None
    assert (packed.bits, packed.group_size, packed.mode) == (4, 16, "nvfp4")
    assert packed.biases is None
    assert np.array_equal(packed.scales.data, scales)
    with pytest.raises(UnsupportedModel, match="nvfp4") as caught:
        checkpoint.tensor(f"{PROJ}.weight")
    assert caught.value.hint == "--backend mlx"
    assert checkpoint.mlx_packed(NORM) is None


def test_a_packed_weight_that_does_not_fit_is_named(tmp_path: Path):
    tensors = plain() | {
        f"{PROJ}.weight": np.zeros((64, 7), np.uint32),
        f"{PROJ}.scales": np.ones((64, 1), np.float16),
        f"{PROJ}.biases": np.ones((64, 1), np.float16),
    }
    config = CONFIG | {"quantization": {"group_size": 64, "bits": 4}}
    checkpoint = opened(directory(tmp_path / "m", tensors, config))
    with pytest.raises(ModelInvalid, match="q_proj"):
        checkpoint.tensor(f"{PROJ}.weight")


# -- Damage ---------------------------------------------------------------------------------------


def refused(path: Path, message: str, kind: type[PippinError] = ModelInvalid) -> str:
    with pytest.raises(kind, match=message) as caught:
        opened(path)
    assert "\n" not in caught.value.message
    assert str(path) in caught.value.message
    return caught.value.hint or ""


def test_no_config(tmp_path: Path):
    path = directory(tmp_path / "m", plain())
    (path / "config.json").unlink()
    refused(path, r"no config\.json")


@pytest.mark.parametrize("text", ["{", "[1]", "\udcff"])
def test_broken_config(tmp_path: Path, text: str):
    path = directory(tmp_path / "m", plain())
    (path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(path, r"config\.json")


def test_missing_shard(tmp_path: Path):
    path = sharded(tmp_path / "m")
    (path / "model-00002-of-00003.safetensors").unlink()
    refused(path, "1 of 3 weight files are missing, first model-00002")
    (path / "model.safetensors.index.json").unlink()
    refused(path, "model-00002-of-00003.safetensors is missing")


def test_index_and_shards_that_disagree(tmp_path: Path):
    path = sharded(tmp_path / "m")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00003.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(path, "'model.extra.weight', named in model.safetensors.index.json, is missing")
    (path / "model.safetensors.index.json").write_text("{}")
    refused(path, "no weight_map")


def test_the_same_tensor_twice(tmp_path: Path):
    path = directory(tmp_path / "m", plain())
    save_file({EMBED: plain()[EMBED]}, path / "other.safetensors")
    refused(path, "is in both")


@pytest.mark.parametrize("keep", [0, 4, 8, 60, -1])
def test_truncated(tmp_path: Path, keep: int):
    path = directory(tmp_path / "m", plain())
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "again" in refused(path, "truncated")


def test_not_safetensors_at_all(tmp_path: Path):
    path = directory(tmp_path / "m", plain())
    (path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid x\n")
    assert "git lfs pull" in refused(path, "Git LFS")
    (path / "model.safetensors").write_bytes(b"\xff" * 64)
    refused(path, "not a safetensors file")


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "header is corrupt"),
        (b"\xff\xfe{}", "header is corrupt"),
        ([1], "header is corrupt"),
        ({"a": 1}, "entry of 'a' is corrupt"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "entry of 'a' is corrupt"),
        ({"a": ENTRY | {"shape": [-2]}}, "shape of 'a'"),
        ({"a": ENTRY | {"shape": [3]}}, "8 bytes for shape"),
        ({"a": ENTRY | {"data_offsets": [-8, 0]}}, "'a'"),
        ({"a": ENTRY | {"data_offsets": [8, 0]}}, "'a'"),
        ({"a": ENTRY | {"data_offsets": [8, 16]}}, "truncated"),
    ],
)
def test_corrupt_headers(tmp_path: Path, header: object, message: str):
    with pytest.raises(ModelInvalid, match=message):
        SafetensorsFile(raw_safetensors(tmp_path / "x.safetensors", header, bytes(8)))


def test_unknown_dtype(tmp_path: Path):
    file = raw_safetensors(
        tmp_path / "x.safetensors", {"a": ENTRY | {"dtype": "F6_E3M2"}}, bytes(8)
    )
    with pytest.raises(UnsupportedModel, match="F6_E3M2"):
        SafetensorsFile(file)


def test_missing_layers(tmp_path: Path):
    path = directory(tmp_path / "m", plain(), CONFIG | {"num_hidden_layers": 4})
    refused(path, "3 of 4 layers are missing, first 1")


def test_no_embedding(tmp_path: Path):
    tensors = plain()
    del tensors[EMBED]
    refused(directory(tmp_path / "m", tensors), "no embedding")


def test_directories_without_usable_weights(tmp_path: Path):
    path = directory(tmp_path / "m", plain())
    (path / "model.safetensors").unlink()
    refused(path, "no \\*.safetensors files")
    (path / "sub").mkdir()
    save_file(plain(), path / "sub" / "model.safetensors")
    assert str(path / "sub") in refused(path, "no weights itself")
    (path / "pytorch_model.bin").write_bytes(b"x")
    assert "safetensors" in refused(path, "pytorch_model.bin", UnsupportedModel)
    save_file({"x": np.zeros(1)}, path / "consolidated.safetensors")
    refused(path, "Mistral", UnsupportedModel)
    save_file({"x": np.zeros(1)}, path / "adapter_model.safetensors")
    refused(path, "adapter", UnsupportedModel)


def test_random_damage_never_escapes_as_another_error(tmp_path: Path):
    path = directory(tmp_path / "m", plain())
    file = path / "model.safetensors"
    raw = file.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    rng = np.random.default_rng(0)
    for _ in range(400):
        damaged = bytearray(raw)
        for at in rng.integers(0, header, 2):
            damaged[at] = rng.integers(0, 256)
        file.write_bytes(damaged)
        try:
            checkpoint = SafetensorsCheckpoint(path)
        except (ModelInvalid, UnsupportedModel):
            continue
        for name in checkpoint.names():
            checkpoint.tensor(name)
