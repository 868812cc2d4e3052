"""Makes a cost model for a machine of which nothing but its probe is known."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from autoshard.benchmark import MachineProbe, MeasurementStore
from autoshard.benchmark.probe.shards import PROBE_SHARDS
from autoshard.cost_model.learning.compute_training import Examples
from autoshard.cost_model.learning.machine_fitting import fitted_to
from autoshard.cost_model.models.model import CostModel
from autoshard.cost_model.networks.dataset import CostDataset
from autoshard.workload import OperatorOptions

MIN_PROBE_SHARDS = 6  # fewer say less than the mean machine
_PROBE_ERROR = 0.05  # relative, of a cost in a probe


def on_machine(model: CostModel, probe: MachineProbe) -> CostModel:
    """Returns the model for the machine of a probe.

    If the model was not trained on such a machine, effects are fitted to the shards of the probe,
    and the time of an update and what training takes beside operators follow from it. A model of
    one machine is returned as it is.
    """
    machines, origin = model.machines, model.provenance
    if (known := model.on_hardware(probe.hardware)) is not None:
        return known
    if machines is None:
        return model
    mean = machines.mean_with_update(probe.update_ns(origin.operator.optimizer))
    data = probed_costs(probe, origin.operator)
    if data is not None:
        mean = fitted_to(mean, Examples.of(data))
    here = replace(
        origin,
        hardware=probe.hardware,
        versions=probe.versions,
        reference_level=probe.reference_level,
    )
    overheads = model.overheads_at(probe.hardware, probe.reference_level)
    return replace(model, compute=mean, provenance=here, probe=probe, overheads=overheads)


def probed_costs(probe: MachineProbe, operator: OperatorOptions) -> CostDataset | None:
    """Returns the shards of a probe with their costs; None if too few were measured."""
    found = []
    for each in probe.shards:
        of, forward_ms, backward_ms = PROBE_SHARDS.get(each.name), each.ms.forward, each.ms.backward
        if of is not None and forward_ms is not None and backward_ms is not None:
            found.append((of, (forward_ms, backward_ms)))
    if len(found) < MIN_PROBE_SHARDS:
        return None
    costs_ms = np.array([costs for _, costs in found])
    return CostDataset(
        shards=tuple(of.shard for of, _ in found),
        batch_sizes=tuple(of.batch_size for of, _ in found),
        costs_ms=costs_ms,
        errors=np.full(len(found), _PROBE_ERROR),
        repeats_ms=tuple((total,) for total in costs_ms.sum(1).tolist()),
        operator=operator,
        hardware=probe.hardware,
        versions=probe.versions,
        reference_level=probe.reference_level,
    )


def kept_probe(store: Path, hardware: str, run: Callable[[], MachineProbe]) -> MachineProbe:
    """Returns the store's probe of this hardware; if there is none, it is run and kept."""
    if store.is_file():
        with MeasurementStore(store) as kept:
            found = kept.find_probe(hardware)
        if found is not None:
            return found
    probe = run()
    with MeasurementStore(store) as kept:
        kept.put_probe(probe)
    return probe
