"""GGUF files of every architecture and of the common quantisations, through the torch runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import MODEL_ARCH, GGMLQuantizationType
from gguf_convert import Converter, load_back
from torch_tiny import MODELS, Driver, make_reference, reference_logits

from pippin.backends.torch.runner import load
from pippin.config import Config, ModelConfig
from pippin.models.files import resolve

TYPE = GGMLQuantizationType
TOKENS = [int(x) for x in torch.randint(3, 151, (70,), generator=torch.Generator().manual_seed(5))]


def logits_of(path: Path, tokens: list[int] = TOKENS) -> torch.Tensor:
    """All positions, fed in chunks."""
    config = Config(model=ModelConfig(model=str(path), device="cpu", dtype="float32"))
    driver = Driver(load(config, resolve(str(path), home=path.parent)), num_blocks=64)
    driver.add(0, tokens)
    first = min(40, len(tokens) - 2)
    return driver.run([{0: first}, {0: 1}, {0: len(tokens) - first - 1}])[0]


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    scale = expected.abs().max().clamp(min=1.0)
    torch.testing.assert_close(actual / scale, expected / scale, atol=tolerance, rtol=0)


ARCHITECTURES: dict[str, tuple[MODEL_ARCH, dict[str, Any]]] = {
    "llama": (MODEL_ARCH.LLAMA, {}),
    "llama-tied": (MODEL_ARCH.LLAMA, {}),
    "llama-bias": (MODEL_ARCH.LLAMA, {}),
    "llama-linear": (MODEL_ARCH.LLAMA, {}),
    "llama-yarn": (MODEL_ARCH.LLAMA, {}),
    "mistral": (MODEL_ARCH.LLAMA, {}),
    "qwen2": (MODEL_ARCH.QWEN2, {}),
    "qwen3": (MODEL_ARCH.QWEN3, {}),
    "qwen3_moe": (MODEL_ARCH.QWEN3MOE, {"mlp_only_layers": [], "norm_topk_prob": True}),
    # llama.cpp has Gemma's pattern of six layers, and 1 / sqrt(head_dim), in its code.
    "gemma3": (
        MODEL_ARCH.GEMMA3,
        {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 16},
    ),
    "gemma3-softcap": (MODEL_ARCH.GEMMA3, {"query_pre_attn_scalar": 16, "layer_types": None}),
    "smollm3": (MODEL_ARCH.SMOLLM3, {"num_hidden_layers": 5, "no_rope_layers": None}),
    "phi3": (MODEL_ARCH.PHI3, {"head_dim": 8}),
    "phi3-window": (MODEL_ARCH.PHI3, {}),
    "gpt_oss": (
        MODEL_ARCH.GPT_OSS,
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "deepseek_v3": (MODEL_ARCH.DEEPSEEK2, {"tie_word_embeddings": False}),
    "deepseek_v3-yarn": (MODEL_ARCH.DEEPSEEK2, {}),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name: str, tmp_path: Path):
    arch, changes = ARCHITECTURES[name]
    kind, base = MODELS[name]
    reference = make_reference(kind, {**base, **changes})
    Converter(reference, arch, tmp_path / "m.gguf", lambda _: TYPE.F32)
    close(logits_of(tmp_path / "m.gguf"), reference_logits(reference, TOKENS))


def test_phi3_longrope(tmp_path: Path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + 0.05 * i for i in range(8)],
        "long_factor": [1.5 + 0.7 * i for i in range(8)],
    }
    changes = {"hidden_size": 96, "original_max_position_embeddings": 32, "rope_parameters": rope}
    reference = make_reference("phi3", changes)
    Converter(reference, MODEL_ARCH.PHI3, tmp_path / "m.gguf", lambda _: TYPE.F32)
    # On either side of the original length: all chunks of the longer prompt are beyond it.
    for length in (len(TOKENS), 30):
        tokens = TOKENS[:length]
        actual = logits_of(tmp_path / "m.gguf", tokens)
        close(actual[-1], reference_logits(reference, tokens)[-1])


def test_gpt_oss_mxfp4(tmp_path: Path):
    """Experts in MXFP4: exact as bfloat16, so equal to the dequantised model."""
    kind, base = MODELS["gpt_oss"]
    reference = make_reference(kind, {**base, "hidden_size": 64, "intermediate_size": 32})

    def types(name: str) -> GGMLQuantizationType:
        return TYPE.MXFP4 if "_exps.weight" in name else TYPE.F32

    converter = Converter(reference, MODEL_ARCH.GPT_OSS, tmp_path / "m.gguf", types)
    state = reference.state_dict()
    for layer in range(3):
        block = f"blk.{layer}.ffn_"
        gate, up, down = (
            torch.from_numpy(converter.tensors[f"{block}{part}_exps.weight"])
            for part in ("gate", "up", "down")
        )
        prefix = f"model.layers.{layer}.mlp.experts."
        both = torch.stack([gate, up], dim=2).flatten(1, 2)
        state[f"{prefix}gate_up_proj"] = both.transpose(1, 2).contiguous()
        state[f"{prefix}down_proj"] = down.transpose(1, 2).contiguous()
    reference.load_state_dict(state)
    close(logits_of(tmp_path / "m.gguf"), reference_logits(reference, TOKENS))


def q4_k_m(name: str) -> GGMLQuantizationType:
    """llama.cpp's mixture, as for the layers that it treats better."""
    better = ("attn_v", "ffn_down", "token_embd", "output.weight")
    return TYPE.Q6_K if any(part in name for part in better) else TYPE.Q4_K


QUANTISATIONS: dict[str, Any] = {
    "F16": lambda _: TYPE.F16,
    "BF16": lambda _: TYPE.BF16,
    "Q4_0": lambda _: TYPE.Q4_0,
    "Q4_1": lambda _: TYPE.Q4_1,
    "Q5_0": lambda _: TYPE.Q5_0,
    "Q5_1": lambda _: TYPE.Q5_1,
    "Q8_0": lambda _: TYPE.Q8_0,
    "Q4_K_M": q4_k_m,
    "demo": lambda name: TYPE.Q8_0 if "token_embd" in name else TYPE.Q4_1,
}


@pytest.mark.parametrize("name", QUANTISATIONS)
def test_quantisations(name: str, tmp_path: Path):
    """Logits equal those of the dequantised weights in float32 within 1e-3."""
    changes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
    reference = make_reference("llama", {**changes, "num_hidden_layers": 2})
    before = reference.lm_head.weight.clone()
    converter = Converter(reference, MODEL_ARCH.LLAMA, tmp_path / "m.gguf", QUANTISATIONS[name])
    expected = reference_logits(load_back(reference, converter), TOKENS)
    actual = logits_of(tmp_path / "m.gguf")
    assert (actual - expected).abs().max() < 1e-3
    # The dequantised weights are others, and yet near: the quantisers do their work.
    error = (reference.lm_head.weight - before).abs().mean() / before.abs().mean()
    assert 0 < error < 0.12
