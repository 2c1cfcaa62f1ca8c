"""config.json of a model directory: reading it, its text part, its quantisation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pippin.errors import ModelInvalid, UnsupportedModel

Method = Literal["dense", "gptq", "awq", "mlx", "compressed-tensors", "fp8", "mxfp4"]
_SUPPORTED = (
    "supported: unquantised safetensors, GPTQ, AWQ (gemm), MLX affine, fp8, GPT-OSS's MXFP4,"
    " compressed-tensors (pack-quantized), and GGUF files"
)
_TEXT_CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_INHERITED = (
    "torch_dtype",
    "dtype",
    "quantization",
    "quantization_config",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ``ModelInvalid`` naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelInvalid(f"{path.parent} has no {path.name}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelInvalid(
            f"{path} is not valid JSON: {error}", hint="fetch the file again"
        ) from error
    if not isinstance(value, dict):
        raise ModelInvalid(f"{path} holds no JSON object", hint="fetch the file again")
    return value


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multimodal configuration; others as they are."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return config
    merged = {key: config[key] for key in _INHERITED if key in config} | inner
    name = _TEXT_CLASSES.get(inner.get("model_type", ""))
    if name is not None:
        return merged | {"architectures": [name]}
    return merged | {"architectures": config.get("architectures", [])}


#: Affine weights are read everywhere, the others by the MLX backend only.
_MLX_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the linears of a safetensors checkpoint are stored."""

    method: Method
    settings: dict[str, Any]
    """The method's own part of config.json."""

    def label(self) -> str | None:
        """For people, as in ``Checkpoint.quantization``."""
        if self.method == "dense":
            return None
        if self.method in ("fp8", "mxfp4"):
            return self.method
        bits = self.settings.get("bits", self.settings.get("w_bit", 4))
        mixed = {v["bits"] for v in self.settings.values() if isinstance(v, dict) and "bits" in v}
        return f"{self.method}-{bits}bit" + ("-mixed" if mixed - {bits} else "")

    def mlx_group_size(self, module: str) -> int:
        """Group size of one module, which may have its own settings."""
        return int(self._mlx(module).get("group_size", self.settings.get("group_size", 64)))

    def mlx_mode(self, module: str) -> str:
        """``affine``, or one of MLX's four- and eight-bit float modes."""
        return str(self._mlx(module).get("mode", "affine"))

    def _mlx(self, module: str) -> dict[str, Any]:
        own = self.settings.get(module)
        return own if isinstance(own, dict) else self.settings


def quantization_of(config: dict[str, Any], path: Path) -> Quantization:
    """What config.json says of its weights. Raises ``UnsupportedModel`` for other methods."""
    mlx = config.get("quantization")
    if isinstance(mlx, dict) and "group_size" in mlx:
        mode = mlx.get("mode", "affine")
        if mode not in _MLX_MODES:
            raise UnsupportedModel(
                f"{path}: MLX quantisation mode {mode!r} is not supported", hint=_SUPPORTED
            )
        return Quantization("mlx", mlx)
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return Quantization("dense", {})
    method = settings.get("quant_method")
    if method is None and "group_size" in settings and "bits" in settings:
        return Quantization("mlx", settings)
    match method:
        case "gptq":
            _check_gptq(settings, path)
            return Quantization("gptq", settings)
        case "awq":
            _check_awq(settings, path)
            return Quantization("awq", settings)
        case "fp8" | "mxfp4":
            return Quantization(method, settings)
        case "compressed-tensors":
            return _compressed_tensors(settings, path)
    raise UnsupportedModel(f"{path}: quantisation {method!r} is not supported", hint=_SUPPORTED)


def _compressed_tensors(settings: dict[str, Any], path: Path) -> Quantization:
    kind = settings.get("format")
    groups = list((settings.get("config_groups") or {}).values())
    weights = [group.get("weights") or {} for group in groups if isinstance(group, dict)]
    bits = [weight.get("num_bits") for weight in weights]
    if kind == "pack-quantized" and bits and all(count in (4, 8) for count in bits):
        return Quantization("compressed-tensors", {"bits": bits[0]})
    if kind == "float-quantized" and bits and all(count == 8 for count in bits):
        return Quantization("fp8", settings)
    raise UnsupportedModel(
        f"{path}: compressed-tensors format {kind!r} with {bits} bits is not supported",
        hint=_SUPPORTED,
    )


def _check_gptq(settings: dict[str, Any], path: Path) -> None:
    kind = settings.get("checkpoint_format", "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(
            f"{path}: GPTQ checkpoint format {kind!r} is not supported", hint=_SUPPORTED
        )
    if settings.get("bits") not in (2, 3, 4, 8):
        raise UnsupportedModel(
            f"{path}: GPTQ with {settings.get('bits')} bits is not supported", hint=_SUPPORTED
        )


def _check_awq(settings: dict[str, Any], path: Path) -> None:
    version = str(settings.get("version", "gemm")).lower()
    bits = settings.get("bits", settings.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise UnsupportedModel(
            f"{path}: AWQ version {version!r} with {bits} bits is not supported", hint=_SUPPORTED
        )
