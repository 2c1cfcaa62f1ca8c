"""The engine on MLX: the next chunk of a prompt is handed over while the device works on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_tiny import MODELS, make_reference

from pippin import config
from pippin.engine.core import EngineCore, load
from pippin.types.request import Request, SamplingParams


def add(engine: EngineCore, name: str, prompt: list[int], max_tokens: int) -> None:
    engine.add(
        Request(
            request_id=name,
            prompt_token_ids=prompt,
            params=SamplingParams(temperature=0, ignore_eos=True),
            seed=0,
            max_tokens=max_tokens,
        )
    )


def test_chunks_of_a_prompt_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, changes = MODELS["llama"]
    reference = make_reference(kind, changes)
    reference.save_pretrained(tmp_path)
    engine = load(
        config.build(
            {
                "model": {"model": str(tmp_path), "backend": "mlx", "dtype": "float32"},
                "cache": {"block_size": 4, "kv_cache_bytes": 4 << 20},
                "scheduler": {"max_num_batched_tokens": 8},
            }
        )
    )
    events: list[str] = []

    def record(owner: Any, name: str, event: str) -> None:
        inner = getattr(owner, name)

        def outer(*given: Any) -> Any:
            events.append(event)
            return inner(*given)

        monkeypatch.setattr(owner, name, outer)

    record(engine._stages.runner, "execute", "e")
    record(engine._scheduler, "commit", "c")
    prompts = {"a": [7, *range(3, 44)], "b": list(range(100, 139))}
    for name, prompt in prompts.items():
        add(engine, name, prompt, 6)
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_unfinished():
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    for name, prompt in prompts.items():
        wanted = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
        )[0, len(prompt) :].tolist()
        assert tokens[name] == wanted
    order = "".join(events)
    assert order.startswith("eec"), order  # the second chunk while the first is computed
    assert order.endswith("ecec"), order  # decodes one after the other
    assert "eee" not in order
    assert order.count("e") == order.count("c")
    engine.close()
