"""Where a pool's devices may sit: which nodes measure, and which cores and GPUs those have.

A node that is started with the custom resource `benchmark` (any amount) is there to be measured on.
While the cluster has such nodes, only they measure: trainers elsewhere keep their cores quiet.
Ray nodes that share a machine also share its cores, so cores are dealt per machine.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.benchmark.hardware import Kind, NodeReport

RESOURCE = "benchmark"

Node = Mapping[str, Any]  # as `ray.nodes()` tells of it
Unit = tuple[str, int | None, int | None]


@dataclass(frozen=True)
class Place:
    """Where a device is: a core of a machine, or the n-th GPU of a node."""

    machine: str
    node_id: str
    host: str
    core: int | None
    gpu: int | None
    memory_bytes: int

    @property
    def name(self) -> str:
        """What reports call it."""
        what = f"gpu{self.gpu}" if self.core is None else f"cpu{self.core}"
        return f"{what}@{self.host}"

    @property
    def unit(self) -> Unit:
        """What no two actors may share: a core belongs to its machine, a GPU number to its node."""
        owner = self.machine if self.core is not None else self.node_id
        return owner, self.core, self.gpu


def is_declared(node: Node) -> bool:
    """True for a node that is there to be measured on."""
    return bool(node["Resources"].get(RESOURCE, 0) > 0)


def nodes_that_measure(nodes: Iterable[Node]) -> dict[str, Node]:
    """The live nodes that declare `benchmark`, by id; all live ones if none does."""
    alive = {str(node["NodeID"]): node for node in nodes if node["Alive"]}
    return {name: node for name, node in alive.items() if is_declared(node)} or alive


def best_kind(nodes: Iterable[Node]) -> Kind:
    """GPUs where there is any, else cores."""
    return "cuda" if any(node["Resources"].get("GPU", 0) >= 1 for node in nodes) else "cpu"


def core_places(reports: Sequence[NodeReport], taken: Iterable[Place]) -> list[Place]:
    """Cores that are not taken, each dealt to the node of its machine that has the fewest."""
    taken = list(taken)
    units = {place.unit for place in taken}
    load = Counter(place.node_id for place in taken)
    machines: dict[str, list[NodeReport]] = defaultdict(list)
    for report in reports:
        machines[report.machine_id].append(report)
    places = []
    for machine, nodes in sorted(machines.items()):
        cores = sorted({core for report in nodes for core in report.cores})
        memory = {report.node_id: share_memory(cores, report) for report in nodes}
        for core in cores:
            if (machine, core, None) in units:
                continue
            able = [report for report in nodes if core in report.cores]
            node = min(able, key=lambda report: (load[report.node_id], report.node_id))
            load[node.node_id] += 1
            share = memory[node.node_id][core]
            places.append(Place(machine, node.node_id, node.host, core, None, share))
    return places


def share_memory(cores: Sequence[int], report: NodeReport) -> dict[int, int]:
    """Bytes for each core of a machine: alike, but for cores whose NUMA node has less than that.

    Pages lie on the node of the thread that first writes to them, and the actor of a core stays on
    it. Beyond its node's memory it would measure how slow that of others is.
    """
    homes = {cpu: node for node in report.numa if node.memory_bytes for cpu in node.cpus}
    crowds = Counter(homes[core].number for core in cores if core in homes)
    near = {
        core: homes[core].memory_bytes // crowds[homes[core].number]
        if core in homes
        else report.memory_bytes
        for core in cores
    }
    shares: dict[int, int] = {}
    left = report.memory_bytes
    for core in sorted(cores, key=lambda core: near[core]):
        shares[core] = min(near[core], left // (len(cores) - len(shares)))
        left -= shares[core]
    return shares


def gpu_places(
    reports: Sequence[NodeReport], nodes: Mapping[str, Node], taken: Iterable[Place]
) -> list[Place]:
    """GPUs that are not taken."""
    units = {place.unit for place in taken}
    return [
        place
        for report in reports
        for number in range(int(nodes[report.node_id]["Resources"].get("GPU", 0)))
        for place in [Place(report.machine_id, report.node_id, report.host, None, number, 0)]
        if place.unit not in units
    ]
