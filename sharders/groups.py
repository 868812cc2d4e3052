"""Many devices in groups: a large task as smaller ones, alike, that are played side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np

from autoshard.envs.catalog import NO_HALVES, Ints, Larger, TableCatalog, TaskInstance

# Of a group, at the least: of fewer devices, or where few units are there to even them out, groups
# come out worse than the whole; more take longer, one step a unit.
DEVICES, PIECES = 8, 300
_UNLIKE = 1.3  # times the memory a device of another group
_GIANT = 2.0  # devices' even share: what costs more comes in halves, to more than one group


@dataclass(frozen=True, eq=False)
class Group:
    """Some devices of a task, and what they are to hold.

    Args:
        devices: their numbers.
        deal: the task that they are.
    """

    devices: Ints
    instance: TaskInstance

    def with_(self, other: "Group") -> "Group":
        """Both in one."""
        ours, theirs = self.instance, other.instance
        units = np.concatenate([ours.units, theirs.units])
        memory = np.concatenate([ours.memory_bytes, theirs.memory_bytes])
        devices = np.concatenate([self.devices, other.devices])
        return Group(devices, replace(ours, units=units, memory_bytes=memory))


def in_groups(catalog: TableCatalog, whole: Group) -> list[Group]:
    """A task in as many groups as it is large enough for: each with its share of what the units
    cost, of memory, and of columns where these count.

    It stays one where it has rules, where a unit finds no group with room, and where a few devices
    have much of the memory, so that groups would be unlike.
    """
    instance, devices = whole.instance, len(whole.devices)
    count = min(devices // DEVICES, len(instance.units) // PIECES)
    if count <= 1 or instance.masks is not None:
        return [whole]
    # The largest memory first, to and fro: so all groups have as many devices, and much alike.
    ranked = np.argsort(-instance.memory_bytes, kind="stable")
    turns = np.arange(devices) % (2 * count)
    turns = np.minimum(turns, 2 * count - 1 - turns)
    members = [np.sort(ranked[turns == number]) for number in range(count)]
    room = [float(instance.memory_bytes[own].mean()) for own in members]
    parts = (
        _tables_of_groups(catalog, instance, members) if max(room) < _UNLIKE * min(room) else None
    )
    if parts is None:
        return [whole]
    columns = int(catalog.columns.numpy()[instance.units].sum())
    larger = Larger(devices, columns)
    return [
        Group(
            own,
            replace(instance, units=units, memory_bytes=instance.memory_bytes[own], larger=larger),
        )
        for own, units in zip(members, parts, strict=True)
    ]


def _tables_of_groups(
    catalog: TableCatalog, instance: TaskInstance, members: Sequence[Ints]
) -> list[Ints] | None:
    """The units of each group; None where one finds no group with room for it."""
    cost, columns, sizes = (
        some.numpy().astype(np.float64)
        for some in (catalog.alone_ms, catalog.columns, catalog.sizes)
    )
    devices = np.array([len(own) for own in members])
    room = np.array([instance.memory_bytes[own].sum() for own in members], np.float64)
    largest = np.array([instance.memory_bytes[own].max() for own in members], np.float64)
    even = cost[instance.units].sum() / devices.sum()
    # What there is to share out, and an even share of each group: costs, memory, and columns where
    # they count.
    kinds = [(cost, even * devices), (sizes, room)]
    if instance.objective.exchanges(devices.sum()):
        kinds.append((columns, columns[instance.units].sum() / devices.sum() * devices))
    shares = np.stack([each for each, _ in kinds], axis=1)
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
        if (cost[unit] > _GIANT * even or not fits) and halves[unit, 0] != NO_HALVES:
            for half in halves[unit].tolist():
                heappush(first, (-cost[half], half))
            continue
        if not fits:
            return None
        held[:, group] += shares[unit]
        found[group].append(unit)
    return [np.array(units, np.int64) for units in found]
