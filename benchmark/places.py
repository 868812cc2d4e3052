"""Selects the nodes of a cluster that measure.

These are the nodes with the custom resource `benchmark` (any amount). Without such nodes, all nodes
measure. So trainers can be kept off the cores that measure.
"""

from collections.abc import Iterable
from typing import Any

import ray

from autoshard.benchmark.backends.base import Node, on_node
from autoshard.benchmark.hardware import this_machine

RESOURCE = "benchmark"


def is_declared(node: Node) -> bool:
    """Returns whether a node has the resource `benchmark`."""
    return bool(node["Resources"].get(RESOURCE, 0) > 0)


def nodes_that_measure(nodes: Iterable[Node]) -> dict[str, Node]:
    """Returns the live nodes that declare `benchmark`, by id; all live ones if none does."""
    alive = {str(node["NodeID"]): node for node in nodes if node["Alive"]}
    return {name: node for name, node in alive.items() if is_declared(node)} or alive


def reports_of(node_ids: Iterable[str]) -> list[Any]:
    """Has each node report on itself; returns Ray's references to the reports."""
    probe = ray.remote(num_cpus=0)(this_machine)
    return [probe.options(**on_node(node_id)).remote(node_id) for node_id in node_ids]
