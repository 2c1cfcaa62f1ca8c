"""Ray, as far as Pippin needs it; the only file that imports it.

Ray decides where processes are and tells when they are gone. It carries no tokens. Nothing here
waits without an end, and what Ray says is turned into one error with a hint.

Source: https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from pippin.cluster import host
from pippin.cluster.placement import BACKENDS, GPU, NodeState, Place
from pippin.errors import ClusterError, ClusterUnreachable, ConfigError, ResourcesMissing

try:
    import ray
    from ray import exceptions
    from ray._private import services
    from ray._private.state import available_resources_per_node
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as error:
    raise ConfigError(
        f"--distributed-executor-backend ray needs the package {error.name}: it is not installed",
        hint="pip install 'pippin[cluster]'",
    ) from error

#: Seconds: for the cluster to answer at all, to give the places asked for, and for a node to start
#: a Python process. All of them together stay below half a minute unless a node is that slow.
_CONNECT_S = 3.0
_HELLO_S = 20.0
_PLACE_S = 15.0
ACTOR_S = 30.0

_HELLO = """
import json, sys
from ray._raylet import GcsClient
nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=15).values()
print(json.dumps([n.node_manager_address for n in nodes if n.state == 0]))
"""

_lock = threading.Lock()
_users = 0
_ours = False
"""Whether this package has connected the process; then it disconnects it, too."""


def connect() -> None:
    """Connect this process to the cluster that it belongs to, unless it is connected already.

    The cluster is the one at RAY_ADDRESS, or the one that ``ray start`` has started here. Each call
    needs one of ``disconnect``. Raises ``ClusterUnreachable``.
    """
    global _users, _ours
    with _lock:
        if not ray.is_initialized():
            address = _address()
            own = _say_hello(address)
            try:
                ray.init(
                    address=address,
                    _node_ip_address=own,
                    namespace="pippin",
                    logging_level=logging.ERROR,
                )
            except (ConnectionError, RuntimeError, exceptions.RayError) as error:
                raise ClusterUnreachable(
                    f"cannot join the Ray cluster at {address}: {_first_line(error)}",
                    hint="Python and Ray must have the same versions on all nodes; `ray status`"
                    " shows how the cluster is",
                ) from error
            _ours = True
        _users += 1


def disconnect() -> None:
    """Leave the cluster when nobody here uses it, if ``connect`` has joined it."""
    global _users, _ours
    with _lock:
        _users -= 1
        if _users == 0 and _ours:
            _ours = False
            ray.shutdown()


def _address() -> str:
    try:
        address = services.canonicalize_bootstrap_address_or_die("auto")
    except (ConnectionError, ValueError, OSError) as error:
        raise ClusterUnreachable(
            "found no Ray cluster: none runs on this machine, and RAY_ADDRESS names none that can"
            f" be used ({_first_line(error)})",
            hint="on the first machine: ray start --head --node-ip-address=ADDRESS; on the others:"
            " ray start --address=ADDRESS:6379 --node-ip-address=THEIRS; see docs/ray.md",
        ) from error
    return str(address)


def _say_hello(address: str) -> str:
    """Whether Ray answers and lets us in; returns this machine's own address in the cluster.

    Asked by a process of its own: Ray's client tries for minutes where nothing answers, and may
    take its process down with it.
    """
    where, port = services.extract_ip_port(address)
    try:
        socket.create_connection((where, port), _CONNECT_S).close()
    except OSError as error:
        raise ClusterUnreachable(
            f"no Ray cluster answers at {address}: {error.strerror or error}",
            hint=f"on {where}: ray start --head --port={port} --node-ip-address={where}; or correct"
            " RAY_ADDRESS",
        ) from error
    asked = subprocess.Popen(
        [sys.executable, "-c", _HELLO, address],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(_HELLO_S, asked.kill)
    timer.start()
    said = ""
    try:
        assert asked.stderr is not None
        assert asked.stdout is not None
        for line in asked.stderr:
            said = line.strip() or said
            if "Unauthenticated" in line or "AuthenticationError" in line:
                asked.kill()
                raise ClusterUnreachable(
                    f"the Ray cluster at {address} refuses this machine's token",
                    hint="give the token of the machine where `ray start --head` ran: in"
                    " RAY_AUTH_TOKEN, or as ~/.ray/auth_token, with RAY_AUTH_MODE=token",
                )
        answer = asked.stdout.read()
        if asked.wait() != 0:
            raise ClusterUnreachable(
                f"what listens at {address} does not answer as a Ray cluster does"
                + (f": {said}" if said else f" within {_HELLO_S:.0f} s"),
                hint="RAY_ADDRESS must be the address that `ray start --head` has printed; Ray must"
                " have the same version on all machines",
            )
    finally:
        timer.cancel()
        asked.wait()
        asked.stderr.close()  # type: ignore[union-attr]
        asked.stdout.close()  # type: ignore[union-attr]
    nodes: list[str] = json.loads(answer)
    for node in nodes:
        if _is_own(node):
            return node
    raise ClusterUnreachable(
        f"this machine is not a node of the Ray cluster at {address}, which has {', '.join(nodes)}",
        hint=f"here: ray start --address={address} --node-ip-address=ADDRESS, this machine's own",
    )


def _is_own(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
            one.bind((address, 0))
    except OSError:
        return False
    return True


def nodes() -> list[NodeState]:
    """All living nodes."""
    free = available_resources_per_node()  # type: ignore[no-untyped-call]
    here = ray.get_runtime_context().get_node_id()
    return [
        NodeState(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            name=node["NodeManagerHostname"],
            total={name: node["Resources"].get(name, 0.0) for name in BACKENDS},
            free={name: free.get(node["NodeID"], {}).get(name, 0.0) for name in BACKENDS},
            ours=node["NodeID"] == here,
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


class Gone(ClusterError):
    """A process of Ray's, or its node, is no more."""

    code = "node_lost"


