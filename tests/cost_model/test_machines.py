"""Networks of several machines: what they know of one that was left out."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from formula import HARDWARE, REFERENCE_LEVEL, VERSIONS, measurement
from safetensors.torch import load_file, save_file
from scipy.stats import kendalltau

from autoshard.benchmark import MachineProbe, ReferenceLevel
from autoshard.benchmark.probe.report import (
    OperatorPrices,
    Passes,
    ProbedShard,
    ProbeError,
    UpdateTime,
)
from autoshard.benchmark.probe.shards import PROBE_SHARDS
from autoshard.cost_model import CostDataset, CostModel, EstimatedCosts, load_model, save_model
from autoshard.cost_model.learning import calibration, machine_fitting
from autoshard.cost_model.learning.calibration import MIN_CALIBRATION_SHARDS, calibrate
from autoshard.cost_model.learning.calibration_design import most_informative
from autoshard.cost_model.learning.compute_training import Examples
from autoshard.cost_model.learning.machine_fitting import fitted_to
from autoshard.cost_model.learning.machine_training import (
    LeftOut,
    inferred_update_ns,
    train_and_leave_out,
)
from autoshard.cost_model.learning.probed_machine import kept_probe, on_machine
from autoshard.cost_model.learning.training import TrainOptions
from autoshard.cost_model.models.machines import Machines
from autoshard.cost_model.networks.compute import ComputeCostModel
from autoshard.cost_model.networks.inputs import piece_inputs
from autoshard.cost_model.networks.network import INPUTS
from autoshard.workload import EmbeddingTable, Objective, Shard, UserError, random_shards

# Machines: what lookups cost there over what the formula says, and the update of a distinct row.
PACES = {"cpu: slow": 2.0, "cpu: usual": 1.0, "cpu: fast": 0.6}
UPDATE_NS = {"cpu: slow": 500.0, "cpu: usual": 20.0, "cpu: fast": 20.0}
_DISTINCT = INPUTS.index("log_distinct_rows")


def costs_ms(shard: Shard, batch_size: int, machine: str) -> tuple[float, float]:
    timing = measurement(shard, batch_size, dearer=lambda table: PACES[machine]).timing
    assert timing is not None
    rows = piece_inputs(shard.pieces, batch_size)[:, _DISTINCT].double().expm1().sum().item()
    return timing.forward_ms, timing.backward_ms + rows * UPDATE_NS[machine] * 1e-6


def machine_data(shards: list[Shard], machine: str) -> CostDataset:
    data = CostDataset.of(measurement(shard) for shard in shards)
    costs = np.array([costs_ms(shard, 1024, machine) for shard in data.shards])
    return replace(data, costs_ms=costs, hardware=machine)


@pytest.fixture(scope="module")
def machines_data(many_tables: tuple[EmbeddingTable, ...]) -> list[CostDataset]:
    shards = random_shards(many_tables, 300, 12, seed=5, augment=True)
    return [machine_data(shards, machine) for machine in PACES]


@pytest.fixture(scope="module")
def trained(machines_data: list[CostDataset]) -> tuple[Machines, list[LeftOut]]:
    return train_and_leave_out(machines_data, TrainOptions(members=2, steps=120), seed=0)


@pytest.fixture(scope="module")
def knowing(model: CostModel, trained: tuple[Machines, list[LeftOut]]) -> CostModel:
    """A model of the formula's machine that knows three more."""
    return replace(model, machines=trained[0])


def errors(model: ComputeCostModel, data: CostDataset) -> np.ndarray:
    prices = model.predict(data.shards, data.batch_sizes)
    return np.asarray(np.log(data.totals_ms / prices.total_ms.double().numpy()))


def probe_of(machine: str, shards: int = len(PROBE_SHARDS)) -> MachineProbe:
    found = [
        ProbedShard(name, Passes(*costs_ms(of.shard, of.batch_size, machine)))
        for name, of in list(PROBE_SHARDS.items())[:shards]
    ]
    updates = (UpdateTime("rowwise_adagrad", 16, UPDATE_NS[machine]),)
    return MachineProbe(
        f"{machine}er", VERSIONS, reference_level=ReferenceLevel(1.0, 1.0),
        operator=OperatorPrices(updates=updates), shards=tuple(found),
    )  # fmt: skip


