"""Two nodes of two devices over a link of 1 Gbit/s: measured, planned for, trained over."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import EXPERIMENTS
from namespaces import Machine, missing, two_nodes
from ports import free_port

from autoshard.benchmark.hardware import physical_cores
from autoshard.cost_model import EstimatedCosts, load_model
from autoshard.experiments.console.objectives import ObjectiveOptions
from autoshard.sharders import SharderContext, load_policy, make_sharder
from autoshard.workload import Device, EmbeddingTable, Network, ShardingTask, load_tables

pytest.importorskip("torchrec")
pytestmark = [
    pytest.mark.skipif((reason := missing()) is not None, reason=str(reason)),
    pytest.mark.skipif(len(physical_cores()) < 2, reason="a node has two cores"),
]
_RANKS, _BATCH_SIZE, _GBIT = 4, 2048, 0.125e9
_OPTIONS = re.compile(r"--link (\S+) --inter-node-link (\S+) --devices-per-node (\d+)")


@pytest.fixture(scope="module")
def head() -> Iterator[tuple[Machine, str]]:
    """The first of two machines with a Ray node each, and the address of Ray."""
    with two_nodes("slow", "1gbit", free_port()) as found:
        yield found


def test_plans_for_both_levels_of_a_network_that_was_measured(
    head: tuple[Machine, str], tmp_path: Path
) -> None:
    machine, address = head
    doctor = [sys.executable, str(EXPERIMENTS / "doctor.py")]
    said = machine.run(doctor, 300.0, RAY_ADDRESS=address, RAY_AUTH_MODE="disabled")
    found = _OPTIONS.search(said)
    assert found is not None, said
    link, between, of_node = found.groups()
    options = ObjectiveOptions(link=link, inter_node_link=between, devices_per_node=int(of_node))
    network = options.build_objective(_RANKS).link
    assert isinstance(network, Network)
    assert network.devices_per_node == 2
    # Of two devices' share, what a burst holds is faster; busy cores are slower by any factor.
    assert network.between.bytes_s < 2 * _GBIT / 2
    assert network.inside.bytes_s > 2 * network.between.bytes_s

    heavy = tuple(EmbeddingTable(f"heavy{n}", 500_000, 8, 100.0) for n in range(2))
    tables = (*heavy, *load_tables("synthetic:30:0:small"))
    (tmp_path / "plans").mkdir()
    for name, given in (("does not", ObjectiveOptions()), ("knows", options)):
        objective = given.build_objective(_RANKS)
        model = load_model("cpu").for_objective(objective, _RANKS)
        operator = model.provenance.operator
        task = ShardingTask(
            tables, Device.uniform(_RANKS, 2**30), _BATCH_SIZE, operator, objective=objective
        )
        context = SharderContext(EstimatedCosts(model, _BATCH_SIZE), load_policy("cpu"))
        make_sharder("autoshard", context).shard(task).save(tmp_path / "plans" / name)
        task.save(tmp_path / "task.json")
    program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("train_over_links.py"))]
    told = machine.run([*program, address, str(tmp_path)], 300.0, RAY_AUTH_MODE="disabled")
    steps_ms = json.loads(told.splitlines()[-1])
    assert steps_ms["knows"] < 0.8 * steps_ms["does not"], steps_ms
