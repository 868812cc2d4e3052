"""Two nodes of two devices over a link of 1 Gbit/s: measured, planned for, trained over."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import EXPERIMENTS
from known_links import BOTH, NONE, RANKS, steps_by_known_links
from namespaces import Machine, missing, two_nodes
from ports import free_port

from autoshard.benchmark.machine.hardware import physical_cores
from autoshard.experiments.console.objectives import ObjectiveOptions
from autoshard.workload import Network

pytestmark = [
    pytest.mark.skipif((reason := missing()) is not None, reason=str(reason)),
    pytest.mark.skipif(len(physical_cores()) < 2, reason="a node has two cores"),
]
_GBIT = 0.125e9
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
    network = options.build_objective(RANKS).link
    assert isinstance(network, Network)
    assert network.devices_per_node == 2
    # Of two devices' share, what a burst holds is faster; busy cores are slower by any factor.
    assert network.between.bytes_s < 2 * _GBIT / 2
    assert network.inside.bytes_s > 2 * network.between.bytes_s

    steps_ms = steps_by_known_links(machine, address, options, tmp_path, (BOTH, NONE))
    assert steps_ms[BOTH] < 0.8 * steps_ms[NONE], steps_ms
