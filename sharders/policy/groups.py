"""Makes large tasks smaller for a policy: bundles of small tables, and groups of devices with
similar subtasks, which run as one batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.networks.inputs import unit_amounts
from autoshard.cost_model.networks.network import DIRECTIONS
from autoshard.envs.catalog import NO_HALVES, FullTask, TableCatalog, TaskInstance
from autoshard.envs.options import NO_OPTIONS
from autoshard.workload import ShardingTask
from autoshard.workload.arrays import Ints
from autoshard.workload.packing.units import PlacementUnit, bytes_of_units

# Minimum of a group. With fewer devices or tables, plans are worse than without groups. With more,
# planning takes longer: a step for each unit.
DEVICES, PIECES = 8, 300
_BUNDLE = 0.06  # of a device's even share; a search that follows moves single tables
_MAX_MEMORY_RATIO = 1.3  # ratio of mean device memory between groups
_MAX_SHARE = 2.0  # multiple of a device's even share: costlier units are split over groups


def bundled(
    oracle: EstimatedCosts, task: ShardingTask, units: Sequence[PlacementUnit]
) -> list[PlacementUnit]:
    """Returns the units of a task, large ones first, with small ones in bundles.

    A bundle takes at most 6 % of the work, output columns and memory of the mean device.

    Args:
        oracle: Predicts costs.
        task: Task without rules for single devices or tables.
        units: Its placement units.
    """
    work = unit_amounts(oracle.amounts, units)[..., :DIRECTIONS].mean(1).sum(1).double().numpy()
    columns = np.array([unit.columns for unit in units], np.float64)
    sizes = bytes_of_units(task.operator, task.batch_size, units)
    loads = (work / work.sum(), columns / columns.sum(), sizes / task.usable_bytes.sum())
    shares = len(task.devices) * np.max(loads, axis=0)
    found, held = list[PlacementUnit](), np.inf
    for number in np.argsort(-shares, kind="stable").tolist():
        held += shares[number]
        if held > _BUNDLE:
            found.append(units[number])
            held = shares[number]
        else:
            found[-1] = PlacementUnit((*found[-1].pieces, *units[number].pieces))
    return found


@dataclass(frozen=True, eq=False)
class Group:
    """Some devices of a task, and the units that they hold.

    Args:
        devices: Numbers of the devices in the task.
        instance: The subtask.
    """

    devices: Ints
    instance: TaskInstance

    def with_(self, other: "Group") -> "Group":
        """Returns a group of the devices and units of both."""
        ours, theirs = self.instance, other.instance
        units = np.concatenate([ours.units, theirs.units])
        memory = np.concatenate([ours.memory_bytes, theirs.memory_bytes])
        devices = np.concatenate([self.devices, other.devices])
        hardware = ours.hardware + theirs.hardware
        return Group(devices, replace(ours, units=units, memory_bytes=memory, hardware=hardware))


def in_groups(catalog: TableCatalog, whole: Group) -> list[Group]:
    """Divides a task into groups with even shares of cost, memory and relevant columns.

    Returns one group if the task is small or has constraints, if a few devices have much of the
    memory, or if a unit fits into no group.
    """
    instance, devices = whole.instance, len(whole.devices)
    pieces = sum(len(catalog.units[unit].pieces) for unit in instance.units)
    count = min(devices // DEVICES, pieces // PIECES)
    if count <= 1 or instance.masks is not None:
        return [whole]
    # In serpentine order of memory, so that groups have equal numbers of similar devices.
    kinds = np.unique(instance.hardware or [""] * devices, return_inverse=True)[1]
    ranked = np.lexsort((kinds, -instance.memory_bytes))
    numbers = np.arange(devices) % (2 * count)
    numbers = np.minimum(numbers, 2 * count - 1 - numbers)
    members = [np.sort(ranked[numbers == number]) for number in range(count)]
    memory = [float(instance.memory_bytes[own].mean()) for own in members]
    if max(memory) >= _MAX_MEMORY_RATIO * min(memory):
        return [whole]
    units_of_groups = _assign(catalog, instance, members)
    if units_of_groups is None:
        return [whole]
    columns = float(catalog.columns.numpy()[instance.units].sum())
    larger = FullTask(devices, columns)
    return [
        Group(
            own,
            replace(
                instance,
                units=units,
                memory_bytes=instance.memory_bytes[own],
                larger=larger,
                options=NO_OPTIONS,
                hardware=tuple(instance.hardware[device] for device in own if instance.hardware),
            ),
        )
        for own, units in zip(members, units_of_groups, strict=True)
    ]


def _assign(
    catalog: TableCatalog, instance: TaskInstance, members: Sequence[Ints]
) -> list[Ints] | None:
    """Returns the units of each group; None if a unit fits into no group."""
    cost, columns, sizes = (
        values.numpy().astype(np.float64)
        for values in (catalog.alone_ms, catalog.columns, catalog.sizes)
    )
    devices = np.array([len(own) for own in members])
    memory = np.array([instance.memory_bytes[own].sum() for own in members], np.float64)
    largest = np.array([instance.memory_bytes[own].max() for own in members], np.float64)
    even = cost[instance.units].sum() / devices.sum()
    # Resources of units, and the even share of each group.
    kinds = [(cost, even * devices), (sizes, memory)]
    if instance.objective.exchanges(devices.sum()):
        kinds.append((columns, columns[instance.units].sum() / devices.sum() * devices))
    shares = np.stack([values for values, _ in kinds], axis=1)
    even_shares = np.stack([share for _, share in kinds])
    halves = catalog.halves.numpy()
    held = np.zeros_like(even_shares)
    found: list[list[int]] = [[] for _ in members]
    first = [(-cost[unit], int(unit)) for unit in instance.units]
    heapify(first)
    while first:
        _, unit = heappop(first)
        after = (held + shares[unit][:, None]) / even_shares
        after[:, (after[1] > 1) | (largest < sizes[unit])] = np.inf
        group = int(after.max(0).argmin())
        fits = after[0, group] < np.inf
        if (cost[unit] > _MAX_SHARE * even or not fits) and halves[unit, 0] != NO_HALVES:
            for half in halves[unit].tolist():
                heappush(first, (-cost[half], half))
            continue
        if not fits:
            return None
        held[:, group] += shares[unit]
        found[group].append(unit)
    return [np.array(units, np.int64) for units in found]
