"""Faults of plans: options that exclude each other, broken rules, lack of memory."""

from collections.abc import Mapping, Sequence

from autoshard.workload.sizes import format_bytes
from autoshard.workload.tables.operators import MemoryParts
from autoshard.workload.tasks.rules import Rule
from autoshard.workload.tasks.task import Device, ShardingTask
from autoshard.workload.ways import WAYS
from autoshard.workload.ways.option import Options, option_of

_NAMED = 3  # devices that an error names, besides the worst


def fault_of_options(options: Options, task: ShardingTask) -> str | None:
    """Returns why tables of a task cannot have their options."""
    tables = {table.name: table for table in task.tables}
    faults = (  # of rows last: they look at what others leave of a table
        way.fault(tables[name], option, task)
        for name, option in options.items()
        for way in reversed(WAYS)
    )
    return next((fault for fault in faults if fault is not None), None)


def fault_of_rule(
    rule: Rule, options: Options, widths: Mapping[str, Mapping[int, int]], devices: int
) -> str | None:
    """Returns how a plan breaks a rule.

    Args:
        rule: The rule.
        options: Options of the plan's tables.
        widths: Number of columns of each table, by device.
        devices: Number of devices.
    """
    fault = _broken_by_options(rule, options, devices)
    if fault is None:
        columns = [name for name in rule.tables if option_of(options, name).by_columns]
        fault = rule.broken_by({name: widths[name] for name in columns})
    return None if fault is None else f"the plan breaks the constraint {rule.name!r}: {fault}"


def _broken_by_options(rule: Rule, options: Options, devices: int) -> str | None:
    taken = {
        (way, name): way.taken_by(option_of(options, name)) for way in WAYS for name in rule.tables
    }
    for (way, name), yes in taken.items():
        if rule.kind == way.demanded_by and not yes:
            return way.says(name, yes=False)
    for (way, name), yes in taken.items():
        if yes and way.forbids(rule.kind, option_of(options, name), devices):
            return way.says(name)
    return None


def fault_of_memory(held: Sequence[MemoryParts], devices: Sequence[Device]) -> str | None:
    """Returns which devices lack memory, the worst with all parts.

    Args:
        held: What each device holds, [devices].
        devices: The devices.
    """
    lacking = {
        number: parts.total - device.usable_bytes
        for number, (parts, device) in enumerate(zip(held, devices, strict=True))
        if parts.total > device.usable_bytes
    }
    if not lacking:
        return None
    first, *others = sorted(lacking, key=lambda number: -lacking[number])
    device = devices[first]
    more = [f"device {number} {format_bytes(lacking[number])}" for number in others[:_NAMED]]
    if len(others) > _NAMED:
        more.append(f"{len(others) - _NAMED} more devices")
    return (
        f"device {first} ({device.name}) would hold {format_bytes(held[first].total)} "
        f"({held[first].breakdown}), {format_bytes(lacking[first])} more than its "
        f"{format_bytes(device.usable_bytes)}" + (f"; {', '.join(more)} too much" if more else "")
    )
