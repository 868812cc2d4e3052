"""The hardware that plans are for: a GPU or a probed machine that is named, else this machine."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from autoshard.benchmark.backends import RequestedKind, backend_of
from autoshard.benchmark.probe.report import load_probe
from autoshard.cost_model import CostModel
from autoshard.cost_model.hardware import (
    Reporter,
    find_data_sheet,
    load_quietly,
    model_of_machine,
    model_of_sheet,
)
from autoshard.experiments.console import cli
from autoshard.experiments.console.objectives import ObjectiveOptions
from autoshard.sharders import cost_model_beside
from autoshard.workload import Device, OperatorOptions, UserError
from autoshard.workload.bounds import MAX_DEVICES
from autoshard.workload.data_sheets import DATA_SHEETS, FOR_TABLES, DataSheet
from autoshard.workload.tasks.links import slowest_of

_COUNTED = re.compile(r"(.+):(\d+)")  # a kind of hardware, and its number of devices
_GIB = 2**30  # in which torch and nvidia-smi count what data sheets call GB


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The machine that plans are for; options of commands inherit it."""

    hardware: str | None = None
    """Target hardware: a GPU (a100-40gb, a100-80gb, h100-80gb, h200-141gb, b200-180gb, b300-270gb,
    gb200-192gb, gb300-288gb, mi300x-192gb, mi355x-288gb, l4-24gb or l40s-48gb), NAME=FILE with the
    data sheet of another one (docs/gpus.md), or the file of a probe, which probe.py writes on the
    machine that will train. Default: this machine, which is probed if the cost model was not
    trained on it. shard.py takes several, each with its number of devices, in the order of ranks:
    h100-80gb:4,a100-80gb:4."""
    devices: RequestedKind = "auto"
    """Kind of devices to plan for, to measure and to train on: auto takes GPUs if there are any.
    Ranks that train take turns on cores, and on one GPU if there are fewer than ranks."""
    probe: bool = True
    """Probe this machine if the cost model was not trained on it (5 s, kept in --store). Without,
    the cost model is used as it is: for the machine that it was trained on."""
    cost_model: Path | None = None
    """Folder of a cost model, or the name of a shipped one. Default: the one in the folder of
    --policy, if the command has it, else the shipped one."""
    store: Path = Path("costs.db")
    """SQLite file that keeps all measurements, none of which is repeated. Except in compare.py,
    those of these tables correct the predictions."""

    @property
    def model_source(self) -> Path | str:
        """Folder of the cost model, or the name of a shipped one."""
        return self.cost_model or "cpu"

    @cached_property
    def kinds(self) -> "tuple[tuple[Self, int], ...]":
        """Options of each kind of hardware, and number of its devices; none if it is one kind.

        Raises:
            UserError: A number is missing, or out of bounds.
        """
        named = (self.hardware or "").split(",")
        if len(named) == 1 and not _COUNTED.fullmatch(named[0]):
            return ()
        found = []
        for each in named:
            counted = _COUNTED.fullmatch(each)
            if counted is None:
                raise UserError(
                    f"--hardware {each}: say how many devices are of each kind, as in "
                    "h100-80gb:4,a100-80gb:4"
                )
            if not 1 <= int(counted[2]) <= MAX_DEVICES:
                raise UserError(f"--hardware {each}: name 1 to {MAX_DEVICES} devices of each kind")
            found.append((replace(self, hardware=counted[1]), int(counted[2])))
        return tuple(found)

    def check_machine(self, several: bool = False) -> None:
        """Raises UserError for options that exclude each other.

        `several` says whether the command plans for several kinds of hardware.
        """
        if self.hardware is None:
            return
        if self.kinds:
            for options, _ in self.kinds:
                _ = options.data_sheet  # raises for an unknown name
            if not several:
                raise UserError(
                    f"--hardware {self.hardware} names several kinds of devices, for which "
                    "shard.py alone plans: name one"
                )
            for options, _ in self.kinds:
                options.check_machine()
            return
        sheet = self.data_sheet  # raises for an unknown name
        if not self.probe:
            raise UserError("--no-probe takes the cost model as it is: leave out --hardware")
        if sheet is None:
            return
        if self.cost_model is not None:
            raise UserError(
                f"--hardware {self.hardware} makes a cost model of a data sheet, and --cost-model "
                f"names {self.cost_model}: leave one out"
            )
        if self.devices == "cpu":
            raise UserError(
                f"--hardware {self.hardware} is a GPU, and --devices cpu asks for CPUs: leave one "
                "out"
            )

    def known_memory_gb(self, memory_gb: str | None, count: int = 1) -> str:
        """Returns --memory-gb of so many devices; by default the greater part of what the GPU that
        is named has.

        Raises:
            UserError: It is missing, and no GPU is named.
        """
        if memory_gb is not None:
            return memory_gb
        numbers = list[str]()
        for options, devices in self.kinds or ((self, 1),):
            if (sheet := options.data_sheet) is None:
                raise UserError(
                    "--memory-gb is missing: name the memory of a device in GB, or a GPU as "
                    "--hardware, of which it is known"
                )
            numbers += [f"{sheet.for_tables_gb:g}"] * devices
        cli.note(
            f"--memory-gb is {', '.join(dict.fromkeys(numbers))}, {FOR_TABLES:.0%} of what "
            f"{self.hardware} has: name it if your dense part needs more or less"
        )
        # If there are more or fewer devices than kinds name, `with_hardware` says so.
        return ",".join(numbers) if len(numbers) == count else numbers[0]

    def check_memory(self, devices: Sequence[Device]) -> None:
        """Raises UserError if the GPU that is named has less memory than the devices."""
        first = 0
        for options, count in self.kinds:
            options.check_memory(devices[first : first + count])
            first += count
        sheet = None if self.kinds else self.data_sheet
        if sheet is None or not devices:
            return
        largest = max(device.memory_bytes for device in devices)
        if largest > sheet.memory_gb * _GIB:
            raise UserError(
                f"--memory-gb {largest / 2**30:g} is more than {sheet.name} has, which is "
                f"at most {sheet.memory_gb:g}"
            )

    @cached_property  # a file is read once
    def data_sheet(self) -> DataSheet | None:
        """Data sheet of the GPU that `hardware` names; None if it names none."""
        if self.kinds or self.hardware is None:
            return None
        return find_data_sheet(self.hardware, "--hardware")

    def model_for(self, operator: OperatorOptions | None = None) -> CostModel:
        """Returns the cost model for the hardware; prints which one that is.

        A model by a data sheet prices `operator`, that of the tables. The store keeps the probe of
        this machine.
        """
        report = Reporter(cli.say, cli.notice)
        if (sheet := self.data_sheet) is not None:
            return model_of_sheet(sheet, operator, report)
        model = load_quietly(self.model_source)
        self._check_kind(model.kind)
        probe = None
        if self.hardware is not None:
            probe = load_probe(Path(self.hardware), model.kind)
        return model_of_machine(model, self.store, report, probe, self.probe)

    def models_for(self, operator: OperatorOptions | None = None) -> list[CostModel]:
        """Returns the cost model of each kind of hardware; see `model_for`.

        All-to-alls among devices of several kinds are by the slowest of their links.
        """
        if not self.kinds:
            return [self.model_for(operator)]
        found = [options.model_for(operator) for options, _ in self.kinds]
        common = set.intersection(*(set(model.links) for model in found))
        slowest = {
            ranks: slowest_of([model.links[ranks] for model in found], ranks) for ranks in common
        }
        return [replace(model, links=slowest) for model in found]

    def with_hardware(
        self, devices: Sequence[Device], models: Sequence[CostModel]
    ) -> tuple[Device, ...]:
        """Returns devices with the hardware of their kinds; UserError if their number differs."""
        if not self.kinds:
            return tuple(devices)
        of_kinds = [
            (Path(options.hardware or "").stem, model.provenance.hardware)
            for (options, count), model in zip(self.kinds, models, strict=True)
            for _ in range(count)
        ]
        if len(of_kinds) != len(devices):
            raise UserError(
                f"--hardware {self.hardware} names {len(of_kinds)} devices, and --num-devices "
                f"{len(devices)}: name as many"
            )
        return tuple(
            replace(device, name=f"{device.name} {name}", hardware=hardware)
            for device, (name, hardware) in zip(devices, of_kinds, strict=True)
        )

    def _check_kind(self, known: str) -> None:
        """Raises UserError if plans are for GPUs, and the cost model knows only CPUs."""
        gpus = self.devices == "cuda" or (
            self.devices == "auto" and self.hardware is None and gpu_is_here()
        )
        if known == "cpu" and gpus:
            raise UserError(
                "plans are for GPUs, and the cost model knows CPUs only: name the GPU with "
                f"--hardware ({', '.join(DATA_SHEETS)}), or a --cost-model trained on measurements "
                "of collect_costs.py --devices cuda; --devices cpu plans for CPUs"
            )


@dataclass(frozen=True, kw_only=True)
class PlanningOptions(MachineOptions, ObjectiveOptions):
    """Machine, objective and policy of commands that make plans."""

    policy: Path = Path("cpu")
    """Folder of a trained policy, or the name of a shipped one."""

    @property
    def model_source(self) -> Path | str:
        """Folder of the cost model, or the name of a shipped one."""
        return self.cost_model or cost_model_beside(self.policy)


def gpu_is_here() -> bool:
    """Returns whether this machine has an NVIDIA GPU that torch can use."""
    # Without its device file nothing else need be loaded.
    return any(Path("/dev").glob("nvidia[0-9]*")) and backend_of("cuda").is_here()


def check_measured_hardware(model: CostModel, hardware: str) -> None:
    """Raises UserError if plans by a data sheet would be measured or trained on other hardware."""
    sheet = model.data_sheet
    if sheet is not None and not sheet.is_of(hardware):
        raise UserError(
            f"plans for --hardware {sheet.name} would be measured on {hardware}: measure on a node "
            "with such GPUs, or leave out --hardware or what measures"
        )
