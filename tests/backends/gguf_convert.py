"""From a transformers model to a GGUF file, as llama.cpp's converter does it.

Names come from gguf-py's own map and the changes from ``convert_hf_to_gguf.py``; nothing here uses
Pippin. Quantisers for K types, which gguf-py cannot write, follow the layouts in ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, RopeScalingType

Types = Callable[[str], GGMLQuantizationType]
"""GGUF tensor name to type."""
_SUFFIXES = (".weight", ".bias")
_PERMUTED = (MODEL_ARCH.LLAMA, MODEL_ARCH.SMOLLM3)


def quantize(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Rows of ``data`` as bytes of ``kind``."""
    own = {GGMLQuantizationType.Q4_K: _q4_k, GGMLQuantizationType.Q6_K: _q6_k}.get(kind)
    if own is None:
        return gguf.quants.quantize(data, kind)
    return own(data.reshape(-1, 256)).reshape(*data.shape[:-1], -1)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 8, 32)
    low = np.minimum(groups.min(axis=2), -1e-6)
    scale = (groups.max(axis=2) - low) / 15
    d = (scale.max(axis=1) / 63).astype(np.float16)
    dmin = (-low.min(axis=1) / 63).astype(np.float16)
    wide_d, wide_min = d.astype(np.float32)[:, None], dmin.astype(np.float32)[:, None]
    sc = np.clip(np.round(scale / wide_d), 1, 63).astype(np.uint8)
    m = np.clip(np.round(-low / wide_min), 0, 63).astype(np.uint8)
    step, base = (wide_d * sc)[:, :, None], (wide_min * m)[:, :, None]
    codes = np.clip(np.round((groups + base) / step), 0, 15).astype(np.uint8)
    packed = np.zeros((len(blocks), 12), np.uint8)
    for j in range(4):
        packed[:, j] = sc[:, j] | (sc[:, j + 4] >> 4) << 6
        packed[:, j + 4] = m[:, j] | (m[:, j + 4] >> 4) << 6
        packed[:, j + 8] = (sc[:, j + 4] & 15) | (m[:, j + 4] & 15) << 4
    pairs = codes.reshape(-1, 4, 2, 32)
    quants = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    halves = np.stack([d, dmin], axis=1).view(np.uint8)
    return np.concatenate([halves, packed, quants], axis=1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    scale = np.maximum(np.abs(groups).max(axis=2), 0.01) / 31
    d = (scale.max(axis=1) / 127).astype(np.float16)
    sc = np.clip(np.round(scale / d.astype(np.float32)[:, None]), 1, 127).astype(np.int8)
    step = (d.astype(np.float32)[:, None] * sc)[:, :, None]
    codes = (np.clip(np.round(groups / step), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    ql = np.stack([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2)
    qh = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = [ql.reshape(-1, 128), qh.reshape(-1, 64), sc.view(np.uint8), d[:, None].view(np.uint8)]
    return np.concatenate(parts, axis=1)


class Converter:
    """Writes one model. ``tensors``: by GGUF name, what was written, dequantised."""

    def __init__(self, model: Any, arch: MODEL_ARCH, path: Path, types: Types) -> None:
        self.config = model.config
        self.arch = arch
        self.types = types
        self.names = gguf.get_tensor_name_map(arch, self.config.num_hidden_layers)
        self.writer = gguf.GGUFWriter(path, MODEL_ARCH_NAMES[arch])
        self.tensors: dict[str, np.ndarray] = {}
        self._metadata()
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            self._parameter(name, tensor.float().numpy())
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def _add(self, hub_name: str, data: np.ndarray) -> None:
        name = self.names.get_name(hub_name, try_suffixes=_SUFFIXES)
        assert name is not None, hub_name
        self._write(name, data)

    def _write(self, name: str, data: np.ndarray) -> None:
        kind = self.types(name) if data.ndim > 1 else GGMLQuantizationType.F32
        raw = quantize(np.ascontiguousarray(data), kind)
        self.writer.add_tensor(name, raw, raw_dtype=kind)
        self.tensors[name] = gguf.quants.dequantize(raw, kind).reshape(data.shape)

    def _parameter(self, name: str, data: np.ndarray) -> None:
        config = self.config
        if self.arch in _PERMUTED and ".self_attn.q_proj." in name:
            data = permute(data, config.num_attention_heads)
        if self.arch in _PERMUTED and ".self_attn.k_proj." in name:
            data = permute(data, config.num_key_value_heads)
        if self.arch is MODEL_ARCH.GEMMA3 and name.endswith("norm.weight"):
            data = data + 1
        if self.arch is MODEL_ARCH.GPT_OSS and ".experts." in name:
            self._gpt_oss_experts(name, data)
        elif name.endswith(".experts.gate_up_proj"):
            gate, up = np.split(data, 2, axis=1)
            self._add(name.replace("gate_up_proj", "gate_proj.weight"), gate)
            self._add(name.replace("gate_up_proj", "up_proj.weight"), up)
        elif name.endswith((".experts.down_proj", ".self_attn.sinks")):
            self._add(name + ".weight", data)
        elif name.endswith("e_score_correction_bias"):
            self._add(name.replace("correction_bias", "correction.bias"), data)
        elif name.endswith(".kv_b_proj.weight") and self.arch is MODEL_ARCH.DEEPSEEK2:
            nope, value = config.qk_nope_head_dim, config.v_head_dim
            both = data.reshape(config.num_attention_heads, nope + value, -1)
            self._add(name.replace("kv_b_proj", "k_b_proj"), both[:, :nope].swapaxes(1, 2))
            self._add(name.replace("kv_b_proj", "v_b_proj"), both[:, nope:])
        else:
            self._add(name, data)

    def _gpt_oss_experts(self, name: str, data: np.ndarray) -> None:
        if name.endswith("_bias"):
            name, suffix = name.removesuffix("_bias"), ".bias"
        else:
            data, suffix = data.swapaxes(1, 2), ".weight"
        if "gate_up_proj" in name:
            self._add(name.replace("gate_up_proj", "gate_proj") + suffix, data[:, ::2])
            self._add(name.replace("gate_up_proj", "up_proj") + suffix, data[:, 1::2])
        else:
            self._add(name + suffix, data)

    def _metadata(self) -> None:
        config, writer = self.config, self.writer
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        if self.arch not in (MODEL_ARCH.PHI3, MODEL_ARCH.DEEPSEEK2):
            head = getattr(config, "head_dim", None)
            if head is not None:
                writer.add_key_length(head)
                writer.add_value_length(head)
        rope = config.rope_parameters
        rope = rope.get("full_attention", rope)
        writer.add_rope_freq_base(rope["rope_theta"])
        self._rope(rope)
        extra = {
            MODEL_ARCH.PHI3: self._phi3,
            MODEL_ARCH.GEMMA3: self._gemma3,
            MODEL_ARCH.QWEN3MOE: self._qwen3moe,
            MODEL_ARCH.GPT_OSS: self._gpt_oss,
            MODEL_ARCH.DEEPSEEK2: self._deepseek2,
        }.get(self.arch)
        if extra is not None:
            extra()

    def _rope(self, rope: dict[str, Any]) -> None:
        writer = self.writer
        match rope["rope_type"]:
            case "linear":
                writer.add_rope_scaling_type(RopeScalingType.LINEAR)
                writer.add_rope_scaling_factor(rope["factor"])
            case "yarn":
                writer.add_rope_scaling_type(RopeScalingType.YARN)
                writer.add_rope_scaling_factor(rope["factor"])
                writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
                if rope.get("mscale_all_dim"):
                    writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
            case "longrope":
                writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
                for kind in ("long", "short"):
                    factors = np.array(rope[f"{kind}_factor"], np.float32)
                    self._write(f"rope_factors_{kind}.weight", factors)

    def _phi3(self) -> None:
        config, writer = self.config, self.writer
        rope = config.rope_parameters
        original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        writer.add_rope_scaling_orig_ctx_len(original)
        head = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head))
        writer.add_sliding_window(config.sliding_window or 0)

    def _gemma3(self) -> None:
        self.writer.add_sliding_window(self.config.sliding_window)
        if self.config.final_logit_softcapping:
            self.writer.add_final_logit_softcapping(self.config.final_logit_softcapping)

    def _qwen3moe(self) -> None:
        self.writer.add_expert_count(self.config.num_experts)
        self.writer.add_expert_used_count(self.config.num_experts_per_tok)
        self.writer.add_expert_feed_forward_length(self.config.moe_intermediate_size)

    def _gpt_oss(self) -> None:
        self.writer.add_expert_count(self.config.num_local_experts)
        self.writer.add_expert_used_count(self.config.num_experts_per_tok)
        self.writer.add_expert_feed_forward_length(self.config.intermediate_size)
        self.writer.add_sliding_window(self.config.sliding_window)

    def _deepseek2(self) -> None:
        config, writer = self.config, self.writer
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        if config.q_lora_rank:
            writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows (``LlamaModel.permute``)."""
    shape = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    shape = (heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def load_back(model: Any, converter: Converter) -> Any:
    """Put the weights as they are after quantisation into a Llama-like model."""
    config, state = model.config, {}
    for name in model.state_dict():
        stored = converter.names.get_name(name, try_suffixes=_SUFFIXES)
        data = converter.tensors.get(stored)
        if data is None:
            assert name == "lm_head.weight"
            data = converter.tensors["token_embd.weight"]
        if ".self_attn.q_proj." in name:
            data = unpermute(data, config.num_attention_heads)
        if ".self_attn.k_proj." in name:
            data = unpermute(data, config.num_key_value_heads)
        state[name] = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
    model.load_state_dict(state)
    return model