def test_what_an_update_takes_is_seen_in_shards(machines_data: list[CostDataset]) -> None:
    found = [float(inferred_update_ns(Examples.of(data))[0]) for data in machines_data]
    assert found[0] > 300
    assert max(found[1:]) < found[0] / 3


def test_each_machine_has_effects_of_its_own(
    machines_data: list[CostDataset], trained: tuple[Machines, list[LeftOut]]
) -> None:
    machines, _ = trained
    assert [each.hardware for each in machines.trained_on] == list(PACES)
    assert machines.trained_on[0].reference_level == REFERENCE_LEVEL
    for number, data in enumerate(machines_data):
        own = errors(machines.of(number), data)
        assert abs(np.median(own)) < 0.1
        assert own.std() < 0.2
        other = machines_data[(number + 1) % len(machines_data)]
        assert abs(np.median(errors(machines.of(number), other))) > abs(np.median(own))
    assert machines.find("cpu: unheard of") is None
    nearest, distance = machines.nearest(machines.of(1))
    assert (nearest.hardware, distance) == ("cpu: usual", pytest.approx(0, abs=1e-6))


def test_a_machine_left_out_is_known_by_a_few_shards(
    trained: tuple[Machines, list[LeftOut]],
) -> None:
    machines, left_out = trained
    assert [each.hardware for each in left_out] == list(PACES)
    for each in left_out:
        figures = each.figures()
        assert 0.75 < figures["measured_over_predicted"] < 1.33
        assert figures["kendall_tau"] > 0.85
        assert f"Kendall tau {figures['kendall_tau']:.3f}" in each.text()
    # What they miss there is what users of another machine are told to expect.
    missed = np.abs(np.concatenate([errors(each.model, each.data) for each in left_out]))
    uncertainty = machines.mean.uncertainty
    assert uncertainty.noise * uncertainty.width_90 > np.quantile(missed, 0.75)


def test_a_probe_puts_a_model_on_its_machine(
    knowing: CostModel, many_tables: tuple[EmbeddingTable, ...]
) -> None:
    shards = random_shards(many_tables, 60, 12, seed=77)
    for machine in PACES:
        data = machine_data(shards, machine)
        probe = probe_of(machine)
        found = on_machine(knowing, probe)
        missed = errors(found.compute, data)
        assert abs(np.median(missed)) < 0.25
        assert kendalltau(data.totals_ms, np.exp(missed) / data.totals_ms).statistic < -0.8
        assert found.provenance.hardware == probe.hardware
        assert found.provenance.reference_level == probe.reference_level
        assert found.probe == probe
        assert not found.overheads
    # Too few shards: the mean machine, with the probe's time of an update.
    little = on_machine(knowing, probe_of("cpu: slow", shards=2)).compute
    mean = machines_of(knowing).mean
    slow = machine_data(shards, "cpu: slow")
    assert np.median(errors(little, slow)) < np.median(errors(mean, slow))


