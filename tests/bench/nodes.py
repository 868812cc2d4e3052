"""Networks of two levels: prices of all-to-alls beside measured ones, and what it helps to know.

Two nodes of two devices each are network namespaces of this machine, joined by 1 Gbit/s.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

from known_links import BOTH, INSIDE, NONE, steps_by_known_links
from namespaces import missing, two_nodes
from ports import free_port

from autoshard.cost_model import EstimatedCosts, OtherHardware, OutsideTraining, load_model
from autoshard.cost_model.roofline import roofline_model
from autoshard.experiments.console.objectives import ObjectiveOptions
from autoshard.experiments.explaining.replica_choice import choose_replicas
from autoshard.sharders import SharderContext, load_policy, make_sharder
from autoshard.sharders.replanning.replicating import ReplicaPlan
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Network,
    Objective,
    ShardingTask,
    load_tables,
)
from autoshard.workload.data_sheets import DATA_SHEETS
from autoshard.workload.packing.gpu_memory import on_gpus
from autoshard.workload.tasks.links import AnyLink
from bench.metric import Metric
from bench.workbench import context_of, say

_NETWORK = Network(Link(1e10, 2e-5), Link(1e9, 2e-5), 4)
_SYNC_INTERVAL = 100
_DEVICES, _BATCH_SIZE, _AMPLE = 8, 8192, 2**40
_GIANTS = tuple(
    EmbeddingTable(f"giant{n}", 50_000_000, 64, 100.0, zipf_alpha=0.8) for n in range(6)
)


def node_metrics() -> list[Metric]:
    """Prices of collectives, and steps by price of plans that know both links or one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherHardware)
        warnings.simplefilter("ignore", OutsideTraining)
        return [*_measured_metrics(), *_known_metrics(), *_replica_metrics()]


def _measured_metrics() -> list[Metric]:
    """Collectives over links that were fitted to other sizes."""
    if (why := missing()) is not None:
        say(f"collectives among nodes are left out: {why}")
        return []
    say("collectives inside a node and among two")
    program = [sys.executable, str(Path(__file__).with_name("measure_links.py"))]
    with two_nodes("bench", "1gbit", free_port()) as (machine, address):
        said = machine.run([*program, address], 1800.0, RAY_AUTH_MODE="disabled")
        found = json.loads(said.splitlines()[-1])
        say("training by plans that know both links, one or none")
        with tempfile.TemporaryDirectory() as folder:
            options = ObjectiveOptions(**found["options"])
            steps_ms = steps_by_known_links(machine, address, options, Path(folder))
    return [
        *(
            # gloo's reduce-scatter is an all-reduce, which moves twice as much.
            Metric(f"{label}: predicted over measured",
                   "" if label.startswith("reduce-scatter") else "0.9 to 1.1", ratio)
            for label, ratio in found["ratios"].items()
        ),
        *(
            Metric(f"32 tables on two nodes: trained step, knowing {BOTH} over {other}",
                   "below 1", steps_ms[BOTH] / steps_ms[other])
            for other in (INSIDE, NONE)
        ),
    ]  # fmt: skip


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


def _replica_metrics() -> list[Metric]:
    """Steps on 8 nodes of 8 H100, by the best replica groups over one group of all devices."""
    network = Network(Link(450e9, 5e-6), Link(50e9, 20e-6), 8)
    metrics = []
    for name, tables in (
        ("MLPerf DLRM-v2", load_tables("mlperf:dlrm-v2")),
        ("100 synthetic tables", load_tables("synthetic:100:3:full")),
    ):
        say(f"replica groups: {name}")
        objective = Objective("operators", network)
        model = roofline_model(DATA_SHEETS["h100-80gb"]).for_objective(objective, 64)
        operator, devices = model.provenance.operator, Device.uniform(64, 80 * 2**30)
        task = on_gpus(ShardingTask(tables, devices, 2**19, operator, objective=objective))
        context = SharderContext(EstimatedCosts(model, task.batch_size), load_policy("cpu"))
        found = choose_replicas(task, context, "autoshard", None, _SYNC_INTERVAL, None)
        alone = found.every[-1]
        assert isinstance(alone, ReplicaPlan)
        metrics.append(
            Metric(
                f"{name} on 64 H100 by data sheet, copies averaged every {_SYNC_INTERVAL} steps: "
                "step by price, best replica groups over one group",
                "at most 1",
                found.chosen.total_ms / alone.total_ms,
            )
        )
    return metrics


def _task(tables: tuple[EmbeddingTable, ...], link: AnyLink) -> ShardingTask:
    operator = load_model("cpu").provenance.operator
    devices = Device.uniform(_DEVICES, _AMPLE)
    return ShardingTask(tables, devices, _BATCH_SIZE, operator, objective=Objective("step", link))
