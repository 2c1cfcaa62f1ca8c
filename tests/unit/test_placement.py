"""Where ranks go, and what they are told; no Ray."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import pytest

from pippin import __version__, config
from pippin.cluster.host import RankHost
from pippin.cluster.placement import CPU, GPU, MLX, NodeState, Place, check_node, place, wanted
from pippin.cluster.ring import Ring, peers_of, ports_needed, ring
from pippin.config import ModelConfig
from pippin.errors import ConfigError, NodeUnfit, ResourcesMissing

SECRET = "a secret of one job, for tests"


def node(number: int, ours: bool = False, **has: float) -> NodeState:
    return NodeState(f"id{number}", f"10.0.0.{number}", f"host{number}", has, dict(has), ours)


def busy(number: int, **has: float) -> NodeState:
    return NodeState(f"id{number}", f"10.0.0.{number}", f"host{number}", has, {})


def told(places: list[list[Place]]) -> list[list[str]]:
    return [[f"{one.node.address} {one.resource}" for one in stage] for stage in places]


def test_each_stage_gets_a_node_and_the_leader_is_near_its_client():
    nodes = [node(1, ours=True, pippin_cpu=1), node(2, pippin_cpu=1), node(10, pippin_cpu=1)]
    assert told(place(nodes, 3, 1, (CPU,))) == [
        ["10.0.0.2 pippin_cpu"],
        ["10.0.0.10 pippin_cpu"],
        ["10.0.0.1 pippin_cpu"],
    ]
    assert told(place(nodes, 2, 1, (CPU,)))[-1] == ["10.0.0.1 pippin_cpu"]


def test_the_best_resource_that_there_is_enough_of_is_taken_by_all():
    nodes = [node(1, mlx=1, pippin_cpu=1), node(2, pippin_cpu=1), node(3, GPU=8)]
    assert told(place(nodes, 1, 1, (MLX, GPU, CPU))) == [["10.0.0.1 mlx"]]
    assert told(place(nodes, 2, 1, (MLX, CPU))) == [
        ["10.0.0.1 pippin_cpu"],
        ["10.0.0.2 pippin_cpu"],
    ]
    assert told(place(nodes, 2, 1, (MLX, GPU, CPU))) == [["10.0.0.3 GPU"], ["10.0.0.3 GPU"]]


def test_stages_of_different_kinds_where_there_is_not_enough_of_one():
    nodes = [node(1, mlx=1), node(2, pippin_cpu=1), node(3)]
    assert told(place(nodes, 2, 1, (MLX, GPU, CPU))) == [["10.0.0.1 mlx"], ["10.0.0.2 pippin_cpu"]]


def test_ranks_of_a_stage_share_a_node_if_they_can():
    nodes = [node(1, GPU=4), node(2, GPU=4), node(3, GPU=1)]
    assert told(place(nodes, 2, 4, (GPU,))) == [["10.0.0.1 GPU"] * 4, ["10.0.0.2 GPU"] * 4]
    assert told(place(nodes[:1], 2, 2, (GPU,))) == [["10.0.0.1 GPU"] * 2] * 2
    one_each = [node(1, pippin_cpu=1), node(2, pippin_cpu=1)]
    assert told(place(one_each, 1, 2, (CPU,))) == [["10.0.0.1 pippin_cpu", "10.0.0.2 pippin_cpu"]]
    one_each[1] = node(2, ours=True, pippin_cpu=1)  # rank 0 leads
    assert told(place(one_each, 1, 2, (CPU,))) == [["10.0.0.2 pippin_cpu", "10.0.0.1 pippin_cpu"]]


def test_what_others_hold_is_not_taken():
    nodes = [busy(1, pippin_cpu=1), node(2, pippin_cpu=1)]
    assert told(place(nodes, 1, 1, (CPU,))) == [["10.0.0.2 pippin_cpu"]]
    with pytest.raises(ResourcesMissing, match="other jobs hold") as caught:
        place(nodes, 2, 1, (CPU,))
    assert "10.0.0.1 (host1): 1 pippin_cpu (0 free)" in caught.value.message


def test_a_missing_resource_is_named_with_its_node_and_the_command():
    with pytest.raises(ResourcesMissing) as caught:
        place([node(1, pippin_cpu=1), node(2)], 2, 1, (CPU,))
    message, hint = caught.value.message, caught.value.hint or ""
    assert "2 ranks need one pippin_cpu each; the cluster of 2 nodes has 1" in message
    assert "10.0.0.2 (host2): none of mlx, GPU, pippin_cpu" in message
    assert "on 10.0.0.2: ray stop, then ray start" in hint
    assert """--resources='{"pippin_cpu": 1}'""" in hint


def test_what_a_rank_may_take_follows_backend_and_device():
    assert wanted(ModelConfig()) == (MLX, GPU, CPU)
    assert wanted(ModelConfig(backend="mlx")) == (MLX,)
    assert wanted(ModelConfig(backend="torch")) == (GPU, CPU)
    assert wanted(ModelConfig(device="cuda")) == (GPU,)
    assert wanted(ModelConfig(device="cpu")) == (CPU,)


def test_a_node_must_have_this_version():
    check_node(node(1), __version__, "", "/usr/bin/python")
    with pytest.raises(NodeUnfit, match=r"10\.0\.0\.1 \(host1\) has Pippin 0\.0\.1") as caught:
        check_node(node(1), "0.0.1", "", "/usr/bin/python")
    assert caught.value.hint == (
        f"there: /usr/bin/python -m pip install 'pippin[cluster]=={__version__}'"
    )
    with pytest.raises(NodeUnfit, match="has no Pippin: ModuleNotFoundError"):
        check_node(node(1), None, "ModuleNotFoundError: No module named 'pippin'", "/bin/python")


def make(
    stages: int,
    size: int,
    places: list[list[Place]],
    server: Mapping[str, object] = MappingProxyType({}),
    **parallel: object,
) -> Ring:
    settings = config.build(
        {
            "server": dict(server),
            "parallel": {
                "pipeline_parallel_size": stages,
                "tensor_parallel_size": size,
                **parallel,
            },
        }
    )
    needed = ports_needed(places)
    ports = {name: list(range(7000, 7000 + count)) for name, count in needed.items()}
    cpus = {name: [0, 1, 2, 3] for name in needed}
    layers = [(4 * i, 4 * i + 4) for i in range(stages)]
    return ring(settings, layers, places, ports, cpus, SECRET)


def test_links_lead_round_the_ring_and_back_to_the_leader():
    places = [[Place(node(i, pippin_cpu=1), CPU)] for i in (1, 2, 3)]
    made = make(3, 1, places)
    inboxes = [rank.inbox for rank in made.ranks]
    assert inboxes == [f"tcp://10.0.0.{i}:7000" for i in (1, 2, 3)]
    assert [rank.next for rank in made.ranks] == [*inboxes[1:], inboxes[0]]
    assert made.leader.rank is made.ranks[-1]
    assert made.stream == "tcp://10.0.0.3:7001"
    assert made.leader.peers == {inboxes[2]: made.ranks[1].name, inboxes[0]: made.ranks[0].name}
    assert made.ranks[0].name == "stage 0 (layers 0-3) on 10.0.0.1 (host1)"
    assert {rank.config.model.device for rank in made.ranks} == {"cpu"}
    assert {rank.cpus for rank in made.ranks} == {(0, 1, 2, 3)}


def test_secrets_are_not_shown():
    made = make(1, 1, [[Place(node(1, pippin_cpu=1), CPU)]], server={"api_key": ["key of mine"]})
    assert made.ranks[0].secret == SECRET
    assert b"key of mine" not in msgspec.json.encode([made.ranks, made.leader])
    assert SECRET not in f"{made} {made.ranks} {made.leader!r} {made.ranks[0].keys}"


def test_one_rank_alone_has_no_links():
    made = make(1, 1, [[Place(node(1, mlx=1), MLX)]])
    assert (made.ranks[0].inbox, made.ranks[0].next, made.leader.peers) == (None, None, {})
    assert made.ranks[0].backend == "mlx"
    assert made.stream == "tcp://10.0.0.1:7001"


def test_groups_on_shared_and_on_separate_nodes():
    big = node(1, GPU=2)
    made = make(2, 2, [[Place(big, GPU)] * 2, [Place(node(i, GPU=1), GPU) for i in (2, 3)]])
    first, second = made.ranks[0].group, made.ranks[2].group
    assert first is not None
    assert second is not None
    assert (first.rank, first.size, first.backend) == (0, 2, "nccl")
    assert first.addresses == ("10.0.0.1:7002", "10.0.0.1:7003")
    assert second.addresses == ("10.0.0.2:7001", "10.0.0.3:7001")
    assert made.ranks[0].followers == (made.ranks[1].inbox,)
    assert made.ranks[1].next is None
    assert made.leader.rank is made.ranks[2]
    assert made.leader.peers[made.ranks[3].inbox or ""] == made.ranks[3].name
    used = [rank.inbox for rank in made.ranks] + [f"tcp://{a}" for g in (first, second)
                                                  for a in g.addresses] + [made.stream]  # fmt: skip
    assert len(set(used)) == len(used)


def test_ranks_on_one_node_share_its_cores_and_memory():
    shared = node(1, pippin_cpu=2)
    made = make(2, 1, [[Place(shared, CPU)]] * 2)
    assert [rank.cpus for rank in made.ranks] == [(0, 1), (2, 3)]
    assert {rank.config.cache.gpu_memory_utilization for rank in made.ranks} == {0.45}
    with pytest.raises(ConfigError, match="need 6"):
        make(2, 1, [[Place(shared, CPU)]] * 2, cpus_per_rank=3)


def test_whose_link_it_is_by_its_address():
    two = node(1, GPU=2)
    made = make(2, 2, [[Place(two, GPU)] * 2, [Place(node(2, GPU=2), GPU)] * 2])
    first, follower, leader, other = made.ranks
    assert peers_of(first, made.ranks) == {
        first.inbox: leader.name,
        follower.inbox: follower.name,
        leader.inbox: leader.name,
    }
    assert peers_of(follower, made.ranks) == {follower.inbox: first.name}
    assert peers_of(leader, made.ranks) == made.leader.peers
    assert made.leader.peers[other.inbox or ""] == other.name


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("pippin.cluster.ray_launcher", "pippin.cluster.ray_api"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match="needs the package ray") as caught:
        importlib.import_module("pippin.cluster.ray_launcher")
    assert caught.value.hint == "pip install 'pippin[cluster]'"


def test_one_machine_never_imports_ray():
    script = (
        "import sys, pippin.llm, pippin.cli.service\n"
        "from pippin import options\n"
        "from pippin.cli.service import launched\n"
        "launched(options.make_config({'pipeline_parallel_size': 2})).stop()\n"
        "assert 'ray' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_rank_host_starts_watches_and_ends_a_process():
    host = RankHost()
    assert host.facts()["version"] == __version__
    # Any module that reads its standard input will do.
    pid = host.start("code", ["-q"], b"print(6 * 7)", {})
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)  # until it has stopped
    host.stop(0.1)  # a frozen process does not hear a polite signal
    assert host.ended()[0] == -signal.SIGKILL


def test_a_rank_host_keeps_the_last_words_of_its_process():
    host = RankHost()
    pid = host.start("pippin.engine.worker", [], b"{}", {})
    assert pid > 0
    status, said = host.ended()
    assert status == 1  # a traceback: that is no StageSpec
    assert said == b""


def test_ports_that_others_listen_at_are_left_out():
    host = RankHost()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert host.free_ports("127.0.0.1", 2, (port, port)) == []
        assert port not in host.free_ports("127.0.0.1", 3, None)
    with pytest.raises(OSError, match="assign"):
        host.free_ports("203.0.113.1", 1, (7000, 7001))
