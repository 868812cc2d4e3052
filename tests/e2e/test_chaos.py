"""Kills at random moments; `make chaos` makes 50, and other faults, too."""

from chaos.faults import FAULTS
from chaos.metrics import line
from chaos.run import chaos
from chaos.workloads import WORKLOADS

QUICK = ("actor killed", "pool killed", "command killed", "node killed")


def test_commands_recover_from_five_kills() -> None:
    kills = [fault for fault in FAULTS if fault.name in QUICK]
    measuring = [workload for workload in WORKLOADS if workload.name == "measuring"]
    # By this seed there are all kinds, and both nodes are in one network: in two they would start
    # four actors instead of two.
    outcomes = list(chaos(kills, 5, seed=44, seconds=700, workloads=measuring))
    assert all(outcome.recovered for outcome in outcomes), "\n".join(map(line, outcomes))
    assert sum(not outcome.skipped for outcome in outcomes) == 5
    assert {outcome.fault for outcome in outcomes} == set(QUICK)
