"""Plans for four devices on two nodes that know both links, one or none, trained in real time."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from namespaces import Machine

from autoshard.cost_model import EstimatedCosts, load_model
from autoshard.experiments.console.objectives import ObjectiveOptions
from autoshard.sharders import SharderContext, load_policy, make_sharder
from autoshard.workload import Device, EmbeddingTable, ShardingTask, load_tables

RANKS, _BATCH_SIZE = 4, 2048
BOTH, INSIDE, NONE = "both links", "the link inside", "no link"


def steps_by_known_links(
    machine: Machine,
    address: str,
    options: ObjectiveOptions,
    folder: Path,
    known: Sequence[str] = (BOTH, INSIDE, NONE),
) -> dict[str, float]:
    """Median milliseconds of a step by each plan, on all devices of a cluster at once.

    Args:
        machine: Where the first node of the cluster is.
        address: The cluster's.
        options: Both links.
        folder: For the task and the plans.
        known: What plans know.
    """
    heavy = tuple(EmbeddingTable(f"heavy{n}", 500_000, 8, 100.0) for n in range(2))
    tables = (*heavy, *load_tables("synthetic:30:0:small"))
    (folder / "plans").mkdir()
    given = {NONE: ObjectiveOptions(), INSIDE: ObjectiveOptions(link=options.link), BOTH: options}
    for name in known:
        objective = given[name].build_objective(RANKS)
        model = load_model("cpu").for_objective(objective, RANKS)
        operator = model.provenance.operator
        task = ShardingTask(
            tables, Device.uniform(RANKS, 2**30), _BATCH_SIZE, operator, objective=objective
        )
        context = SharderContext(EstimatedCosts(model, _BATCH_SIZE), load_policy("cpu"))
        make_sharder("autoshard", context).shard(task).save(folder / "plans" / name)
        if name == BOTH:
            task.save(folder / "task.json")
    program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("train_over_links.py"))]
    told = machine.run([*program, address, str(folder)], 300.0, RAY_AUTH_MODE="disabled")
    found: dict[str, float] = json.loads(told.splitlines()[-1])
    return found
