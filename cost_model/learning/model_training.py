"""Trains a cost model on measurements, or calibrates one with a few of them."""

import warnings
from pathlib import Path

from autoshard.cost_model.learning.calibration import MAX_CALIBRATION_SHARDS, calibrate
from autoshard.cost_model.learning.calibration_design import most_informative
from autoshard.cost_model.learning.compute_training import train_compute
from autoshard.cost_model.learning.evaluation import Evaluation, evaluate
from autoshard.cost_model.learning.links import fit_links
from autoshard.cost_model.learning.training import Curves, Progress, TrainOptions
from autoshard.cost_model.models.checkpoint import OtherHardware, load_model
from autoshard.cost_model.models.model import CostModel, Provenance
from autoshard.cost_model.networks.dataset import MIN_SHARDS, CostDataset, split
from autoshard.cost_model.roofline import roofline_model, with_data_sheet
from autoshard.workload import UserError
from autoshard.workload.data_sheets import DATA_SHEETS


def train_model(
    data: CostDataset, options: TrainOptions, seed: int, step: Progress = lambda: None
) -> tuple[CostModel, Curves]:
    """Trains a cost model on a dataset's parts `train` and `validation`.

    Links are fitted where there are enough all-to-alls. A known GPU's data sheet tells the others,
    and what training takes beside operators.

    Args:
        data: Measurements.
        options: Hyperparameters.
        seed: Seed of initial weights and of all sampling.
        step: Called after each step of training.

    Returns:
        The model, and the learning curves of its compute model.
    """
    parts = split(data)
    compute, curves = train_compute(parts["train"], parts["validation"], options, seed, step)
    model = CostModel(compute, Provenance.of(data), fit_links(data.exchanges))
    return with_data_sheet(model), curves


def calibrate_model(
    source: Path, data: CostDataset
) -> tuple[CostModel, int, tuple[Evaluation, Evaluation] | None]:
    """Calibrates a saved model, or that of a GPU by its data sheet, with some measured shards.

    These are at most `MAX_CALIBRATION_SHARDS` of the part `train`.

    If the model knows several machines, these are the most informative ones about another.

    Returns:
        The model, the number of shards, and evaluations before and after on the dataset's test
        tables; None if there are too few of them.
    """
    before = _to_be_calibrated(source, data)
    parts = split(data, must_be_full=False)
    few = _to_calibrate_with(before, parts["train"])
    model = calibrate(before, few)
    if len(parts["test"]) < MIN_SHARDS:
        return model, len(few), None
    old, new = (evaluate(each.compute, few, parts["test"]) for each in (before, model))
    return model, len(few), (old, new)


def _to_be_calibrated(source: Path, data: CostDataset) -> CostModel:
    sheet = DATA_SHEETS.get(str(source))
    if sheet is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OtherHardware)  # which is why it is calibrated
            model = load_model(source)
        if model.kind != data.hardware.partition(":")[0]:
            raise UserError(
                f"{source} is a model of {model.provenance.hardware}, and the shards were measured "
                f"on {data.hardware}: give shards of a {model.kind} device"
            )
        return model
    if not sheet.is_of(data.hardware):
        known = next((name for name, each in DATA_SHEETS.items() if each.is_of(data.hardware)), "")
        raise UserError(
            f"{source} is the data sheet of {sheet.name}, and the shards were measured on "
            f"{data.hardware}: give shards of such a GPU"
            + (f", or calibrate {known}" if known else "")
        )
    return roofline_model(sheet, data.operator)


def _to_calibrate_with(model: CostModel, data: CostDataset) -> CostDataset:
    count = min(MAX_CALIBRATION_SHARDS, len(data))
    if model.machines is None:
        return data.subset(range(count))
    return data.subset(most_informative(model.machines.mean, data, data, count))
