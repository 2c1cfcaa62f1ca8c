"""What each rank is told, from where it goes (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pippin.backends.base import GroupSpec
from pippin.cluster.placement import BACKENDS, CPU, GPU, MLX, Place
from pippin.config import Config, ServerConfig
from pippin.engine.ranks import cores
from pippin.engine.spec import EngineSpec, StageSpec

_DEVICES = {MLX: "auto", GPU: "cuda", CPU: "cpu"}  # Ray shows a rank its own GPU only


@dataclass(frozen=True, slots=True)
class Ring:
    """All ranks of a replica, stage by stage; the leader is the first of the last stage."""

    ranks: tuple[StageSpec, ...]
    leader: EngineSpec
    stream: str
    """Address at which the leader talks to its client."""


def ports_needed(places: Sequence[Sequence[Place]]) -> Counter[str]:
    """How many ports each node must offer, by its id."""
    needed: Counter[str] = Counter()
    for stage in places:
        for place in stage:
            needed[place.node.node_id] += 1 if len(stage) == 1 else 2
    needed[places[-1][0].node.node_id] += 1
    return needed


def ring(
    config: Config,
    layers: Sequence[tuple[int, int]],
    places: Sequence[Sequence[Place]],
    ports: Mapping[str, Sequence[int]],
    cpus: Mapping[str, Sequence[int]],
    secret: str,
) -> Ring:
    """``layers``: of each stage. ``ports``: of each node, as many as ``ports_needed`` says.
    ``cpus``: cores that ranks may use on each node. Raises ``ConfigError`` for more cores a rank
    than there are.
    """
    left = {node: list(numbers) for node, numbers in ports.items()}
    on_node = Counter(place.node.node_id for stage in places for place in stage)
    pinned = {
        node: cores(count, config.parallel.cpus_per_rank, cpus[node]) if cpus[node] else None
        for node, count in on_node.items()
    }
    stages, size = len(places), len(places[0])

    def address(place: Place) -> str:
        return f"{_host(place.node.address)}:{left[place.node.node_id].pop(0)}"

    inboxes = [[f"tcp://{address(place)}" for place in stage] for stage in places]
    groups = [tuple(map(address, stage)) if size > 1 else () for stage in places]
    stream = f"tcp://{address(places[-1][0])}"
    ranks: list[StageSpec] = []
    for number, stage in enumerate(places):
        for rank, place in enumerate(stage):
            node, resource = place.node, place.resource
            backend = BACKENDS[resource]
            group = None
            if size > 1:
                collectives = {MLX: "ring", GPU: "nccl", CPU: "gloo"}[resource]
                group = GroupSpec(rank, size, collectives, groups[number])
            own = pinned[node.node_id]
            alone = stages == 1 and rank == 0
            ranks.append(
                StageSpec(
                    config=_of_rank(config, place, on_node[node.node_id]),
                    backend=backend,
                    stage=number,
                    num_stages=stages,
                    layers=layers[number],
                    group=group,
                    # A GPU's rank may use all cores; it hardly needs any.
                    cpus=own.pop(0) if own and resource != GPU else (),
                    inbox=None if alone else inboxes[number][rank],
                    next=None if stages == 1 or rank else inboxes[(number + 1) % stages][0],
                    followers=tuple(inboxes[number][1:]) if rank == 0 else (),
                    node=f"{node.address} ({node.name})",
                    secret=secret,
                )
            )
    leader = ranks[-size]
    return Ring(tuple(ranks), EngineSpec(config=leader.config, rank=leader,
                                         peers=peers_of(leader, ranks)), stream)  # fmt: skip


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _of_rank(config: Config, place: Place, sharing: int) -> Config:
    """The configuration as a rank should load it that shares its node with others."""
    model = msgspec.structs.replace(
        config.model, backend=BACKENDS[place.resource], device=_DEVICES[place.resource]
    )
    cache = config.cache
    if place.resource != GPU:
        share = cache.gpu_memory_utilization / sharing
        cache = msgspec.structs.replace(cache, gpu_memory_utilization=share)
    # The server's keys are none of a rank's business.
    return msgspec.structs.replace(config, model=model, cache=cache, server=ServerConfig())


def peers_of(who: StageSpec, ranks: Sequence[StageSpec]) -> dict[str, str]:
    """Who is at the other end of a rank's links, by the links' addresses."""
    peers: dict[str, str] = {}
    for rank in ranks:
        if rank is who:
            continue
        if who.inbox is not None and who.inbox in (rank.next, *rank.followers):
            peers[who.inbox] = rank.name
        if rank.inbox is not None and rank.inbox in (who.next, *who.followers):
            peers[rank.inbox] = rank.name
    return peers