def test_what_training_takes_on_a_machine_follows_its_reference(
    knowing: CostModel,
    model: CostModel,
    many_tables: tuple[EmbeddingTable, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for fits in (calibration, machine_fitting):  # on which nothing here depends
        monkeypatch.setattr(fits, "_OPTIONS", replace(fits._OPTIONS, steps=1))
    overhead = load_model("cpu").overhead
    assert overhead is not None
    assert overhead.reference_level is not None
    training = replace(knowing, overhead=overhead)
    probe = probe_of("cpu: slow")
    expected = overhead.at_level(probe.reference_level)
    found = on_machine(training, probe)
    step = found.for_objective(Objective("step"))
    assert step.counted_overhead == expected != overhead
    save_model(found, tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert on_machine(again, probe).overheads == found.overheads
    # That of others stays as it is, and what was measured does, too.
    elsewhere = found.on_hardware("cpu: fast")
    assert elsewhere is not None
    assert elsewhere.for_objective(Objective("step")).counted_overhead == overhead
    measured = replace(training, overheads={probe.hardware: overhead})
    assert on_machine(measured, probe).overheads == measured.overheads
    # Shards of another machine say as much as its probe.
    shards = random_shards(many_tables, MIN_CALIBRATION_SHARDS, 12, seed=7)
    data = replace(
        replace(machine_data(shards, "cpu: slow"), hardware="cpu: new"),
        reference_level=replace(REFERENCE_LEVEL, forward_ms=7.0),
    )
    assert calibrate(training, data).overheads == {
        "cpu: new": overhead.at_level(data.reference_level)
    }
    assert not calibrate(
        replace(model, overhead=overhead), replace(data, hardware=HARDWARE)
    ).overheads


def machines_of(model: CostModel) -> Machines:
    assert model.machines is not None
    return model.machines


def test_known_machines_need_no_fit(knowing: CostModel, model: CostModel) -> None:
    at_home = replace(probe_of("cpu: slow"), hardware=HARDWARE)
    assert on_machine(knowing, at_home) is knowing
    taught = on_machine(knowing, replace(probe_of("cpu: slow"), hardware="cpu: slow"))
    assert taught.provenance.hardware == "cpu: slow"
    assert taught.provenance.reference_level == REFERENCE_LEVEL
    assert taught.probe is None
    assert knowing.on_hardware("cpu: unheard of") is None
    assert on_machine(model, probe_of("cpu: slow")) is model  # which knows no machines


def test_a_probe_is_run_once_and_kept(tmp_path: Path) -> None:
    store, probe = tmp_path / "costs.db", probe_of("cpu: slow")
    assert kept_probe(store, probe.hardware, lambda: probe) == probe

    def fails() -> MachineProbe:
        raise ProbeError("run again")

    assert kept_probe(store, probe.hardware, fails) == probe
    with pytest.raises(ProbeError, match="run again"):
        kept_probe(store, "cpu: other", fails)


def test_calibration_keeps_the_networks(
    knowing: CostModel,
    many_tables: tuple[EmbeddingTable, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibration, "_FOLDS", 2)  # which are for the uncertainty
    shards = random_shards(many_tables, 80, 12, seed=78)
    data = machine_data(shards, "cpu: slow")
    found = calibrate(knowing, data.subset(range(30)))
    assert abs(np.median(errors(found.compute, data.subset(range(30, 80))))) < 0.1
    assert found.machines is knowing.machines
    assert found.provenance.hardware == "cpu: slow"
    networks = machines_of(knowing).mean.ensemble.weights["table.curved.0.weight"]
    assert found.compute.ensemble.weights["table.curved.0.weight"].equal(networks)


def test_shards_that_tell_most_tell_more_than_others(
    trained: tuple[Machines, list[LeftOut]], many_tables: tuple[EmbeddingTable, ...]
) -> None:
    shards = random_shards(many_tables, 200, 12, seed=79, augment=True)
    data = machine_data(shards, "cpu: slow")
    mean = trained[1][0].model  # of the others, and a few shards
    candidates, target = data.subset(range(100)), data.subset(range(100, 200))
    chosen = most_informative(mean, candidates, target, 6)
    assert len(set(chosen)) == 6
    rng = np.random.default_rng(0)

    def missed(numbers: list[int]) -> float:
        few = Examples.of(candidates.subset(numbers))
        return float(np.abs(errors(fitted_to(trained[0].mean, few), target)).mean())

    at_random = [missed(rng.choice(100, 6, replace=False).tolist()) for _ in range(5)]
    assert missed(chosen) < np.mean(at_random)


def test_machines_come_back_from_a_folder(
    tmp_path: Path, knowing: CostModel, many_tables: tuple[EmbeddingTable, ...]
) -> None:
    on_slow = on_machine(knowing, probe_of("cpu: slow"))
    save_model(on_slow, tmp_path / "model")
    back = load_model(tmp_path / "model", on_slow.provenance.hardware)
    assert machines_of(back).trained_on == machines_of(knowing).trained_on
    assert machines_of(back).mean.uncertainty == machines_of(knowing).mean.uncertainty
    shards = random_shards(many_tables, 10, 8)
    for one, other in (
        (on_slow.compute, back.compute),
        (machines_of(on_slow).of(0), machines_of(back).of(0)),
    ):
        costs = [m.predict(shards, [1024] * 10).total_ms.numpy() for m in (one, other)]
        np.testing.assert_allclose(*costs, rtol=1e-4)
    assert EstimatedCosts(back, 1024).costs(shards)[0].total_ms > 0
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["machines.effects.table.tilts"]
    save_file(weights, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UserError, match="damaged: effects of machines differ"):
        load_model(tmp_path / "model", HARDWARE)
