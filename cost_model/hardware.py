"""Cost models of the hardware that plans are for: this machine, a probed one, a GPU by name."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autoshard.benchmark.backends import fingerprint_here
from autoshard.benchmark.probe.report import PROBE_SECONDS, MachineProbe, ProbeError
from autoshard.cost_model.models.checkpoint import OtherHardware, load_model
from autoshard.cost_model.models.model import CostModel
from autoshard.workload import OperatorOptions, UserError
from autoshard.workload.data_sheets import DATA_SHEETS, DataSheet, read_data_sheet

_MAX_PROBE_SECONDS = 10.0  # after which plans are made without

Say = Callable[[str], None]


@dataclass(frozen=True)
class Reporter:
    """Where a choice of hardware is reported.

    Args:
        result: Takes a line on the model that was chosen.
        notice: Takes a line on what takes time, or is missing.
    """

    result: Say
    notice: Say


def find_data_sheet(hardware: str, option: str = "hardware") -> DataSheet | None:
    """Returns the data sheet of a GPU; None for the file of a probe.

    Args:
        hardware: One of `DATA_SHEETS`, NAME=FILE of a data sheet, or the file of a probe.
        option: What users call it.

    Raises:
        UserError: It is none of these.
    """
    name, _, file = hardware.partition("=")
    if file:
        return read_data_sheet(name, Path(file))
    if name not in DATA_SHEETS and not Path(name).is_file():
        raise UserError(
            f"{option} {name} is no file, and none of the GPUs {', '.join(DATA_SHEETS)}: "
            "name one of these, or NAME=FILE of a data sheet"
        )
    return DATA_SHEETS.get(name)


def model_of_sheet(
    sheet: DataSheet, operator: OperatorOptions | None, report: Reporter
) -> CostModel:
    """Returns the cost model of a GPU by its data sheet, and says what that is worth."""
    from autoshard.cost_model.roofline import roofline_model

    if sheet.guesses_host:
        report.notice(
            f"the data sheet of {sheet.name} has no host_gb_s: for tables in host memory, "
            f"{sheet.host_gb_s:g} GB/s between a GPU and the host are assumed, as of PCIe 4"
        )
    report.result(
        f"planned for {sheet.name} by its data sheet and by published measurements, none of this "
        "package: --measure corrects the costs on a node with such GPUs"
    )
    return roofline_model(sheet, operator)


def for_tables(model: CostModel, operator: OperatorOptions, report: Reporter) -> CostModel:
    """Returns a model for tables of an operator; says so if it was not trained on such tables."""
    known = model.provenance.operator
    if known != operator:
        report.result(
            f"costs are known of {known}, and these tables are {operator}: costs are taken to be "
            "alike, and are less certain (collect_costs.py --weights, --optimizer measures such)"
        )
    return model.for_operator(operator)


def load_quietly(source: Path | str) -> CostModel:
    """Returns a cost model without a warning if it was trained on other hardware."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherHardware)
        return load_model(source)


def model_of_machine(
    model: CostModel, store: Path, report: Reporter, probe: MachineProbe | None, may_probe: bool
) -> CostModel:
    """Returns a cost model for a machine; OtherHardware is issued if that is not possible.

    Args:
        model: Cost model, which may have been trained on other machines.
        store: File that keeps the probe of this machine.
        report: Takes which machine that is, and what is done meanwhile.
        probe: Probe of the machine; None: this one.
        may_probe: Whether this machine may be probed if the model was not trained on it.
    """
    here = fingerprint_here(model.provenance.hardware) if probe is None else probe.hardware
    found = None
    if probe is not None or may_probe:
        found = _on(model, here, probe, store, report)
    if found is None:
        if (mismatch := model.hardware_mismatch(here)) is not None:
            warnings.warn(mismatch, OtherHardware, stacklevel=2)
        return model
    if found is not model or probe is not None:
        report.result(_line(found))
    return found


def _on(
    model: CostModel, hardware: str, probe: MachineProbe | None, store: Path, report: Reporter
) -> CostModel | None:
    """Returns the model for a machine; None if it knows no other, or no probe can be run."""
    known = model.on_hardware(hardware)
    if known is not None or model.machines is None:
        return known
    from autoshard.cost_model.learning.probed_machine import (
        on_machine,  # loads what reads Parquet files
    )

    probe = probe or _probe_of_this_machine(store, hardware, report)
    return None if probe is None else on_machine(model, probe)


def _probe_of_this_machine(store: Path, hardware: str, report: Reporter) -> MachineProbe | None:
    """Returns the probe of this machine; None, with a note, where none can be run."""
    from autoshard.benchmark.operator.fbgemm import InstallationError
    from autoshard.cost_model.learning.probed_machine import kept_probe

    def probed() -> MachineProbe:
        report.notice(
            f"this machine is probed, which takes {PROBE_SECONDS:.0f} s; {store} keeps it"
        )
        from autoshard.benchmark.probe.probing import CLAIM_SECONDS, probe_here  # loads fbgemm

        def waiting(held: str) -> None:
            report.notice(
                f"the probe waits: {held}; after {CLAIM_SECONDS:.0f} s, plans are made without "
                "it, as by --no-probe"
            )

        return probe_here(max_seconds=_MAX_PROBE_SECONDS, waiting=waiting)

    try:
        return kept_probe(store, hardware, probed)
    except (ProbeError, InstallationError) as error:  # planning does without FBGEMM
        report.notice(
            f"{error}; plans are made without a probe, as by --no-probe (probe.py FILE makes one "
            "for --hardware FILE)"
        )
        return None


def _line(model: CostModel) -> str:
    """Returns which machine a plan is for, the nearest one of the training data, and the error."""
    hardware, machines = model.provenance.hardware, model.machines
    if model.probe is None or machines is None:
        return f"planned for {hardware}, on which the cost model was trained"
    nearest, distance = machines.nearest(model.compute)
    uncertainty, shards = model.compute.uncertainty, len(model.probe.shards)
    return (
        f"planned for {hardware} by {shards} shards of its probe; of the "
        f"{len(machines.trained_on)} machines that the cost model was trained on, it is most like "
        f"{nearest.hardware} (their costs differ {distance:.2f} times as much as those of two "
        f"machines on average); costs deviate by {uncertainty.noise:.0%}, 90% of them by less than "
        f"{uncertainty.noise * uncertainty.width_90:.0%}"
    )
