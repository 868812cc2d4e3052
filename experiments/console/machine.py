"""The machine that plans are for: the one whose probe is named, else this one."""

import warnings
from dataclasses import dataclass
from pathlib import Path

from autoshard.benchmark.backends import fingerprint_here
from autoshard.benchmark.probe import MachineProbe, ProbeError, load_probe
from autoshard.cost_model import CostModel, OtherHardware, load_model
from autoshard.experiments.console import cli
from autoshard.workload import UserError


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The machine that plans are for; options of commands inherit it."""

    hardware: Path | None = None
    """File of a probe, which probe.py writes on the machine that will train. Default: this machine,
    which is probed if the cost model was not trained on it."""
    probe: bool = True
    """Probe this machine if the cost model was not trained on it (5 s, kept in --store). Without,
    the cost model is used as it is: for the machine that it was trained on."""

    def check_machine(self) -> None:
        """Raises UserError for options that exclude each other."""
        if self.hardware is not None and not self.probe:
            raise UserError("--hardware names a probe, and --no-probe uses none: leave one out")

    def model_for(self, source: Path | str, store: Path) -> CostModel:
        """Returns a saved cost model for the machine; prints which machine that is.

        Args:
            source: Folder of a cost model, or the name of a shipped one.
            store: File of measurements that keeps the probe of this machine.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OtherHardware)
            model = load_model(source)
        origin = model.provenance.hardware
        probe = None
        if self.hardware is not None:
            probe = load_probe(self.hardware, origin.partition(":")[0])
        here = fingerprint_here(origin) if probe is None else probe.hardware
        found = None
        if probe is not None or self.probe:
            found = _on(model, here, probe, store)
        if found is None:
            if (mismatch := model.hardware_mismatch(here)) is not None:
                warnings.warn(mismatch, OtherHardware, stacklevel=2)
            return model
        if found is not model or probe is not None:
            cli.say(_line(found))
        return found


def _on(
    model: CostModel, hardware: str, probe: MachineProbe | None, store: Path
) -> CostModel | None:
    """Returns the model for a machine; None if it knows no other, or no probe can be run."""
    known = model.on_hardware(hardware)
    if known is not None or model.machines is None:
        return known
    from autoshard.cost_model.probed_machine import on_machine  # loads what reads Parquet files

    probe = probe or _probe_of_this_machine(store, hardware)
    return None if probe is None else on_machine(model, probe)


def _probe_of_this_machine(store: Path, hardware: str) -> MachineProbe | None:
    from autoshard.benchmark.probing import probe_here  # loads fbgemm
    from autoshard.cost_model.probed_machine import kept_probe

    try:
        return kept_probe(store, hardware, probe_here)
    except ProbeError as error:
        cli.note(f"{error}; plans are made without a probe")
        return None


def _line(model: CostModel) -> str:
    """Returns which machine a plan is for, the nearest one of the training data, and the error."""
    hardware, machines = model.provenance.hardware, model.machines
    if model.probe is None or machines is None:
        return f"planned for {hardware}, on which the cost model was trained"
    nearest, distance = machines.nearest(model.compute)
    uncertainty, shards = model.compute.uncertainty, len(model.probe.shards)
    return (
        f"planned for {hardware} by {shards} shards of its probe; the nearest of "
        f"{len(machines.trained_on)} machines of the training data is {nearest.hardware}, at "
        f"{distance:.2f} of a usual distance; costs deviate by {uncertainty.noise:.0%}, 90% of "
        f"them by less than {uncertainty.noise * uncertainty.width_90:.0%}"
    )
