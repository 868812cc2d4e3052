#!/usr/bin/env python
"""Probe this machine, so that plans can be made for it elsewhere."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from autoshard.benchmark.probe.probing import probe_here
from autoshard.benchmark.probe.report import PROBE_SECONDS, save_probe
from autoshard.experiments.console import cli
from autoshard.experiments.console.inputs import check_file
from autoshard.workload.bounds import check_bounds


@dataclass(frozen=True)
class ProbeConfig:
    """Measure the speed of this machine's memory and of small shards, in a few seconds.

    shard.py --hardware FILE then plans for this machine anywhere.
    """

    out: tyro.conf.Positional[Path]
    """JSON file for the probe."""
    seconds: float = PROBE_SECONDS
    """Time that the probe takes. What there is no time for is missing in it."""
    threads: int = 1
    """Cores of a device, as ranks have that train with several threads."""

    def check(self) -> None:
        """Raises UserError unless the options are valid."""
        check_file(self.out, "OUT", (".json",))
        check_bounds(self, at_least={"threads": 1}, more_than={"seconds": 0})


def main(config: ProbeConfig) -> None:
    """Probes one device and writes the probe."""
    config.check()
    found = probe_here(
        "cpu",
        config.seconds,
        config.threads,
        waiting=lambda held: cli.notice(f"the probe waits: {held}"),
    )
    save_probe(found, config.out)
    known = sum(size.copy_gb_s is not None for size in found.working_sets)
    cli.say(
        f"probed {found.hardware} in {found.seconds:.1f} s: {len(found.shards)} shards, "
        f"{known} of {len(found.working_sets)} working sets; the probe is in {config.out}"
    )


if __name__ == "__main__":
    cli.run_command(main, ProbeConfig)
