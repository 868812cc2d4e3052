#!/usr/bin/env python
"""Look at the Ray cluster's pool of benchmark actors, or end it."""

from collections import Counter
from dataclasses import dataclass
from typing import Annotated

import ray
import tyro

from autoshard.benchmark.pool.metrics import WINDOW_SECONDS
from autoshard.benchmark.pool.pool import end_pool, find_pool, pool_names
from autoshard.experiments.console import cli
from autoshard.experiments.console.ray_cluster import ray_cluster


@dataclass(frozen=True)
class Show:
    """Print the devices of the pool, their nodes, and what they do."""


@dataclass(frozen=True)
class Stop:
    """End the pool for all clients, and withdraw its requests to the autoscaler.

    No measurement is lost. The next client starts another pool, with its own --devices.
    """


@dataclass(frozen=True)
class PoolConfig:
    """Look at the Ray cluster's pool of benchmark actors, or end it."""

    command: (
        Annotated[Show, tyro.conf.subcommand("show", prefix_name=False)]
        | Annotated[Stop, tyro.conf.subcommand("stop", prefix_name=False)]
    )


def main(config: PoolConfig) -> None:
    """Runs the subcommand."""
    with ray_cluster(must_run=True):
        if isinstance(config.command, Stop):
            ended = [end_pool(name) for name in pool_names()]
            cli.say("the pool is ended" if any(ended) else "no pool runs")
            return
        actors = [actor for name in pool_names() if (actor := find_pool(name)) is not None]
        if not actors:
            cli.say("no pool runs")
        for actor in actors:
            if not hasattr(actor, "state"):
                cli.say("a pool of another version runs: pool.py stop ends it")
                continue
            state, devices, (hardware, versions) = ray.get(
                [actor.state.remote(), actor.devices.remote(), actor.make.remote()]
            )
            if not devices:
                cli.say("the pool holds no devices now: it starts them on the next request")
            else:
                cli.say(f"{len(devices)} devices of {hardware} with {versions}")
            for node, count in sorted(Counter(device.node for device in devices).items()):
                cli.say(f"{count:>8} on {node}")
            cli.say(
                f"{state.devices_busy} measure now, {state.shards_waiting} shards wait; devices "
                f"measured {state.duty:.0%} of the latest {WINDOW_SECONDS:g} s counted\n"
                f"{state.shards_measured} shards measured, {state.shards_failed} failed; "
                f"{state.devices_lost} devices lost"
            )


if __name__ == "__main__":
    cli.run_command(main, PoolConfig)
