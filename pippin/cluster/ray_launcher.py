"""An engine whose ranks are spread over a Ray cluster (``--distributed-executor-backend ray``).

Each rank is the same process as without Ray, started by a ``RankHost`` on its node; the leader is
one of them. They talk to each other, and the leader to this process, over TCP encrypted with keys
made of a secret that is made for the job.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pippin.cluster import ray_api
from pippin.cluster.placement import MLX, NodeState, Place, check_node, missing, place, wanted
from pippin.cluster.ring import Ring, peers_of, ports_needed, ring
from pippin.config import Config, carried, environment
from pippin.engine.launcher import failure_to_error
from pippin.engine.ranks import Elsewhere, lost_error
from pippin.engine.spec import StageLoss, StageSpec
from pippin.engine.start import split_layers
from pippin.errors import (
    ClusterError,
    EngineError,
    LinkError,
    PippinError,
    PortInUse,
    ResourcesMissing,
)
from pippin.models.files import resolve
from pippin.transport.channel import ask
from pippin.transport.keys import CurveKeys, derive_keys
from pippin.types.message import Failed, Hello, Ready

logger = logging.getLogger(__name__)

#: Seconds between two looks at whether the processes still live.
_LOOK_S = 0.5

#: Seconds that Ray's count of what is free may be behind, after another job has ended.
_STALE_S = 8.0

#: Seconds that the leader has to say for itself what happened when another rank has ended.
_LEADER_SPEAKS_S = 1.5

#: Seconds that a frozen or lost node may hold up the end.
_STOP_S = 4.0


class RayEngine:
    """One replica on a Ray cluster; see ``engine.launcher.Launched``."""

    def __init__(self, config: Config) -> None:
        """Raises nothing: all happens in ``start``."""
        self._config = config
        self._secret = secrets.token_urlsafe(32)
        self.keys: CurveKeys | None = derive_keys(self._secret)
        self._connected = False
        self._hosts: ray_api.Hosts | None = None
        self._ring: Ring | None = None
        self._pids: list[int] = []
        self._ends: list[object] = []
        """Of each rank: the answer that comes when its process ends."""
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        """Held while Ray is asked how the ranks are, and to forget it: Ray connects by itself when
        it is asked something after its end."""
        self._failure: PippinError | None = None

    @property
    def address(self) -> str:
        assert self._ring is not None, "not started"
        return self._ring.stream

    def start(self, waiting: Callable[[float], None] = lambda seconds: None) -> Ready:
        """Place and start all ranks, and wait until the model is loaded.

        ``waiting`` is called about twice a second with the seconds passed. Raises ``ClusterError``,
        ``ConfigError``, or what a rank failed with.
        """
        started = time.monotonic()
        try:
            ray_api.connect()
            self._connected = True
            places = self._find_places()
            waiting(time.monotonic() - started)
            self._launch(places)
            while True:
                answer = ask(self.address, Hello(), _LOOK_S, self.keys)
                if isinstance(answer, Ready):
                    return answer
                error = self.failure()
                if isinstance(answer, Failed):
                    raise self._explained(failure_to_error(answer))
                if error is not None:
                    raise error
                waiting(time.monotonic() - started)
        except BaseException:
            self.stop()
            raise

    def _find_places(self) -> list[list[Place]]:
        parallel = self._config.parallel
        stages, size = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
        resources = wanted(self._config.model)
        deadline = time.monotonic() + _STALE_S
        while True:
            found = ray_api.nodes()
            try:
                return place(found, stages, size, resources)
            except ResourcesMissing:
                idle = [dataclasses.replace(node, free=node.total) for node in found]
                if time.monotonic() > deadline or not _fits(idle, stages, size, resources):
                    raise missing(found, stages * size, resources) from None
            time.sleep(_LOOK_S)

    def _launch(self, places: list[list[Place]]) -> None:
        flat = [one for stage in places for one in stage]
        files = resolve(
            self._config.model.model,
            revision=self._config.model.revision,
            offline=environment().hub_offline,
            home=environment().home,
        )
        layers = split_layers(self._config, files)
        self._hosts = hosts = ray_api.Hosts(flat)
        cpus = self._look_at(hosts)
        ports = self._ports(hosts, places)
        made = ring(_absolute(self._config), layers, places, ports, cpus, self._secret)
        self._ring = made
        variables = carried()
        asked = []
        for index, spec in enumerate(made.ranks):
            if spec is made.leader.rank:
                module, arguments = "pippin.engine.process", [made.stream]
                line = msgspec.json.encode(made.leader)
            else:
                module, arguments, line = "pippin.engine.worker", [], msgspec.json.encode(spec)
            asked.append(hosts.ask(index, "start", module, arguments, line, variables))
        self._pids = [hosts.answer(index, one, ray_api.ACTOR_S) for index, one in enumerate(asked)]
        self._ends = [hosts.ask(index, "ended") for index in range(len(asked))]
        for spec, pid in zip(made.ranks, self._pids, strict=True):
            logger.info("%s: process %d", spec.name, pid)

    def _look_at(self, hosts: ray_api.Hosts) -> dict[str, list[int]]:
        """Check the nodes; returns the cores of each, by its id."""
        cpus = {}
        asked = [hosts.ask(index, "facts") for index in range(len(hosts.places))]
        for index, one in enumerate(asked):
            node = hosts.places[index].node
            facts = hosts.answer(index, one, ray_api.ACTOR_S)
            check_node(node, facts["version"], facts["why"], facts["python"])
            # MLX on a Mac neither counts cores nor can be kept to some.
            cpus[node.node_id] = [] if hosts.places[index].resource == MLX else facts["cpus"]
        return cpus

    def _ports(self, hosts: ray_api.Hosts, places: list[list[Place]]) -> dict[str, list[int]]:
        wanted_ports = ports_needed(places)
        allowed = self._config.parallel.port_range
        indices = {one.node.node_id: index for index, one in enumerate(hosts.places)}
        asked = {
            node: hosts.ask(
                index, "free_ports", hosts.places[index].node.address, wanted_ports[node], allowed
            )
            for node, index in indices.items()
        }
        found = {}
        for node, one in asked.items():
            found[node] = hosts.answer(indices[node], one, ray_api.ACTOR_S)
            if len(found[node]) < wanted_ports[node]:
                assert allowed is not None
                where = hosts.places[indices[node]].node
                raise PortInUse(
                    f"node {where.address} ({where.name}) needs {wanted_ports[node]} free ports,"
                    f" and has {len(found[node])} in {allowed[0]}-{allowed[1]}",
                    hint="a wider --port-range, or end what listens there",
                )
        return found

    def why_ended(self) -> PippinError:
        while not self._stopping.is_set():
            error = self.failure(_LOOK_S)
            if error is not None:
                return error
        return EngineError("the engine was stopped")

    def failure(self, wait_s: float = 0.0) -> PippinError | None:
        """Why a rank has ended, None while all run; waits ``wait_s`` seconds for that."""
        with self._lock:
            hosts, made = self._hosts, self._ring
            if self._failure is not None or hosts is None or made is None or not self._ends:
                return self._failure
            if not hosts.ready(self._ends, wait_s) or self._stopping.is_set():
                return None
            # The leader knows best what happened, and those behind a lost rank end by it.
            leader = next(i for i, spec in enumerate(made.ranks) if spec is made.leader.rank)
            hosts.ready([self._ends[leader]], _LEADER_SPEAKS_S)
            self._failure = self._judge(hosts, made)
            return self._failure

    def _judge(self, hosts: ray_api.Hosts, made: Ring) -> PippinError:
        """What to tell of those that have ended: a reason before a death, and a death before what
        the others say of it."""
        endings = [self._ending(hosts, index, made) for index in hosts.ready(self._ends, 0.0)]
        return min(endings, key=lambda ending: ending[0])[1]

    def _ending(self, hosts: ray_api.Hosts, index: int, made: Ring) -> tuple[int, PippinError]:
        spec = made.ranks[index]
        try:
            status, said = hosts.answer(index, self._ends[index], 1.0)
        except ClusterError as gone:
            return 1, type(gone)(f"lost {spec.name}: {gone.message}", hint=gone.hint)
        try:
            reason = failure_to_error(msgspec.json.decode(said, type=Failed))
        except msgspec.DecodeError:
            lost = lost_error(StageLoss(spec.name, self._pids[index], status))
            return (2 if status < 0 else 4), lost
        if not isinstance(reason, LinkError):
            return 0, _named(reason, spec)
        told = Elsewhere(spec, peers_of(spec, made.ranks)).explain(reason)
        return 3, told if told is not reason else _named(reason, spec)

    def _explained(self, error: PippinError) -> PippinError:
        """An error of the leader, or what caused it."""
        assert self._ring is not None
        if not isinstance(error, LinkError):
            leader = self._ring.leader.rank
            assert leader is not None
            return _named(error, leader)
        return self.failure(_LEADER_SPEAKS_S) or error

    def stop(self, timeout_s: float = 10.0) -> None:
        """End all ranks, by force where they do not, and give the places back. Safe to repeat."""
        self._stopping.set()
        with self._lock:
            hosts, self._hosts = self._hosts, None
            connected, self._connected = self._connected, False
        if hosts is not None:
            self._stop_ranks(hosts, timeout_s)
            hosts.remove()
        if connected:
            ray_api.disconnect()

    def _stop_ranks(self, hosts: ray_api.Hosts, timeout_s: float) -> None:
        """The leader first: it tells the others, which finish their step."""
        made = self._ring
        if made is None:
            return
        leader = [i for i, spec in enumerate(made.ranks) if spec is made.leader.rank]
        others = [i for i in range(len(made.ranks)) if i not in leader]
        # Where a rank was lost nothing is worth waiting for, and the leader may be the frozen one.
        patience = min(timeout_s, _STOP_S if self._failure is None else 0.5)
        for indices, grace in ((leader, patience), (others, 0.5)):
            asked = [hosts.ask(index, "stop", grace) for index in indices]
            for index, one in zip(indices, asked, strict=True):
                try:
                    hosts.answer(index, one, grace + 1.0)
                except PippinError as error:
                    logger.debug("%s: %s", made.ranks[index].name, error.message)


def _fits(nodes: list[NodeState], stages: int, size: int, resources: tuple[str, ...]) -> bool:
    try:
        place(nodes, stages, size, resources)
    except ResourcesMissing:
        return False
    return True


def _absolute(config: Config) -> Config:
    """A path as it was given means another place in another process."""
    path = Path(config.model.model).expanduser()
    if not path.exists():
        return config
    model = msgspec.structs.replace(config.model, model=str(path.absolute()))
    return msgspec.structs.replace(config, model=model)


def _named(error: PippinError, spec: StageSpec) -> PippinError:
    """The same error, with the rank that had it."""
    if spec.name in error.message:
        return error
    named = type(error).__new__(type(error))
    PippinError.__init__(named, f"{spec.name}: {error.message}", hint=error.hint)
    return named
