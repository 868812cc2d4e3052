"""Cost models of GPUs that nobody has measured, from their data sheets.

An operator moves bytes between the GPU's memory, its L2 cache and its multiprocessors, and sorts
lookups before the backward pass. Each term of work of the networks (`network.TERMS`) gets the price
that follows from bandwidths and from published measurements; the learned corrections are zero. The
members of the ensemble differ in what those sources leave open, so that intervals are as wide as
the knowledge is poor. Measured shards calibrate such a model like any other.

Sources, by pull request:

- pytorch/FBGEMM#3993: rows are gathered on an H100 at 2.77 of 3.35 TB/s.
- meta-pytorch/torchrec#4757: in workloads of production, FBGEMM's forward pass moves its bytes at
  65 %, the backward pass twice as many at 27 % of the memory's bandwidth (the GPU is not named).
- meta-pytorch/torchrec#2365: forward passes of 16 tables of 100,000 rows, at a batch of 131,072 and
  10 lookups: 0.59, 0.72, 1.29 and 2.73 ms for dims of 16, 32, 64 and 128. More bytes are looked up
  than memory could deliver: most come from the L2 cache (the GPU is not named, taken for an H100).

Small operators are bounded by launches; their time is a guess.
"""

from dataclasses import replace

import torch
from torch import Tensor

from autoshard.cost_model.models.model import CostModel, Provenance
from autoshard.cost_model.networks.compute import ComputeCostModel, ResidualPrior, Uncertainty
from autoshard.cost_model.networks.ensemble import Ensemble
from autoshard.cost_model.networks.network import (
    INPUTS,
    KINDS,
    TERMS,
    InputScale,
    NetworkShape,
    ShardNetwork,
)
from autoshard.cost_model.step.by_data_sheet import overhead_of_sheet
from autoshard.cost_model.step.drawn_figures import (
    L2_OVER_MEMORY,
    MEMBERS,
    REFERENCE_GB_S,
    SORT_NS,
    Figure,
    drawn,
)
from autoshard.workload import OperatorOptions
from autoshard.workload.data_sheets import DataSheet, data_sheet_of
from autoshard.workload.tables.operators import FLOAT_BYTES, INDEX_BYTES, WEIGHT_BYTES
from autoshard.workload.tasks.links import AnyLink

_SHAPE = NetworkShape(hidden=4, fusion=4, learned=1)
_BATCH_SIZES = (1, 2**20)
_MAX_RANKS = 512
_UNCERTAINTY = Uncertainty(scale=1.0, noise=0.15)
_PRIOR = ResidualPrior(own=0.15, shared=0.15, rest=0.1, rest_ms=0.02)
_NS, _US = 1e-6, 1e-3  # in ms


_FIGURES = {
    "memory_share": Figure(0.70, 0.12),  # of the bandwidth that random rows reach
    "l2_over_memory": L2_OVER_MEMORY,
    "lookup_ns": Figure(0.004, 0.5),  # of the forward pass, beside its bytes
    "bag_ns": Figure(0.005, 0.7),
    "sort_ns": SORT_NS,
    "forward_us": Figure(15.0, 0.5),  # start of the pass: the host launches ahead
    "backward_us": Figure(80.0, 0.5),  # a dozen kernels
}


def roofline_model(sheet: DataSheet, operator: OperatorOptions | None = None) -> CostModel:
    """Returns the cost model of a GPU by its data sheet.

    Args:
        sheet: The data sheet.
        operator: Weights and optimizer of the fused operator; by default the usual ones.
    """
    operator = operator or OperatorOptions()
    found = [_prices(sheet, operator, figures) for figures in drawn(_FIGURES, seed=0)]
    prices, starts = zip(*found, strict=True)
    scale = _scale()
    fresh = Ensemble.fresh(lambda: _without_corrections(scale), MEMBERS, seed=0)
    ensemble = fresh.with_weights(
        {
            **fresh.weights,
            "table.log_prices": torch.stack(prices).log(),
            "fusion.log_start": torch.stack(starts).log(),
        }
    )
    return CostModel(
        ComputeCostModel(_SHAPE, scale, ensemble, _UNCERTAINTY, _PRIOR),
        Provenance(sheet.hardware, "", operator, _BATCH_SIZES, num_shards=0),
        _links(sheet),
        data_sheet=sheet,
        overhead=overhead_of_sheet(sheet, operator),
    )


