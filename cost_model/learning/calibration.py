"""Few-shot calibration of a cost model to another machine, batch size or type of weights.

A model that knows several machines keeps its networks: effects of this machine are fitted (see
`machines`). One that does not is changed where machines differ most, in the prices of work and the
fusion layers, with a penalty on their distance from the original weights.
"""

from dataclasses import replace

import torch

from autoshard.cost_model.learning.compute_training import Examples, with_fitted_uncertainty
from autoshard.cost_model.learning.machine_fitting import fitted_to
from autoshard.cost_model.learning.training import TrainOptions, fit, relative_error, relative_loss
from autoshard.cost_model.models.model import CostModel, Provenance
from autoshard.cost_model.networks.compute import ComputeCostModel
from autoshard.cost_model.networks.dataset import CostDataset, DataError
from autoshard.cost_model.networks.ensemble import Ensemble

MAX_CALIBRATION_SHARDS = 50
MIN_CALIBRATION_SHARDS = 10
_FOLDS = 5
_LEARNED = ("table.log_prices", "fusion.")
_PENALTY = 1e-3  # times the squared distance from the original weights
_OPTIONS = TrainOptions(steps=200, learning_rate=0.03, weight_decay=0.0, patience=200)


def calibrate(model: CostModel, data: CostDataset, extend_range: bool = True) -> CostModel:
    """Returns the model adapted to the operator, hardware and batch size of a few measured shards.

    Uncertainty is fitted by five-fold cross-validation; on other hardware it is that on machines
    left out of training, if that is larger. Links are dropped if the hardware differs,
    but for those of the data sheet of this GPU.

    Args:
        model: Model to adapt.
        data: At least `MIN_CALIBRATION_SHARDS` shards.
        extend_range: Whether tables like those of `data` count as in-distribution from then on.
    """
    if len(data) < MIN_CALIBRATION_SHARDS:
        raise DataError(
            f"{len(data)} shards are too few to calibrate with: measure {MIN_CALIBRATION_SHARDS}"
        )
    numbers = range(len(data))
    trials = []
    for fold in range(_FOLDS):
        kept = data.subset([n for n in numbers if n % _FOLDS != fold])
        held_out = data.subset([n for n in numbers if n % _FOLDS == fold])
        trials.append((adapted(model, kept, extend_range), held_out))
    compute = with_fitted_uncertainty(trials, adapted(model, data, extend_range))
    same = data.hardware == model.provenance.hardware
    if model.machines is not None and not same:
        # These shards are of one family of tables; on others, networks err as on other machines.
        known = (compute.uncertainty, model.machines.mean.uncertainty)
        compute = replace(compute, uncertainty=max(known, key=lambda each: each.noise))
    sheet = model.data_sheet
    links = model.links if same or (sheet and sheet.is_of(data.hardware)) else {}
    here = data.hardware, data.reference_level
    overheads = model.overheads if same else model.overheads_at(*here)
    return replace(
        model,
        compute=compute,
        provenance=Provenance.of(data),
        links=links,
        overheads=overheads,
        probe=None,
        data_sheet=None,
    )


def adapted(model: CostModel, data: CostDataset, extend_range: bool = True) -> ComputeCostModel:
    """Returns the networks that are fitted to these shards."""
    examples = Examples.of(data)
    base = model.compute if model.machines is None else model.machines.mean
    if extend_range:
        base = base.with_input_range(examples.inputs)
    return _with_prices(base, examples) if model.machines is None else fitted_to(base, examples)


def _with_prices(model: ComputeCostModel, examples: Examples) -> ComputeCostModel:
    """Returns the model with prices and fusion fitted to these shards."""
    before = {name: weight.clone() for name, weight in model.ensemble.weights.items()}

    def loss(learner: Ensemble) -> torch.Tensor:
        moved = sum(
            (weight - before[name]).square().sum()
            for name, weight in learner.weights.items()
            if weight.requires_grad
        )
        shares = examples.weights.expand(learner.members, -1)
        fitted = relative_loss(examples.log_predictions(learner), examples.log_costs, shares)
        return fitted + _PENALTY * moved

    def error(learner: Ensemble) -> float:
        return relative_error(examples.log_predictions(learner), examples.log_costs)

    ensemble, _ = fit(model.ensemble, loss, error, _OPTIONS, only=_LEARNED)
    return replace(model, ensemble=ensemble)
