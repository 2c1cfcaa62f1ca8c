"""Quantised checkpoints on MLX: kept as they are, and equal to their dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from gguf.constants import MODEL_ARCH
from gguf_convert import Converter, load_back
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from mlx_tiny import AsTorch, make_mlx
from safetensors.torch import save_file
from test_formats import FORMATS, TOKENS, write
from test_formats_gguf import ARCHITECTURES, QUANTISATIONS, TYPE
from torch_tiny import MODELS, Driver, make_reference, reference_logits
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pippin.backends.mlx.quantize import BITS, pack_codes
from pippin.backends.mlx.runner import load
from pippin.backends.torch.runner import load as load_torch
from pippin.config import Config, ModelConfig
from pippin.errors import ConfigError
from pippin.models.files import resolve
from pippin.models.packed import unpack

pytestmark = pytest.mark.slow


def open_mlx(path: Path, **model: Any) -> AsTorch:
    config = Config(model=ModelConfig(model=str(path), device="cpu", **model))
    return AsTorch(load(config, resolve(str(path), home=path.parent)))


def logits_of(runner: AsTorch) -> torch.Tensor:
    """All positions, fed in chunks."""
    driver = Driver(runner, num_blocks=64)
    driver.add(0, TOKENS)
    return driver.run([{0: 30}, {0: 1}, {0: len(TOKENS) - 31}])[0]


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, atol=1e-3, rtol=0)


def quantized_parts(runner: AsTorch) -> set[tuple[str, int, str]]:
    """(class, bits, mode) of the quantised modules in the layers."""
    modules = [m for layer in runner.runner._model.layers for _, m in layer.named_modules()]
    return {(type(m).__name__, m.bits, m.mode) for m in modules if hasattr(m, "group_size")}


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_packed_as_mlx_packs_them(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (5, 64)).astype(np.uint8)
    words = pack_codes(codes, bits)
    assert words.shape == (5, 2 * bits)
    assert np.array_equal(unpack(words, bits), codes)
    ones = mx.ones((5, 2))
    values = mx.dequantize(mx.array(words), ones, 0 * ones, group_size=32, bits=bits)
    assert np.array_equal(np.array(values), codes)


#: Formats, each with the bits that linears of the layers have afterwards (none: dequantised).
KEPT: dict[str, set[int]] = {
    "gptq-4": {4},
    "gptq-4-act-order": set(),
    "gptq-8": {8},
    "awq-4": {4},
    "mlx-4": {4},
    "mlx-8": {8},
    "mlx-3": {3},
    "mlx-6": {6},
    "mlx-mixed": {4, 8},
    "compressed-tensors-4": {4},
    "fp8": set(),
}


@pytest.mark.parametrize("name", KEPT)
def test_logits_equal_those_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    packer, settings, label = FORMATS[name]
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
    reference = make_reference("llama", {**sizes, "initializer_range": 0.1})
    write(reference, tmp_path / "m", packer, settings)
    runner = open_mlx(tmp_path / "m")
    close(logits_of(runner), reference_logits(reference, TOKENS))
    assert {bits for _, bits, _ in quantized_parts(runner)} == KEPT[name]
    assert runner.info.quantization == (label if KEPT[name] else None)
    assert ("dequantised" in runner.runner.reason) == (not KEPT[name])


@pytest.mark.parametrize("name", QUANTISATIONS)
def test_gguf(name: str, tmp_path: Path) -> None:
    changes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
    reference = make_reference(
        "llama", {**changes, "num_hidden_layers": 2, "initializer_range": 0.05}
    )
    path = tmp_path / "m.gguf"
    converter = Converter(reference, MODEL_ARCH.LLAMA, path, QUANTISATIONS[name])
    runner = open_mlx(path)
    close(logits_of(runner), reference_logits(load_back(reference, converter), TOKENS))
    bits = {"Q4_0": {4}, "Q4_1": {4}, "Q5_0": {5}, "Q5_1": {5}, "Q8_0": {8}, "demo": {4}}
    kept = {"F16": set(), "BF16": set(), "Q4_K_M": {4}} | bits
    assert {bits for _, bits, _ in quantized_parts(runner)} == kept[name]
    # Six bits in groups of 16 have no kernel in MLX.
    assert ("dequantised" in runner.runner.reason) == (name == "Q4_K_M")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gguf_architectures(name: str, tmp_path: Path) -> None:
    arch, changes = ARCHITECTURES[name]
    kind, base = MODELS[name]
    reference = make_reference(kind, {**base, **changes})
    Converter(reference, arch, tmp_path / "m.gguf", lambda _: TYPE.F32)
    close(logits_of(open_mlx(tmp_path / "m.gguf")), reference_logits(reference, TOKENS))


def test_asked_for_none_dequantises(tmp_path: Path) -> None:
    packer, settings, _ = FORMATS["mlx-4"]
    reference = make_reference(
        "llama", {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
    )
    write(reference, tmp_path / "m", packer, settings)
    runner = open_mlx(tmp_path / "m", quantization="none")
    assert quantized_parts(runner) == set()
    assert runner.info.quantization is None
    close(logits_of(runner), reference_logits(reference, TOKENS))


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_at_load(bits: int, tmp_path: Path) -> None:
    changes = {**MODELS["qwen3_moe"][1], "moe_intermediate_size": 32, "hidden_size": 64}
    reference = make_reference("qwen3_moe", changes | {"initializer_range": 0.05})
    runner = make_mlx(reference, tmp_path, quantization=f"{bits}bit")
    assert runner.info.quantization == f"mlx-{bits}bit"
    kinds = {kind for kind, b, _ in quantized_parts(runner) if b == bits}
    assert kinds == {"QuantizedLinear", "QuantizedSwitchLinear"}
    wanted = reference_logits(reference, TOKENS)
    error = (logits_of(runner) - wanted).norm() / wanted.norm()
    assert 0 < error < (0.4 if bits == 4 else 0.05)


def test_unknown_quantisation_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="7bit"):
        make_mlx(make_reference("llama", {}), tmp_path, quantization="7bit")


#: mlx-lm's own conversions: architecture, mode, group size, bits, changes.
CONVERSIONS: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {
    "llama-mxfp4": ("llama", "mxfp4", 32, 4, {}),
    "llama-mxfp8": ("llama", "mxfp8", 32, 8, {}),
    "llama-nvfp4": ("llama", "nvfp4", 16, 4, {}),
    "qwen3_moe": ("qwen3_moe", "affine", 32, 4, {"moe_intermediate_size": 32}),
    "deepseek_v3": (
        "deepseek_v3",
        "affine",
        32,
        4,
        {
            "moe_intermediate_size": 32,
            "num_key_value_heads": 8,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
    ),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_models_that_mlx_lm_converted(name: str, tmp_path: Path) -> None:
    """mlx-lm's own forward on the same files is the oracle."""
    kind, mode, group_size, bits, changes = CONVERSIONS[name]
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8}
    reference = make_reference(kind, MODELS[kind][1] | sizes | changes)
    reference.save_pretrained(tmp_path / "hub")
    config_path = tmp_path / "hub" / "config.json"
    # mlx-lm does not know all names that transformers 5 writes.
    known = {"rope_theta": 1e4, "num_experts": getattr(reference.config, "num_experts", 0)}
    config_path.write_text(json.dumps(json.loads(config_path.read_text()) | known))
    model, config = load_model(tmp_path / "hub")
    model, config = quantize_model(model, config, group_size, bits, mode=mode)
    save_model(tmp_path / "m", model)
    save_config(config, tmp_path / "m" / "config.json")
    wanted = model(mx.array(TOKENS)[None])[0].astype(mx.float32)
    runner = open_mlx(tmp_path / "m")
    assert any(m == mode for _, _, m in quantized_parts(runner))
    close(logits_of(runner), torch.from_numpy(np.array(wanted)))
    if name == "deepseek_v3":
        assert "QuantizedMultiLinear" in {k for k, _, _ in quantized_parts(runner)}