def with_data_sheet(model: CostModel) -> CostModel:
    """Returns a model of a measured GPU with what its data sheet tells of training and of links,
    where these were not measured; the same model if there is no data sheet.
    """
    sheet = data_sheet_of(model.provenance.hardware)
    if sheet is None:
        return model
    overhead = model.overhead or overhead_of_sheet(sheet, model.provenance.operator)
    return replace(model, overhead=overhead, links={**_links(sheet), **model.links})


def _links(sheet: DataSheet) -> dict[int, AnyLink]:
    return {ranks: sheet.link(ranks) for ranks in range(2, _MAX_RANKS + 1)}


def _prices(
    sheet: DataSheet, operator: OperatorOptions, figures: dict[str, float]
) -> tuple[Tensor, Tensor]:
    """Returns ms of each unit of work, [2, kinds x terms], and of the start of a pass, [2]."""
    memory = 1e3 / (sheet.memory_gb_s * 1e9 * figures["memory_share"])  # ms of a byte
    l2 = 1e3 / (sheet.memory_gb_s * 1e9 * figures["l2_over_memory"])
    slower = REFERENCE_GB_S / sheet.memory_gb_s
    share = WEIGHT_BYTES[operator.weights] / FLOAT_BYTES  # terms count bytes of fp32
    # Of the optimizer, for each element and for each row.
    elements = {"adagrad": 1.0}.get(operator.optimizer, 0.0)
    rows = {"rowwise_adagrad": FLOAT_BYTES}.get(operator.optimizer, 0)
    forward = {
        "samples": figures["bag_ns"] * _NS * slower,
        "output": FLOAT_BYTES * memory,
        "lookups": INDEX_BYTES * memory + figures["lookup_ns"] * _NS * slower,
        # Each row comes from memory once, and to each later lookup from the cache.
        "looked_up_bytes": share * l2,
        "touched_bytes": share * max(memory - l2, 0.0),
    }
    backward = {
        "samples": figures["bag_ns"] * _NS * slower,
        "output": FLOAT_BYTES * memory,
        "lookups": INDEX_BYTES * memory + figures["sort_ns"] * _NS * slower,
        "looked_up_bytes": l2,  # gradients of outputs, in fp32
        "touched_bytes": 2 * (share + elements) * memory,
        "distinct_rows": 2 * rows * memory,
    }
    prices = torch.tensor([[each.get(term, 0.0) for term in TERMS] for each in (forward, backward)])
    prices = prices.clamp_min(1e-15)
    weights = torch.full_like(prices, 1e-15)
    weights[:, list(TERMS).index("lookups")] = FLOAT_BYTES * memory
    both = {"one": prices, "several": prices, "weights": weights}
    start = torch.tensor([figures["forward_us"], figures["backward_us"]]) * _US
    return torch.cat([both[kind] for kind in KINDS], dim=1), start


def _scale() -> InputScale:
    """Returns a scale by which inputs stay as they are, and none is out of range."""
    ones = torch.ones(len(INPUTS))
    return InputScale(0 * ones, ones, -1e3 * ones, 1e3 * ones)


def _without_corrections(scale: InputScale) -> ShardNetwork:
    network = ShardNetwork(_SHAPE, scale)
    with torch.no_grad():
        for layers in (network.table.curved, network.fusion.factor):
            for weight in layers[-1].parameters():
                weight.zero_()
    return network
