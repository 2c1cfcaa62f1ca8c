"""``--distributed-executor-backend ray`` on real Ray nodes, each on a host of its own.

The drivers run on the first host. All hosts share this machine's process ids, so the tests look at
the ranks from here.
"""

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

import psutil
import pytest
from hosts_kit import Net

pytest.importorskip("ray", reason="the extra 'cluster' is not installed")

from ray_kit import Cluster

sys.path.append(str(Path(__file__).parents[1] / "backends"))

pytestmark = pytest.mark.cluster

#: Seconds that any clear error may take; the machine may be busy with other things.
PATIENCE_S = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose words are its token ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torch_tiny import MODELS, make_reference

    folder = tmp_path_factory.mktemp("tiny")
    kind, changes = MODELS["llama"]
    make_reference(kind, changes | {"num_hidden_layers": 4}).save_pretrained(folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = Tokenizer(models.WordLevel({str(i): i for i in range(size)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes for CPU ranks, and one for MLX ranks with an old Pippin."""
    old = tmp_path_factory.mktemp("old") / "pippin"
    old.mkdir()
    (old / "__init__.py").write_text("__version__ = '0.0.1'\n")
    with Net(3) as net:
        cluster = Cluster(net, [{"pippin_cpu": 1}, {"pippin_cpu": 1}, {"mlx": 1}])
        # Python looks in the working directory first, which has this Pippin.
        net.hosts[2].environment |= {"PYTHONPATH": str(old.parent), "PYTHONSAFEPATH": "1"}
        cluster.start()
        yield cluster


@pytest.fixture(autouse=True)
def _leaves_nothing(cluster: Cluster) -> Iterator[None]:
    yield
    assert gone(ranks(cluster), 10), "ranks are left"


def ranks(cluster: Cluster) -> list[psutil.Process]:
    found = []
    for host in cluster.net.hosts:
        for pid in host.pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if {"pippin.engine.worker", "pippin.engine.process"} & set(process.cmdline()):
                    found.append(process)
    return found


def gone(processes: list[psutil.Process], timeout_s: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout_s)
    return not alive


PRELUDE = """
import json, sys, time
from pippin import LLM, SamplingParams
from pippin.errors import PippinError
OPTIONS = dict(device='cpu', dtype='float32', kv_cache_memory_bytes='8M')
RAY = dict(pipeline_parallel_size=2, distributed_executor_backend='ray')
PROMPTS = [[3, 4, 5, 6, 7] * 30, [9, 8, 7]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
def make(**more):
    return LLM(sys.argv[1], **(OPTIONS | more))
def tokens(llm):
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY)]
def failure(**more):
    started = time.monotonic()
    try:
        make(**(RAY | more)).close()
    except PippinError as error:
        return [type(error).__name__, error.message, error.hint, time.monotonic() - started]
"""


def test_two_hosts_give_the_tokens_of_one_process_and_ray_may_be_initialised_by_others(
    cluster, model
):
    script = PRELUDE + (
        "import ray\n"
        "with make(**RAY) as llm:\n"
        "    stages = tokens(llm)\n"
        "    nodes = [stage.node for stage in llm._live().ready.stages]\n"
        "    try: ray.init()\n"
        "    except RuntimeError: pass\n"
        "    ray.init(ignore_reinit_error=True)\n"
        "    again = tokens(llm)\n"
        "left = [ray.is_initialized()]\n"
        # A connection of the user's own is used and left; the places are free again at once.
        "ray.init(address='auto', logging_level='error', log_to_driver=False)\n"
        "with make(**RAY | dict(pipeline_parallel_size=1, tensor_parallel_size=2)) as llm:\n"
        "    parts = tokens(llm)\n"
        "left += [ray.is_initialized(), len(ray.nodes())]\n"
        "ray.shutdown()\n"
        "with make() as llm: alone = tokens(llm)\n"
        "print(json.dumps([nodes, left, stages, again, parts, alone]))\n"
    )
    lines = cluster.python(script, str(model), timeout_s=200).splitlines()
    nodes, left, *results = json.loads(lines[-1])
    assert [node.split()[0] for node in nodes] == ["10.77.0.2", "10.77.0.1"]
    assert left == [False, True, 3]  # Ray was ours and ended with its last user; then it was not
    stages, again, parts, alone = results
    assert stages == again == parts == alone
    assert len(alone[0]) == 24


GENERATE = PRELUDE + (
    "with make(**RAY) as llm:\n"
    "    print(json.dumps([stage.pid for stage in llm._live().ready.stages]), flush=True)\n"
    "    try:\n"
    "        while True: tokens(llm)\n"
    "    except PippinError as error:\n"
    "        print(json.dumps([error.message]), flush=True)\n"
)


@contextlib.contextmanager
def generating(cluster: Cluster, model: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A program that generates without end on two hosts, and its stages' process ids."""
    with cluster.net.hosts[0].start(sys.executable, "-c", GENERATE, str(model)) as process:
        yield process, json.loads(next_json(process))


def next_json(process: subprocess.Popen[str]) -> str:
    for line in process.stdout:
        if line.startswith("["):
            return line
    raise AssertionError("the program has ended")


@pytest.mark.parametrize(
    ("number", "stage", "what"),
    [
        (signal.SIGKILL, 0, r"stage 0 \(layers 0-\d\) on 10\.77\.0\.2"),
        (signal.SIGSTOP, 0, r"stage 0 \(layers 0-\d\) on 10\.77\.0\.2.*silent"),
        (signal.SIGSTOP, 1, r"stage 1 \(layers \d-3\) on 10\.77\.0\.1.*silent"),
    ],
    ids=["killed", "frozen", "leader frozen"],
)
def test_a_stage_that_dies_or_freezes_is_an_error_in_ten_seconds(
    cluster, model, number, stage, what
):
    with generating(cluster, model) as (process, pids):
        stages = [psutil.Process(pid) for pid in pids]
        os.kill(pids[stage], number)
        started = time.monotonic()
        (message,) = json.loads(next_json(process))
        assert time.monotonic() - started < 10
        assert re.search(what, message), message
        assert gone(stages, 10)
        assert process.wait(20) == 0


def test_an_actor_that_dies_takes_its_rank_with_it(cluster, model):
    with generating(cluster, model) as (process, pids):
        stages = [psutil.Process(pid) for pid in pids]
        stages[0].parent().kill()
        (message,) = json.loads(next_json(process))
        assert "stage 0" in message
        assert "10.77.0.2" in message
        assert gone(stages, 10)
        assert process.wait(20) == 0


def test_serve_answers_and_ends_and_leaves_nothing_when_it_is_killed(cluster, model):
    host = cluster.net.hosts[0]
    command = [
        *(
            sys.executable,
            "-m",
            "pippin",
            "serve",
            str(model),
            "--port",
            "8123",
            "-pp",
            "2",
            "--device",
            "cpu",
        ),
        *("--distributed-executor-backend", "ray", "--dtype", "float32"),
        *("--kv-cache-memory-bytes", "8M", "--port-range", "7000-7009"),
    ]
    ask = (
        "import httpx, json\n"
        "with httpx.Client(base_url='http://127.0.0.1:8123', timeout=30) as client:\n"
        "    body = dict(model='m', prompt=[3, 4, 5], max_tokens=8, temperature=0,"
        " ignore_eos=True)\n"
        "    body['model'] = client.get('/v1/models').json()['data'][0]['id']\n"
        "    answer = client.post('/v1/completions', json=body).json()\n"
        "    state = client.get('/api/cluster').json()\n"
        "print(json.dumps([answer['usage']['completion_tokens'],"
        " [stage['node'] for stage in state['replicas'][0]['stages']]]))\n"
    )
    with host.start(*command) as process:
        assert any(line.strip().startswith("page") for line in process.stdout)
        count, nodes = json.loads(host.python(ask))
        assert count == 8
        assert [node.split()[0] for node in nodes] == ["10.77.0.2", "10.77.0.1"]
        found = ranks(cluster)
        assert len(found) == 2
        listening = {c.laddr.port for one in found for c in one.net_connections("tcp")
                     if c.status == psutil.CONN_LISTEN}  # fmt: skip
        assert listening <= set(range(7000, 7010))
        psutil.Process(process.pid).kill()
        assert gone(found, 15)


def test_what_cannot_be_placed_or_started_is_one_clear_error(cluster, model):
    script = PRELUDE + (
        "import socket\n"
        "taken = socket.create_server(('10.77.0.1', 7100))\n"
        "print(json.dumps([\n"
        "    failure(pipeline_parallel_size=3),\n"
        "    failure(device='cuda'),\n"
        "    failure(backend='mlx', device='auto', pipeline_parallel_size=1),\n"
        "    failure(port_range='7100-7101'),\n"
        "    failure(cpus_per_rank=7),\n"
        "]))\n"
    )
    output = cluster.python(script, str(model), timeout_s=170)
    errors = json.loads(output.splitlines()[-1])
    too_many, no_gpu, old, ports, cores = errors
    assert too_many[0] == "ResourcesMissing"
    assert "3 ranks need one pippin_cpu each; the cluster of 3 nodes has 2" in too_many[1]
    assert "10.77.0.3" in too_many[2]
    assert no_gpu[0] == "ResourcesMissing"
    assert "2 ranks need one GPU each; the cluster of 3 nodes has 0" in no_gpu[1]
    assert old[0] == "NodeUnfit"
    assert "node 10.77.0.3" in old[1]
    assert "has Pippin 0.0.1" in old[1]
    assert "pip install" in old[2]
    assert ports[0] == "PortInUse"
    assert "node 10.77.0.1" in ports[1]
    assert "needs 2 free ports, and has 1 in 7100-7101" in ports[1]
    assert cores[0] == "ConfigError"
    assert all(error[3] < PATIENCE_S for error in errors)


@pytest.mark.parametrize(
    ("env", "what"),
    [
        ({"RAY_AUTH_TOKEN": "0" * 64}, "10.77.0.1:6379 refuses this machine's token"),
        ({"RAY_AUTH_TOKEN": None, "RAY_AUTH_MODE": None}, "refuses this machine's token"),
        ({"RAY_ADDRESS": "10.77.0.2:6379"}, "no Ray cluster answers at 10.77.0.2:6379"),
    ],
    ids=["wrong token", "no token", "no cluster"],
)
def test_a_cluster_that_cannot_be_joined_is_one_clear_error(cluster, model, env, what):
    script = PRELUDE + "print(json.dumps(failure()))"
    name, message, hint, seconds = json.loads(
        cluster.python(script, str(model), env=env, timeout_s=100).splitlines()[-1]
    )
    assert name == "ClusterUnreachable"
    assert what in message
    assert "RAY_AUTH_TOKEN" in hint or "ray start --head" in hint
    assert seconds < PATIENCE_S


def test_a_node_without_the_model_says_so(cluster, model, tmp_path):
    """Each node looks for the model itself; here all see the same disk, so one goes meanwhile."""
    script = PRELUDE + (
        "import os\n"
        "from pippin.cluster import ray_launcher\n"
        "launch = ray_launcher.RayEngine._launch\n"
        "def launch_without(self, places):\n"
        "    split = ray_launcher.split_layers\n"
        "    def gone(config, files):\n"
        "        found = split(config, files)\n"
        "        os.rename(sys.argv[1], sys.argv[1] + '-gone')\n"
        "        return found\n"
        "    ray_launcher.split_layers = gone\n"
        "    launch(self, places)\n"
        "ray_launcher.RayEngine._launch = launch_without\n"
        "print(json.dumps(failure()))\n"
    )
    copy = tmp_path / "model"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).hardlink_to(file)
    name, message, _, _ = json.loads(
        cluster.python(script, str(copy), timeout_s=100).splitlines()[-1]
    )
    assert name == "ModelNotFound"
    assert "on 10.77.0." in message