def gpt_oss() -> Any:
    changes = {**MODELS["gpt_oss"][1], "hidden_size": 64, "intermediate_size": 32}
    return make_reference("gpt_oss", changes)


def test_gpt_oss_as_the_hub_has_it(tmp_path: Path) -> None:
    """Experts stay MXFP4; transformers' own conversion is the oracle."""
    reference = gpt_oss()
    path = tmp_path / "m"
    path.mkdir()
    settings = {"quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(reference.config.to_dict() | settings))
    generator = torch.Generator().manual_seed(0)
    tensors, state = {}, reference.state_dict()
    for name, tensor in list(state.items()):
        if not name.endswith((".gate_up_proj", ".down_proj")):
            tensors[name] = tensor.clone()
            continue
        experts, width, out = tensor.shape
        shape = (experts, out, width // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 124, shape, generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        state[name] = convert_moe_packed_tensors(blocks, scales).float()
    reference.load_state_dict(state)
    save_file(tensors, path / "model.safetensors")
    runner = open_mlx(path)
    assert quantized_parts(runner) == {("QuantizedSwitchLinear", 4, "mxfp4")}
    close(logits_of(runner), reference_logits(reference, TOKENS))


def test_gguf_experts_stay_quantised(tmp_path: Path) -> None:
    changes = {
        **MODELS["qwen3_moe"][1],
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    reference = make_reference("qwen3_moe", changes)
    path = tmp_path / "m.gguf"
    Converter(
        reference,
        MODEL_ARCH.QWEN3MOE,
        path,
        lambda name: TYPE.Q8_0 if "_exps" in name else TYPE.F32,
    )
    runner = open_mlx(path)
    assert quantized_parts(runner) == {("QuantizedSwitchLinear", 8, "affine")}
    config = Config(model=ModelConfig(model=str(path), device="cpu", dtype="float32"))
    other = Driver(load_torch(config, resolve(str(path), home=tmp_path)), num_blocks=64)
    other.add(0, TOKENS)
    close(logits_of(runner), other.step({0: len(TOKENS)})[0])
