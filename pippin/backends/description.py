"""What a checkpoint's config.json says of the model, read with transformers' configurations.

Needs neither torch nor MLX: shared by all backends.
"""

from __future__ import annotations

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from pippin.errors import ModelInvalid, UnsupportedModel
from pippin.types.model import KVGroup, KVKind

#: Model types with recurrent layers among the attention (or instead of it).
_RECURRENT = frozenset(
    {
        "bamba", "bailing_hybrid", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba",
        "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h",
        "olmo_hybrid", "plamo2", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
        "recurrent_gemma", "rwkv7", "zamba", "zamba2",
    }
)  # fmt: skip


def read_config(raw: dict[str, Any], supported: tuple[str, ...]) -> Any:
    """transformers' configuration of a checkpoint's config.json.

    Raises ``UnsupportedModel`` for a model type outside ``supported``, ``ModelInvalid`` for values
    that do not describe a model.
    """
    kind = raw.get("model_type")
    if kind not in supported:
        named = ", ".join(raw.get("architectures") or ()) or kind or "without a model_type"
        why = "is not supported"
        if kind in _RECURRENT:
            why += ": its layers keep recurrent state, which the KV cache has no place for yet"
        raise UnsupportedModel(
            f"architecture {named} {why}", hint=f"supported model types: {', '.join(supported)}"
        )
    plain = {k: v for k, v in raw.items() if k not in ("quantization_config", "quantization")}
    try:
        return AutoConfig.for_model(**plain)
    except (TypeError, ValueError, KeyError, StrictDataclassError) as error:
        raise ModelInvalid(f"config.json does not describe a {kind} model: {error}") from error


def rope_switch(config: Any) -> int | None:
    """See ``ModelInfo.rope_switch``."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "longrope":
        return None
    original: int = parameters["original_max_position_embeddings"]
    return original if original < config.max_position_embeddings else None


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Per layer, its attention window where it is shorter than the context."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    count: int = config.num_hidden_layers
    if window is None or window >= config.max_position_embeddings:
        return (None,) * count
    if kinds is None:
        return (window,) * count
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def kv_groups(
    config: Any, first: int, last: int, bytes_per_token_layer: int
) -> tuple[tuple[KVGroup, ...], dict[int, int]]:
    """The model's groups (only their layers of [first, last)), and each layer's group."""
    windows = layer_windows(config)
    distinct = sorted(set(windows), key=lambda w: (w is not None, w))
    latent = is_latent(config)
    groups = []
    for window in distinct:
        layers = tuple(i for i in range(first, last) if windows[i] == window)
        kind = KVKind.WINDOW if window else KVKind.LATENT if latent else KVKind.FULL
        groups.append(KVGroup(kind, layers, bytes_per_token_layer * len(layers), window))
    return tuple(groups), {i: distinct.index(windows[i]) for i in range(first, last)}


def is_latent(config: Any) -> bool:
    """Whether attention is multi-head latent attention (DeepSeek)."""
    return getattr(config, "kv_lora_rank", None) is not None
