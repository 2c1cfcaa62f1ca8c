"""Tiny random models of each architecture, and a driver that feeds a runner awkward plans."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pippin.backends.torch.runner import TorchRunner, load
from pippin.config import Config, ModelConfig
from pippin.models.files import local_directory
from pippin.types.step import Chunk, StepPlan

BLOCK = 4

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

_COMMON: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MLA = {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "head_dim": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}

#: name -> (model_type, what differs from ``_COMMON``)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("mistral", {"sliding_window": 11}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "head_dim": 16, "mlp_only_layers": [1]}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3-softcap": ("gemma3_text", {"head_dim": 16, "final_logit_softcapping": 5.0}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5, "head_dim": 16}),
    "phi3-window": ("phi3", {"sliding_window": 13}),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
    "deepseek_v3": ("deepseek_v3", _MLA),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {
            **_MLA,
            "q_lora_rank": None,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
}

LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + 0.05 * i for i in range(4)],
        "long_factor": [1.5 + 0.7 * i for i in range(4)],
    },
}
DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": 32,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}


def make_reference(kind: str, changes: dict[str, Any], seed: int = 0) -> Any:
    """A random transformers model, float32."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**_COMMON, **changes})
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms, biases and sinks start at constants: a wrong one would not be seen.
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "experts" in name and parameter.ndim == 2:
                parameter.normal_(std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    return model.eval()


def make_runner(reference: Any, path: Path, **model: Any) -> TorchRunner:
    """Save a model and load it with ours."""
    reference.save_pretrained(path)
    settings = {"device": "cpu", "dtype": "float32"} | model
    return load(
        Config(model=ModelConfig(model=str(path), **settings)), local_directory("tiny", path)
    )


@torch.no_grad()
def reference_logits(reference: Any, token_ids: list[int]) -> torch.Tensor:
    """[T, vocab], all positions in one forward."""
    logits: torch.Tensor = reference(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


@dataclass
class _Sequence:
    token_ids: list[int]
    tables: list[list[int]]
    """Per group; -1 where a block fell behind the window."""
    done: int = 0
    sent: int = 0


class Driver:
    """Keeps block tables as the engine does, with pages in random order.

    Blocks behind a window go to other sequences at once, so that reading one shows.
    """

    def __init__(
        self, runner: TorchRunner, num_blocks: int, *, block_size: int = BLOCK, seed: int = 0
    ) -> None:
        self.runner = runner
        self.block_size = block_size
        self.windows = [group.window for group in runner.info.kv_groups]
        runner.allocate_kv((num_blocks,) * len(self.windows), block_size)
        shuffle = random.Random(seed).shuffle
        self.free: list[list[int]] = []
        for _ in self.windows:
            blocks = list(range(num_blocks))
            shuffle(blocks)
            self.free.append(blocks)
        self.users = [[0] * num_blocks for _ in self.windows]
        self.sequences: dict[int, _Sequence] = {}
        self.freed: list[int] = []
        self.steps = 0

    def add(self, seq: int, token_ids: list[int], prefix_of: int | None = None) -> None:
        """Take a sequence in; with ``prefix_of``, it shares that one's full blocks."""
        new = _Sequence(list(token_ids), [[] for _ in self.windows])
        if prefix_of is not None:
            other = self.sequences[prefix_of]
            common = 0
            while common < min(other.done, len(token_ids) - 1) and (
                other.token_ids[common] == token_ids[common]
            ):
                common += 1
            shared = common // self.block_size
            new.done = shared * self.block_size
            for group, table in enumerate(other.tables):
                new.tables[group] = table[:shared]
                for block in table[:shared]:
                    if block >= 0:
                        self.users[group][block] += 1
        self.sequences[seq] = new

    def remove(self, seq: int) -> None:
        sequence = self.sequences.pop(seq)
        for group, table in enumerate(sequence.tables):
            for block in table:
                self._release(group, block)
        self.freed.append(seq)

    def step(
        self,
        counts: dict[int, int],
        num_logits: int | None = None,
        layers: tuple[int, int] | None = None,
    ) -> dict[int, torch.Tensor]:
        """Run ``counts[seq]`` further tokens of each; returns their logits (all, or the last).

        The last of them through ``layers`` only, which go on from one step to the next.
        """
        chunks = []
        unfinished = None
        if layers is not None and layers[1] < self.runner.info.num_layers:
            unfinished = list(counts)[-1]
        for seq, count in counts.items():
            sequence = self.sequences[seq]
            end = sequence.done + count
            for group, table in enumerate(sequence.tables):
                while len(table) * self.block_size < end:
                    table.append(self.free[group].pop())
                    self.users[group][table[-1]] += 1
            chunks.append(
                Chunk(
                    seq=seq,
                    start=sequence.done,
                    token_ids=sequence.token_ids[sequence.done : end],
                    new_blocks=tuple(tuple(table[sequence.sent :]) for table in sequence.tables),
                    num_logits=0
                    if seq == unfinished
                    else (count if num_logits is None else num_logits),
                    layers=layers if seq == list(counts)[-1] else None,
                )
            )
            sequence.sent = len(sequence.tables[0])
        plan = StepPlan(step=self.steps, chunks=tuple(chunks), freed=tuple(self.freed))
        self.freed = []
        self.steps += 1
        logits = self.runner.execute(plan)
        result, row = {}, 0
        for chunk in chunks:
            if chunk.seq == unfinished:
                continue
            sequence = self.sequences[chunk.seq]
            sequence.done = chunk.end
            self._free_behind_windows(sequence)
            if chunk.num_logits:
                result[chunk.seq] = logits[row : row + chunk.num_logits].clone()
            row += chunk.num_logits
        return result

    def run(self, counts: list[dict[int, int]]) -> dict[int, torch.Tensor]:
        """Several steps; returns the logits of all positions of each sequence."""
        parts: dict[int, list[torch.Tensor]] = {}
        for step in counts:
            for seq, logits in self.step(step).items():
                parts.setdefault(seq, []).append(logits)
        return {seq: torch.cat(logits) for seq, logits in parts.items()}

    def _free_behind_windows(self, sequence: _Sequence) -> None:
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            table = sequence.tables[group]
            for index in range(max(0, sequence.done - window + 1) // self.block_size):
                if table[index] >= 0:
                    self._release(group, table[index])
                    table[index] = -1

    def _release(self, group: int, block: int) -> None:
        if block < 0:
            return
        self.users[group][block] -= 1
        if not self.users[group][block]:
            self.free[group].append(block)
