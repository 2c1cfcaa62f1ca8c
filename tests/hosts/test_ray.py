"""Ray across hosts, as the ray launcher will find it."""

from __future__ import annotations

import json
import sys

import pytest
from hosts_kit import Net

pytest.importorskip("ray", reason="the extra 'cluster' is not installed")

from ray_kit import Cluster

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster():
    with Net(2) as net:
        cluster = Cluster(net, [{"pippin_cpu": 1}, {"pippin_cpu": 1, "mlx": 1}])
        cluster.start()
        yield cluster


CONNECT = """
import json, time, ray
ray.init(log_to_driver=False, logging_level="error")
deadline = time.monotonic() + 30
while sum(node["Alive"] for node in ray.nodes()) < 2 and time.monotonic() < deadline:
    time.sleep(0.05)
"""


def test_nodes_have_their_addresses_and_resources(cluster):
    script = CONNECT + (
        "print(json.dumps({node['NodeManagerAddress']:"
        " [node['Resources'].get(name) for name in ('CPU', 'pippin_cpu', 'mlx')]"
        " for node in ray.nodes() if node['Alive']}))"
    )
    assert json.loads(cluster.python(script)) == {
        "10.77.0.1": [1, 1, None],
        "10.77.0.2": [1, 1, 1],
    }


def test_strict_spread_puts_one_actor_on_each_host(cluster):
    script = (
        CONNECT
        + """
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Strategy
group = placement_group([{"pippin_cpu": 1}] * 2, strategy="STRICT_SPREAD")
ray.get(group.ready(), timeout=30)

@ray.remote(num_cpus=0, resources={"pippin_cpu": 1})
class Actor:
    def where(self):
        import os
        return ray.util.get_node_ip_address(), sorted(os.sched_getaffinity(0))

actors = [Actor.options(scheduling_strategy=Strategy(group, i)).remote() for i in range(2)]
print(json.dumps(ray.get([actor.where.remote() for actor in actors], timeout=60)))
"""
    )
    places = json.loads(cluster.python(script))
    assert sorted(address for address, _ in places) == ["10.77.0.1", "10.77.0.2"]
    for address, cpus in places:
        host = next(host for host in cluster.net.hosts if host.address == address)
        assert cpus == [int(host.cpus)]  # Ray's workers keep to the host's CPUs


@pytest.mark.parametrize(
    "env",
    [{"RAY_AUTH_TOKEN": None, "RAY_AUTH_MODE": None}, {"RAY_AUTH_TOKEN": "0" * 64}],
    ids=["no token", "wrong token"],
)
def test_client_without_the_token_is_refused(cluster, env):
    script = "import ray; ray.init(logging_level='error'); print('inside')"
    once = {"RAY_NUM_REDIS_GET_RETRIES": "1"}  # Ray tries twenty times otherwise
    done = cluster.net.hosts[1].run(
        sys.executable, "-c", script, check=False, env=env | once, timeout_s=120
    )
    assert done.returncode != 0
    assert "inside" not in done.stdout
    assert "AuthenticationError" in done.stderr or "Unauthenticated" in done.stderr


def test_killed_host_is_a_dead_node_and_may_come_back(cluster):
    script = CONNECT + "print(sorted(n['NodeManagerAddress'] for n in ray.nodes() if n['Alive']))"
    cluster.net.hosts[1].kill()
    gone = script.replace("< 2", "> 1")
    # Ray says on standard output which node died, and why it thinks so.
    assert cluster.python(gone, timeout_s=120).splitlines()[-1] == "['10.77.0.1']"
    cluster.start_node(1)
    assert cluster.python(script, timeout_s=120).splitlines()[-1] == "['10.77.0.1', '10.77.0.2']"
