"""Cost predictions for a machine that was left out of training, with all of its shards.

A host was measured once for each shard, so its residuals contain the noise of one visit. Shards of
held-out families were measured several times on some hosts; the noise of their means is subtracted.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

import autoshard.cost_model
from autoshard.benchmark import ReferenceLevel
from autoshard.benchmark.machine.hardware import cpu_fingerprint
from autoshard.benchmark.probe.probing import probe_here
from autoshard.cost_model import CostDataset, read_costs
from autoshard.cost_model.learning.calibration_design import most_informative
from autoshard.cost_model.learning.compute_training import Examples
from autoshard.cost_model.learning.machine_fitting import fitted_to
from autoshard.cost_model.learning.machine_training import (
    KNOWN_SHARDS,
    train_machines,
    usual_shards,
)
from autoshard.cost_model.learning.probed_machine import probed_costs
from autoshard.cost_model.learning.training import TrainOptions
from autoshard.cost_model.models.machines import Machines
from autoshard.cost_model.networks.compute import ComputeCostModel
from bench.metric import Metric
from bench.model import shipped_costs
from bench.workbench import say

HOSTS = Path(autoshard.cost_model.__file__).parent / "hosts"
_OPTIONS = TrainOptions(members=3)
_COUNTS = (KNOWN_SHARDS, 48)  # shards of the machine that are known
_PROBES = 3


class _Host(NamedTuple):
    name: str
    data: CostDataset


def machine_metrics() -> list[Metric]:
    """Leaves out each host in turn."""
    hosts = [_Host("xeon-6.167", shipped_costs())]
    hosts += [_Host(path.stem, read_costs([path])) for path in sorted(HOSTS.glob("*.parquet"))]
    return [metric for host in hosts for metric in _left_out(host, hosts)]


def _left_out(host: _Host, hosts: Sequence[_Host]) -> Iterator[Metric]:
    others = [each.data for each in hosts if each is not host]
    say(f"{host.name} left out of {len(hosts)} hosts")
    machines = train_machines(others, _OPTIONS, seed=0)
    data = usual_shards(host.data)
    families = HOSTS / "families" / f"{host.name}.parquet"
    judge = None
    if families.exists():
        judge = read_costs([families], level=host.data.reference_level)
    candidates = host.data
    for count in _COUNTS:
        chosen = most_informative(machines.mean, candidates, data, count)
        model = fitted_to(machines.mean, Examples.of(candidates.subset(chosen)))
        by = f"by {count} of its shards"
        yield from _metrics(f"{host.name} {by}", [model], data)
        if judge is not None:
            yield from _metrics(f"{host.name} {by}, other families", [model], judge)
    if host.data.hardware == cpu_fingerprint():
        models = [_probed(machines, host.data) for _ in range(_PROBES)]
        yield from _metrics(f"{host.name} by its probe", models, data)
        if judge is not None:
            yield from _metrics(f"{host.name} by its probe, other families", models, judge)


def _probed(machines: Machines, data: CostDataset) -> ComputeCostModel:
    """Returns the networks by a probe of this machine, at the level of its measured shards."""
    probe = probe_here()
    found = probed_costs(probe, data.operator)
    assert found is not None
    level, here = data.reference_level, probe.reference_level
    assert isinstance(level, ReferenceLevel)
    assert isinstance(here, ReferenceLevel)
    found.costs_ms[:] *= level.over(here.forward_ms, here.backward_ms)
    mean = machines.mean_with_update(probe.update_ns(data.operator.optimizer))
    return fitted_to(mean, Examples.of(found))


def _metrics(name: str, models: Sequence[ComputeCostModel], data: CostDataset) -> Iterator[Metric]:
    """Yields the median figures of several models on these shards."""
    found = []
    for model in models:
        predicted_ms = model.predict(data.shards, data.batch_sizes).total_ms.double().numpy()
        errors = np.log(data.totals_ms / predicted_ms)
        tau = stats.kendalltau(data.totals_ms, predicted_ms).statistic
        found.append((np.exp(np.median(errors)), errors.std(), tau))
    ratio, deviation, tau = np.median(found, axis=0).tolist()
    yield Metric(f"measured over predicted, {name}", "0.8 to 1.25", ratio)
    if min(map(len, data.repeats_ms)) > 1:
        deviation = float(np.sqrt(max(0.0, deviation**2 - np.mean(data.errors**2))))
        yield Metric(f"deviation of the residual net of noise, {name}", "at most 0.10", deviation)
    else:
        yield Metric(f"deviation of the residual, {name}", "", deviation)
    yield Metric(f"Kendall tau, {name}", "", tau)
