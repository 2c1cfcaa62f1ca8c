"""A stage that dies, freezes or lies: one clear error, and nothing is left running."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ring_kit import Ring, make_request
from torch_tiny import MODELS, make_reference

from pippin import LLM, SamplingParams
from pippin.errors import ConfigError
from pippin.types.request import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    kind, changes = MODELS["llama"]
    make_reference(kind, changes | {"num_hidden_layers": 4}).save_pretrained(folder)
    return folder


class Failing:
    """A stage whose link breaks in its ``nth`` step with chunks."""

    def __init__(self, runner: Any, nth: int) -> None:
        self._runner = runner
        self._left = nth
        self.link: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, plan: Any, hidden: Any = None) -> Any:
        if plan.step >= 0:
            self._left -= 1
            if self._left == 0:
                self.link.close(0.0)
        return self._runner.execute(plan, hidden)


def test_a_lost_stage_ends_every_request_with_one_error(path: Path):
    made: list[Failing] = []

    def wrap(stage: int, runner: Any) -> Any:
        if stage == 1:
            made.append(Failing(runner, 6))
            return made[0]
        return runner

    ring = Ring(path, (1, 1, 2), wrap)
    made[0].link = ring.links[1]
    endings: dict[str, list[Any]] = {"0": [], "1": [], "2": []}
    for name in endings:
        ring.engine.add(make_request(name, [5, 6, 7], GREEDY, 1))
    started = time.monotonic()
    while ring.engine.has_unfinished():
        for output in ring.engine.step():
            if output.finish_reason is not None:
                endings[output.request_id].append(output)
    assert time.monotonic() - started < 10
    for (ending,) in endings.values():
        assert ending.finish_reason is FinishReason.ERROR
        assert "closed" in ending.error
    assert ring.engine.failure is not None
    # Nothing runs any more, and says so.
    ring.engine.add(make_request("3", [5], GREEDY, 1))
    (output,) = ring.engine.step()
    assert output.finish_reason is FinishReason.ERROR
    ring.close()


# --- processes --------------------------------------------------------------------------------


def tree(pid: int) -> list[psutil.Process]:
    own = psutil.Process(pid)
    return [own, *own.children(recursive=True)]


def gone(processes: list[psutil.Process], timeout_s: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout_s)
    return not alive


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``pippin serve`` of the demo model on two stages; its URL and process."""
    command = [
        sys.executable, "-m", "pippin", "serve", "demo", "--port", "0", "-pp", "2",
        "--dtype", "float32", "--max-model-len", "2K", "--kv-cache-memory-bytes", "64M",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            found = re.search(r"URL +(http://\S+)/v1", line)
            if found:
                yield found[1], process
                break
        else:
            raise AssertionError(f"the server did not start: {process.communicate()[1]}")
    finally:
        for left in reversed(tree(process.pid)) if process.poll() is None else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.communicate()


@pytest.mark.model
@pytest.mark.parametrize(
    ("rank", "number"), [(0, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGSTOP)]
)
def test_a_killed_or_frozen_stage(rank: int, number: signal.Signals):
    """Rank 1 leads."""
    with serving() as (url, process), httpx.Client(timeout=60, trust_env=False) as client:
        (replica,) = client.get(f"{url}/api/cluster").json()["replicas"]
        stages = replica["stages"]
        assert [stage["rank"] for stage in stages] == [0, 1]
        assert stages[0]["layers"][1] == stages[1]["layers"][0]
        assert stages[1]["pid"] == replica["pid"]
        assert "pippin_stage_busy_ratio" in client.get(f"{url}/metrics").text
        everybody = tree(process.pid)
        body = {
            "model": "demo", "prompt": "Once", "max_tokens": 1900, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        lost = None
        lines = []
        with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            for line in filter(None, response.iter_lines()):
                lines.append(line)
                if len(lines) == 5:
                    os.kill(stages[rank]["pid"], number)
                    lost = time.monotonic()
        assert lost is not None
        assert time.monotonic() - lost < 10
        errors = [json.loads(line[6:])["error"] for line in lines if '"error"' in line]
        assert len(errors) == 1
        assert re.search("stage|silent|frozen", errors[0]["message"])
        assert process.wait(20) != 0
        assert gone(everybody[1:], 5)


@pytest.mark.model
def test_a_killed_leader_leaves_nobody():
    with serving() as (url, process), httpx.Client(timeout=60, trust_env=False) as client:
        (replica,) = client.get(f"{url}/api/cluster").json()["replicas"]
        everybody = tree(process.pid)
        os.kill(replica["pid"], signal.SIGKILL)
        assert gone(everybody, 20)


@pytest.mark.model
def test_offline_stages_end_with_the_llm():
    before = os.sched_getaffinity(0)
    others = set(psutil.Process().children())  # of tests before this one
    with LLM(
        "demo", dtype="float32", max_model_len=512, kv_cache_memory_bytes="64M",
        pipeline_parallel_size=2, pipeline_split="18,12",
    ) as model:  # fmt: skip
        children = [child for child in psutil.Process().children() if child not in others]
        assert len(children) == 1
        (result,) = model.generate("1, 2, 3, 4,", SamplingParams(temperature=0.0, max_tokens=8))
        assert "5" in result.outputs[0].text
        children[0].kill()
        with pytest.raises(Exception, match="killed by signal 9"):
            model.generate("1, 2, 3, 4,", SamplingParams(temperature=0.0, max_tokens=400))
    assert gone(children, 5)
    assert os.sched_getaffinity(0) == before


@pytest.mark.model
def test_a_wrong_split_names_the_right_numbers():
    with pytest.raises(ConfigError, match="the model has 30") as caught:
        LLM("demo", pipeline_parallel_size=2, pipeline_split="17,12")
    assert "15,15" in (caught.value.hint or "")
