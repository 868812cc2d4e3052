"""Networks of two levels: prices of all-to-alls beside measured ones, and what it helps to know.

Two nodes of two devices each are network namespaces of this machine, joined by 1 Gbit/s.
"""

import json
import sys
import warnings
from pathlib import Path

from namespaces import missing, two_nodes
from ports import free_port

from autoshard.cost_model import OtherHardware, OutsideTraining, load_model
from autoshard.sharders import make_sharder
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Network,
    Objective,
    ShardingTask,
    load_tables,
)
from autoshard.workload.links import AnyLink
from bench.metric import Metric
from bench.workbench import context_of, say

_NETWORK = Network(Link(1e10, 2e-5), Link(1e9, 2e-5), 4)
_DEVICES, _BATCH_SIZE, _AMPLE = 8, 8192, 2**40
_GIANTS = tuple(
    EmbeddingTable(f"giant{n}", 50_000_000, 64, 100.0, zipf_alpha=0.8) for n in range(6)
)


def node_metrics() -> list[Metric]:
    """Prices of collectives, and steps by price of plans that know both links or one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherHardware)
        warnings.simplefilter("ignore", OutsideTraining)
        return [*_measured_metrics(), *_known_metrics()]


def _measured_metrics() -> list[Metric]:
    """All-to-alls over links that were fitted to others."""
    if (why := missing()) is not None:
        say(f"all-to-alls among nodes are left out: {why}")
        return []
    say("all-to-alls inside a node and among two")
    program = [sys.executable, str(Path(__file__).with_name("measure_links.py"))]
    with two_nodes("bench", "1gbit", free_port()) as (machine, address):
        said = machine.run([*program, address], 600.0, RAY_AUTH_MODE="disabled")
    found = json.loads(said.splitlines()[-1])
    return [
        Metric(f"all-to-all {label}: predicted over measured", "0.9 to 1.1", ratio)
        for label, ratio in found.items()
    ]


def _known_metrics() -> list[Metric]:
    """Plans of tables with giants on two nodes of four devices, at the price of both links."""
    tables = (*_GIANTS, *load_tables("synthetic:60:3:small"))
    context = context_of(_task(tables, _NETWORK))
    steps_ms = {}
    for name, link in (
        ("both links", _NETWORK),
        ("the link inside", _NETWORK.inside),
        ("the link between", _NETWORK.between),
    ):
        task = _task(tables, link)
        plan = make_sharder("autoshard", context_of(task)).shard(task)
        steps_ms[name] = context.costs.step_ms(plan, _task(tables, _NETWORK))
    known_ms = steps_ms.pop("both links")
    return [
        Metric(f"giants on two nodes: step by price, knowing both links over {name}", "below 1",
               known_ms / ms)
        for name, ms in steps_ms.items()
    ]  # fmt: skip


def _task(tables: tuple[EmbeddingTable, ...], link: AnyLink) -> ShardingTask:
    operator = load_model("cpu").provenance.operator
    devices = Device.uniform(_DEVICES, _AMPLE)
    return ShardingTask(tables, devices, _BATCH_SIZE, operator, objective=Objective("step", link))
