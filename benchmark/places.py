"""Which nodes of a cluster are measured on.

A node that is started with the custom resource `benchmark` (any amount) is there to be measured on.
While the cluster has such nodes, only they measure: trainers elsewhere keep their cores quiet.
"""

from collections.abc import Iterable
from typing import Any

import ray

from autoshard.benchmark.backends.base import Node, on_node
from autoshard.benchmark.hardware import this_machine

RESOURCE = "benchmark"


def is_declared(node: Node) -> bool:
    """True for a node that is there to be measured on."""
    return bool(node["Resources"].get(RESOURCE, 0) > 0)


def nodes_that_measure(nodes: Iterable[Node]) -> dict[str, Node]:
    """Returns the live nodes that declare `benchmark`, by id; all live ones if none does."""
    alive = {str(node["NodeID"]): node for node in nodes if node["Alive"]}
    return {name: node for name, node in alive.items() if is_declared(node)} or alive


def reports_of(node_ids: Iterable[str]) -> list[Any]:
    """Has each node report on itself; returns Ray's references to the reports."""
    probe = ray.remote(num_cpus=0)(this_machine)
    return [probe.options(**on_node(node_id)).remote(node_id) for node_id in node_ids]
