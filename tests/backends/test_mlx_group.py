"""Tensor parallelism on MLX: ranks as processes, in a ring over loopback."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from mlx_ranks import (
    Ranks,
    engine_tokens,
    free_ports,
    logits_of_all,
    refusal,
    two_groups,
    wait_for_other,
)
from mlx_repo import write_quantised
from mlx_tiny import MLX_MODELS, load_mlx
from test_architectures import wide
from test_torch_models import LENGTHS, prompts, random_steps
from torch_tiny import make_reference, reference_logits

from pippin.backends.base import GroupSpec
from pippin.backends.mlx import group
from pippin.backends.mlx.group import _environment, connect
from pippin.errors import ConfigError, PeerLost

pytestmark = pytest.mark.slow

NAMES = (
    "llama",
    "llama-tied",
    "llama-bias",
    "mistral-window",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma3",
    "gemma3-softcap",
    "smollm3",
    "phi3",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v3-yarn",
    "glm4_moe",
    "ministral3",
)


def close(actual: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(actual), wanted, atol=1e-3, rtol=0)


def compare(size: int, references: dict[str, Any], paths: dict[str, Path]) -> None:
    tokens = prompts(LENGTHS)
    ranks = Ranks(size, logits_of_all, paths, tokens, random_steps(LENGTHS))
    try:
        for name, reference in references.items():
            answers = [ranks.result(rank) for rank in range(size)]
            assert {answer[0] for answer in answers} == {name}
            for seq, ids in tokens.items():
                close(answers[0][1][seq], reference_logits(reference, ids))
            whole = load_mlx(paths[name]).info
            for _, _, weights, kv in answers:
                assert weights < whole.weights_bytes
                for own, all_of_it in zip(kv, whole.kv_groups, strict=True):
                    latent = name.startswith("deepseek")
                    kv_heads = 1 if latent else reference.config.num_key_value_heads
                    part = 1 if latent else min(size, kv_heads)
                    assert own * part == all_of_it.bytes_per_token
    finally:
        ranks.close()


def test_two_ranks_give_the_whole_models_logits(tmp_path: Path) -> None:
    references = {name: make_reference(*MLX_MODELS[name]) for name in NAMES}
    paths = {name: tmp_path / name for name in NAMES}
    for name, reference in references.items():
        reference.save_pretrained(paths[name])
    compare(2, references, paths)


def test_ranks_may_share_kv_heads(tmp_path: Path) -> None:
    """Three ranks of six heads with one KV head."""
    reference = make_reference("llama", {"num_key_value_heads": 1})
    reference.save_pretrained(tmp_path / "m")
    compare(3, {"m": reference}, {"m": tmp_path / "m"})


def test_quantised_weights_are_cut_between_groups(tmp_path: Path) -> None:
    names = ("llama-tied", "qwen3_moe", "phi3", "deepseek_v3")
    paths = {name: tmp_path / name for name in names}
    references = {}
    for name in names:
        (tmp_path / name).mkdir()
        references[name] = write_quantised(wide(name), paths[name], 4)
    compare(2, references, paths)


def test_an_impossible_size_names_the_possible_ones(tmp_path: Path) -> None:
    make_reference("llama", {"num_attention_heads": 4, "hidden_size": 48}).save_pretrained(tmp_path)
    ranks = Ranks(3, refusal, tmp_path)
    try:
        error = ranks.result(0)
        assert isinstance(error, ConfigError)
        assert "1, 2 or 4" in (error.hint or "")
    finally:
        ranks.close()


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_the_engine_gives_the_same_tokens_in_any_layout(name: str, tmp_path: Path) -> None:
    make_reference(*MLX_MODELS[name]).save_pretrained(tmp_path)
    layouts: tuple[dict[str, int], ...] = (
        {},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 3},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    )
    found = []
    for layout in layouts:
        leader = Ranks(1, engine_tokens, tmp_path, layout)
        try:
            found.append(leader.result(0))
        finally:
            leader.close()
    assert all(len(tokens) == 16 for tokens in found[0].values())
    assert found[1:] == [found[0]] * 3


def test_a_second_group_in_a_process_is_refused(tmp_path: Path) -> None:
    make_reference("llama", {}).save_pretrained(tmp_path)
    ranks = Ranks(2, two_groups, tmp_path)
    try:
        for rank in range(2):
            error = ranks.result(rank)
            assert isinstance(error, ConfigError)
            assert "only one" in error.message
    finally:
        ranks.close()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_others_step(blow: int, tmp_path: Path) -> None:
    make_reference("llama", {}).save_pretrained(tmp_path)
    ranks = Ranks(2, wait_for_other, tmp_path, 2.0)
    try:
        assert [ranks.result(rank) for rank in range(2)] == ["started", "started"]
        os.kill(ranks.processes[1].pid, blow)
        for _ in range(2):  # and the next step, at once
            assert ranks.result(0).startswith("PeerLost: another rank")
    finally:
        ranks.close()


def test_a_rank_that_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "MEET_SECONDS", 0.3)
    here = f"127.0.0.1:{free_ports(1)[0]}"
    for rank, problem in ((0, "rank 1 .* did not come"), (1, "does not reach rank 0")):
        with pytest.raises(PeerLost, match=problem):
            connect(GroupSpec(rank, 2, "ring", (here, "127.0.0.1:1")))


def test_groups_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for spec, problem in (
        (GroupSpec(2, 2, "ring", ("a:1", "b:1")), "no group"),
        (GroupSpec(0, 2, "ring", ("a:1",)), "no group"),
        (GroupSpec(0, 2, "gloo", ("a:1", "b:1")), "gloo"),
    ):
        with pytest.raises(ConfigError, match=problem):
            connect(spec)
    with pytest.raises(ConfigError, match="RDMA device"):
        _environment(GroupSpec(0, 2, "jaccl", ("a:1", "b:1")), tmp_path)


def test_jaccl_is_told_what_its_documentation_asks_for(tmp_path: Path) -> None:
    """Not yet run: no Mac was at hand."""
    devices = ((None, "rdma_en2"), ("rdma_en3", None))
    spec = GroupSpec(1, 2, "jaccl", ("10.0.0.1:7000", "10.0.0.2:7000"), devices)
    variables = _environment(spec, tmp_path)
    assert variables["MLX_RANK"] == "1"
    assert variables["MLX_JACCL_COORDINATOR"] == "10.0.0.1:7000"
    written = Path(variables["MLX_IBV_DEVICES"]).read_text()
    assert written == '[[null, "rdma_en2"], ["rdma_en3", null]]'
