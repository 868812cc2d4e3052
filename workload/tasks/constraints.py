"""Constraints as users write them: a YAML file over tables, groups and devices.

    groups:
      ads: [ads_click, "ads_view_*"]        # names and patterns of tables
    tables:                                 # a table, a pattern or a group
      ads: {together: true}
      user_id: {on: [0, 1], max_slices: 2}
      "item_*": {not_on: [device3], min_width: 32, apart: true}
      country: {whole: true}
      city: {pinned: 2}
      "log_*": {ways: [table_wise, row_wise, data_parallel]}
    devices:                                # a name, a number, or all
      all: {reserve: 10%}                   # share of its memory, or a size: 2 GB

`Constraints.applied` adds the rules to a task and reserves memory of its devices.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from autoshard.workload import documents
from autoshard.workload.errors import FieldError, UserError
from autoshard.workload.tables.table import MAX_DIM
from autoshard.workload.tasks.rules import Kind, Rule
from autoshard.workload.tasks.task import Device, ShardingTask

_SECTIONS = ("groups", "tables", "devices")
_FLAGS: dict[str, Kind] = {"together": "together", "apart": "apart", "whole": "whole"}
_COUNTS: dict[str, Kind] = {"max_slices": "max_slices", "min_width": "min_width"}
_PLACES: dict[str, Kind] = {"on": "on", "not_on": "not_on", "pinned": "on"}
WAYS = ("table_wise", "column_wise", "row_wise", "data_parallel")  # in which a table may be sharded
_DEMANDS = (*_FLAGS, *_PLACES, *_COUNTS, "ways")
_ALL = "all"
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|GB)", re.IGNORECASE)
_GB = 2**30
_TRUTH = "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """A safe loader that reads `on` as text, as YAML 1.2 does, and rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise UserError(f"line {key.start_mark.line + 1}: a name is missing before a colon")
            if key.value in seen:
                raise UserError(f"line {key.start_mark.line + 1}: {key.value!r} occurs twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != _TRUTH]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_TRUTH, re.compile("(?i:true|false)"), list("tfTF"))


@dataclass(frozen=True)
class Constraints:
    """Placement constraints that are not yet bound to a task, in the sections of the file.

    Args:
        groups: Names or patterns of tables, by name of the group.
        tables: Constraints, by table, pattern or group.
        devices: `reserve` ("10%" or "2 GB"), by device name or number, or "all".
    """

    groups: Mapping[str, Sequence[str]]
    tables: Mapping[str, Mapping[str, Any]]
    devices: Mapping[str, Mapping[str, Any]]

    @staticmethod
    def of(document: Mapping[str, Any]) -> "Constraints":
        """Returns the constraints of a document with these sections; UserError if malformed."""
        if not isinstance(document, Mapping):
            raise UserError(f"constraints have sections: {', '.join(_SECTIONS)}")
        for section, content in document.items():
            if section not in _SECTIONS:
                raise UserError(f"{section}: is not one of the sections {', '.join(_SECTIONS)}")
            if not isinstance(content, Mapping):
                raise UserError(f"{section}: needs a name and a colon for each entry")
        groups = {
            str(name): _names(f"groups, {name}", members)
            for name, members in document.get("groups", {}).items()
        }
        sections = []
        for section in ("tables", "devices"):
            entries = document.get(section, {})
            for name, demands in entries.items():
                if not isinstance(demands, Mapping) or not demands:
                    raise UserError(f"{section}, {name}: needs demands, as in {{whole: true}}")
            sections.append({str(name): dict(demands) for name, demands in entries.items()})
        return Constraints(groups, *sections)

    @staticmethod
    def read(path: Path | str) -> "Constraints":
        """Reads a YAML or JSON file; UserError names the file and the fault."""
        with documents.naming(path):
            try:
                text = Path(path).read_text(encoding="utf-8")
                document = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
            except OSError as error:
                raise UserError(f"cannot be read: {error.strerror}") from error
            except UnicodeDecodeError as error:
                raise UserError("is not a UTF-8 text file") from error
            except RecursionError as error:
                raise UserError("has lists that are too deep") from error
            except yaml.YAMLError as error:
                mark = getattr(error, "problem_mark", None)
                where = "" if mark is None else f"line {mark.line + 1}: "
                problem = getattr(error, "problem", None) or "is not YAML"
                raise UserError(f"{where}{problem}") from error
            return Constraints.of(document or {})

    @staticmethod
    def of_file(path: Path | str, task: ShardingTask) -> ShardingTask:
        """Returns the task with the constraints of a file; UserError names the file."""
        constraints = Constraints.read(path)
        with documents.naming(path):
            return constraints.applied(task)

    def applied(self, task: ShardingTask) -> ShardingTask:
        """Returns the task with these constraints; UserError names unknown tables and devices."""
        rules = [
            rule
            for selector, demands in self.tables.items()
            for rule in self._rules(selector, demands, task)
        ]
        return replace(task, rules=(*task.rules, *rules), devices=tuple(self._devices(task)))

    def _rules(
        self, selector: str, demands: Mapping[str, Any], task: ShardingTask
    ) -> Iterator[Rule]:
        tables = self._selected(selector, task)
        with documents.naming(f"tables, {selector}"):
            for demand, value in demands.items():
                name = f"{selector}: {demand}" + ("" if value is True else f" {_shown(value)}")
                if demand not in _DEMANDS:
                    raise FieldError(demand, f"is not one of {', '.join(_DEMANDS)}")
                if demand in _FLAGS and not isinstance(value, bool):
                    raise FieldError(demand, f"must be true or false, got {value!r}")
                if demand in _COUNTS and (not isinstance(value, int) or isinstance(value, bool)):
                    raise FieldError(demand, f"must be a whole number, got {value!r}")
                if demand == "ways":
                    for kind, *numbers in _rules_of_ways(value):
                        yield Rule(kind, tables, tuple(numbers), name)
                elif demand in _PLACES:
                    devices = _devices_of(demand, value, task.devices)
                    yield Rule(_PLACES[demand], tables, devices, name)
                elif demand in _COUNTS:
                    yield Rule(_COUNTS[demand], tables, (value,), name)
                elif value:
                    yield Rule(_FLAGS[demand], tables, (), name)

    def _selected(self, selector: str, task: ShardingTask) -> tuple[str, ...]:
        """Returns the tables that a name, pattern or group selects, in the task's order."""
        names = [table.name for table in task.tables]
        patterns = self.groups.get(selector, (selector,))
        where = f"groups, {selector}" if selector in self.groups else "tables"
        chosen: set[str] = set()
        for pattern in patterns:
            found = {n for n in names if n == pattern or fnmatchcase(n, pattern)}
            if not found:
                raise UserError(f"{where}: {pattern!r} is no table of this task, nor a group")
            chosen |= found
        return tuple(name for name in names if name in chosen)

    def _devices(self, task: ShardingTask) -> Iterator[Device]:
        reserved = [device.reserved_bytes for device in task.devices]
        # An entry for one device overrides the entry for all.
        for name, demands in sorted(self.devices.items(), key=lambda entry: entry[0] != _ALL):
            for demand, value in demands.items():
                where = f"devices, {name}, {demand}"
                if demand != "reserve":
                    raise UserError(f"{where}: is not reserve, as in {{reserve: 10%}}")
                one = None if name == _ALL else _device("devices", name, task.devices)
                for number in range(len(reserved)) if one is None else (one,):
                    whole = task.devices[number].memory_bytes
                    reserved[number] = _amount(where, value, whole)
        for device, kept in zip(task.devices, reserved, strict=True):
            yield replace(device, reserved_bytes=kept)


def _names(where: str, members: Any) -> tuple[str, ...]:
    if not isinstance(members, list | tuple) or not members:
        raise UserError(f"{where}: needs a list of tables, as in [user_id, 'ads_*']")
    return tuple(map(str, members))


def _rules_of_ways(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yields kinds and numbers of rules by which only these ways are left; FieldError if none."""
    ways = value if isinstance(value, list | tuple) else [value]
    for way in ways:
        if way not in WAYS:
            raise FieldError("ways", f"must be some of {', '.join(WAYS)}, got {_shown(value)}")
    if not ways:
        raise FieldError("ways", f"leaves no way: name some of {', '.join(WAYS)}")
    if set(ways) in ({"data_parallel"}, {"row_wise"}):
        yield ("copied" if ways[0] == "data_parallel" else "row_wise",)
        return
    if "table_wise" not in ways:
        raise FieldError(
            "ways", "must include table_wise, unless it is row_wise or data_parallel alone"
        )
    if "column_wise" not in ways:
        yield ("min_width", MAX_DIM) if "row_wise" in ways else ("whole",)
    if "row_wise" not in ways:
        yield ("not_row_wise",)
    if "data_parallel" not in ways:
        yield ("not_copied",)


def _devices_of(demand: str, value: Any, devices: Sequence[Device]) -> tuple[int, ...]:
    given = value if isinstance(value, list | tuple) else [value]
    if demand == "pinned" and len(given) != 1:
        raise FieldError(demand, f"names one device, got {_shown(value)}")
    return tuple(_device(demand, device, devices) for device in given)


def _device(field: str, given: Any, devices: Sequence[Device]) -> int:
    """Returns the number of a device that is given by number or name."""
    names = [device.name for device in devices]
    if str(given) in names:
        return names.index(str(given))
    number = int(given) if str(given).isdigit() else -1
    if not 0 <= number < len(devices):
        raise FieldError(
            field,
            f"{given!r} is no device of this task: they are numbered 0 to {len(devices) - 1}, the "
            f"first is also called {names[0]}",
        )
    return number


def _amount(where: str, value: Any, whole: int) -> int:
    match = _AMOUNT.fullmatch(str(value).strip())
    if match is None:
        raise UserError(f"{where}: must be a share as in 10%, or as in 2 GB, got {value!r}")
    number, is_share = float(match[1]), match[2] == "%"
    kept = int(number / 100 * whole) if is_share else int(number * _GB)
    if kept >= whole:
        raise UserError(f"{where}: {value} leaves nothing of {whole / _GB:,.3f} GiB")
    return kept


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
