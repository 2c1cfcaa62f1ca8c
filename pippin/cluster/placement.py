"""Where the ranks of a replica go, from what each node of the Ray cluster has (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pippin import __version__
from pippin.config import ModelConfig
from pippin.errors import NodeUnfit, ResourcesMissing

MLX, GPU, CPU = "mlx", "GPU", "pippin_cpu"

#: What a rank may take one of, best first, and the backend that runs on it.
BACKENDS: Mapping[str, str] = {MLX: "mlx", GPU: "torch", CPU: "torch"}


@dataclass(frozen=True, slots=True)
class NodeState:
    """A living node."""

    node_id: str
    address: str
    """The one it was started with (``--node-ip-address``)."""
    name: str
    total: Mapping[str, float] = field(default_factory=dict)
    """By resource."""
    free: Mapping[str, float] = field(default_factory=dict)
    ours: bool = False
    """Whether this process runs there."""


@dataclass(frozen=True, slots=True)
class Place:
    """Of one rank."""

    node: NodeState
    resource: str


def wanted(model: ModelConfig) -> tuple[str, ...]:
    """Resources that a rank may take, best first."""
    if model.backend == "mlx":
        return (MLX,)
    if model.device.startswith("cuda"):
        return (GPU,)
    if model.device == "cpu":
        return (CPU,)
    return (GPU, CPU) if model.backend == "torch" else (MLX, GPU, CPU)


def place(
    nodes: Sequence[NodeState], stages: int, group_size: int, resources: Sequence[str]
) -> list[list[Place]]:
    """Places of the ranks of each stage.

    Each stage gets a node of its own where enough nodes have room, and else as few nodes as
    possible. The ranks of a stage share a node if they can. All take the same resource, the first
    of ``resources`` that there is enough of; only if there is none the stages differ. The last
    stage, which leads, is put near this process, since it talks to it.

    Raises ``ResourcesMissing``.
    """
    for resource in resources:
        slots = {node.node_id: (resource, _count(node.free, resource)) for node in nodes}
        found = _spread(nodes, slots, stages, group_size)
        if found is not None:
            return found
    best = {node.node_id: _best(node, resources) for node in nodes}
    found = _spread(nodes, best, stages, group_size, mixed=True)
    if found is None:
        raise missing(nodes, stages * group_size, resources)
    return found


def _spread(
    nodes: Sequence[NodeState],
    slots: Mapping[str, tuple[str, int]],
    stages: int,
    group_size: int,
    *,
    mixed: bool = False,
) -> list[list[Place]] | None:
    """``slots``: what each node offers, and how many."""
    order = sorted(nodes, key=lambda node: (node.ours, _by_number(node.address)))
    roomy = [node for node in order if slots[node.node_id][1] >= group_size]

    def of(node: NodeState) -> Place:
        return Place(node, slots[node.node_id][0])

    if len(roomy) >= stages:
        return [[of(node)] * group_size for node in roomy[-stages:]]
    # Whole stages on nodes that have room for several, fullest use of the roomiest first.
    whole = [(node, slots[node.node_id][1] // group_size) for node in roomy]
    if sum(count for _, count in whole) >= stages:
        whole.sort(key=lambda entry: -entry[1])
        taken: dict[str, int] = {}
        left = stages
        for node, count in whole:
            taken[node.node_id] = min(count, left)
            left -= taken[node.node_id]
        return [[of(node)] * group_size for node in roomy for _ in range(taken[node.node_id])]
    # Ranks of one stage on several nodes; they must be of one kind.
    singles = [of(node) for node in order for _ in range(slots[node.node_id][1])]
    if len(singles) < stages * group_size or (mixed and group_size > 1):
        return None
    singles = singles[-stages * group_size :]
    groups = [singles[i * group_size : (i + 1) * group_size] for i in range(stages)]
    return [sorted(group, key=lambda one: not one.node.ours) for group in groups]


def _count(amounts: Mapping[str, float], resource: str) -> int:
    return int(amounts.get(resource, 0.0) + 1e-6)


def _best(node: NodeState, resources: Sequence[str]) -> tuple[str, int]:
    for resource in resources:
        if count := _count(node.free, resource):
            return resource, count
    return resources[-1], 0


def _by_number(address: str) -> tuple[int, ...] | tuple[str]:
    parts = address.split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else (address,)


def missing(nodes: Sequence[NodeState], ranks: int, resources: Sequence[str]) -> ResourcesMissing:
    """The error that says what there is, and how to offer more."""
    names = " or ".join(resources)
    total = sum(sum(_count(node.total, resource) for resource in resources) for node in nodes)
    has = "; ".join(f"{node.address} ({node.name}): {_offer(node)}" for node in nodes)
    if total >= ranks:
        return ResourcesMissing(
            f"{ranks} ranks need one {names} each; the cluster has {total}, but other jobs hold"
            f" some of them. {has}",
            hint="end the other job (ray list actors shows it), or use fewer ranks",
        )
    lacking = next(
        (node.address for node in nodes if not any(_count(node.total, r) for r in resources)), None
    )
    return ResourcesMissing(
        f"{ranks} ranks need one {names} each; the cluster of {len(nodes)}"
        f" node{'s' if len(nodes) != 1 else ''} has {total}. {has}",
        hint=f"on {'the missing node' if lacking is None else lacking}: ray stop, then ray start"
        f" … --resources='{{\"{resources[-1]}\": 1}}' (GPU is found by Ray itself); or use fewer"
        " ranks (-pp, -tp)",
    )


def check_node(node: NodeState, version: str | None, why: str, python: str) -> None:
    """Raises ``NodeUnfit`` unless the node's ranks would run this version."""
    where = f"node {node.address} ({node.name})"
    if version is None:
        raise NodeUnfit(
            f"{where}: the Python that Ray runs there, {python}, has no Pippin: {why}",
            hint=f"there: {python} -m pip install 'pippin[cluster]=={__version__}'",
        )
    if version != __version__:
        raise NodeUnfit(
            f"{where} has Pippin {version}, this machine has {__version__}",
            hint=f"there: {python} -m pip install 'pippin[cluster]=={__version__}'",
        )


def _offer(node: NodeState) -> str:
    parts = []
    for resource in BACKENDS:
        total, free = _count(node.total, resource), _count(node.free, resource)
        if total:
            parts.append(f"{total} {resource}" + (f" ({free} free)" if free < total else ""))
    return ", ".join(parts) or f"none of {', '.join(BACKENDS)}"