class Hosts:
    """A ``RankHost`` at each of some places, held by a placement group. Methods may be called from
    any thread."""

    def __init__(self, places: Sequence[Place]) -> None:
        """Raises ``ResourcesMissing`` if a place is taken by another job."""
        self.places = tuple(places)
        spread = len({place.node.node_id for place in places}) == len(places)
        # Every node has a little of a resource named after its address; asking for some pins.
        self._group = placement_group(
            [{place.resource: 1.0, f"node:{place.node.address}": 0.001} for place in places],
            strategy="STRICT_SPREAD" if spread else "PACK",
        )
        if not self._group.wait(_PLACE_S):
            remove_placement_group(self._group)
            raise ResourcesMissing(
                f"Ray did not give {', '.join(_told(place) for place in places)} within"
                f" {_PLACE_S:.0f} s: another job has taken it, or the node is going away",
                hint="`ray status` shows what is in use",
            )
        ray.cloudpickle.register_pickle_by_value(host)  # type: ignore[no-untyped-call]
        kind: Any = ray.remote(host.RankHost)
        self._actors: list[Any] = [
            kind.options(
                num_cpus=0,
                num_gpus=1 if place.resource == GPU else 0,
                resources={} if place.resource == GPU else {place.resource: 1},
                max_concurrency=4,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            ).remote()
            for index, place in enumerate(self.places)
        ]

    def ask(self, index: int, method: str, *arguments: Any) -> Any:
        """Call a method; returns something to hand to ``answer``."""
        return getattr(self._actors[index], method).remote(*arguments)

    def answer(self, index: int, asked: Any, timeout_s: float) -> Any:
        """The result of what was asked; raises ``Gone``, or ``ClusterError`` after ``timeout_s``
        seconds. Errors of the method itself are ``ClusterError``, too."""
        where = self.places[index].node
        try:
            return ray.get(asked, timeout=timeout_s)
        except exceptions.GetTimeoutError as error:
            raise ClusterError(
                f"node {where.address} ({where.name}) has not answered in {timeout_s:.0f} s",
                hint="is it very busy, or asleep? `ray status` shows the nodes",
            ) from error
        except exceptions.RayTaskError as error:
            raise ClusterError(
                f"node {where.address} ({where.name}): {error.cause or _first_line(error)}"
            ) from error
        except exceptions.RayError as error:
            raise Gone(
                f"node {where.address} ({where.name}), or Ray's process there, is gone:"
                f" {_first_line(error)}",
                hint="`ray status` shows the nodes that are left; start again",
            ) from error

    def ready(self, asked: Sequence[Any], timeout_s: float) -> list[int]:
        """Which of these have answers (or have failed), as soon as one has; after ``timeout_s``
        seconds none."""
        done, _ = ray.wait(list(asked), num_returns=1, timeout=timeout_s, fetch_local=True)
        if not done:
            return []
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0, fetch_local=True)
        return [index for index, one in enumerate(asked) if one in done]

    def remove(self) -> None:
        """End the hosts and give the places back."""
        if not ray.is_initialized():  # somebody has shut it down: it has ended them
            return
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)


def _told(place: Place) -> str:
    return f"1 {place.resource} on {place.node.address}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
