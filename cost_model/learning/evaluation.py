"""Evaluates a cost model on unseen tables, and compares it with simpler cost proxies."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from autoshard.cost_model.networks.compute import ComputeCostModel
from autoshard.cost_model.networks.dataset import CostDataset
from autoshard.cost_model.networks.inputs import sums_of_devices
from autoshard.cost_model.pricing.oracle import EstimatedCosts
from autoshard.cost_model.threads import one_thread
from autoshard.cost_model.uncertainty.scenarios import Pricing
from autoshard.workload import Piece, Shard
from autoshard.workload.access.features import COST_PROXIES
from autoshard.workload.arrays import Floats

_STARTS_TRIED, _MIN_MS = 200, 1e-3
_TIMED_SECONDS, _TIMED_DEVICES = 0.5, 8
_SIZES = (1, 2, 4, 8, 16, 32)  # numbers of tables at which groups of shards begin


@dataclass(frozen=True)
class Score:
    """Accuracy of predictions against measurements. Errors are relative."""

    median_error: float
    mean_error: float
    kendall_tau: float

    @staticmethod
    def of(predicted: Floats, measured: Floats) -> "Score":
        """Returns the score of totals in milliseconds."""
        from scipy import stats  # slow to load, and only needed here

        errors = np.abs(predicted / measured - 1)
        tau = stats.kendalltau(predicted, measured).statistic
        return Score(float(np.median(errors)), float(errors.mean()), float(tau))


@dataclass(frozen=True)
class Evaluation:
    """The result of a model on test shards.

    Attributes:
        sizes: Number of tables of each shard.
        measured_ms: Measured totals.
        predicted_ms: Predicted totals.
        additive_ms: Sum of the model's predictions for each piece alone.
        widths: Distance of each measurement, in half widths of its 90 % interval.
        score: Accuracy of the model.
        baselines: Accuracy of simpler cost proxies.
        noise_floor: Median difference of two measurements of a shard.
        noise: Median error of the measured totals.
    """

    sizes: npt.NDArray[np.int64]
    measured_ms: Floats
    predicted_ms: Floats
    additive_ms: Floats
    widths: Floats
    score: Score
    baselines: dict[str, Score]
    noise_floor: float | None
    noise: float | None

    @property
    def net_error(self) -> float | None:
        """The model's own median error, without that of measurements; None if unknown."""
        return None if self.noise is None else net_of_noise(self.score.median_error, self.noise)

    @property
    def coverage_90(self) -> float:
        """Share of shards within their 90 % interval."""
        return float((self.widths <= 1).mean())

    def by_size(self) -> list[tuple[str, int, float, float]]:
        """Returns tables, number of shards, errors of model and additive sum of each group."""
        groups = []
        for first, after in zip(_SIZES, (*_SIZES[1:], np.inf), strict=True):
            chosen = (self.sizes >= first) & (self.sizes < after)
            if chosen.any():
                last = self.sizes[chosen].max() if after == np.inf else after - 1
                errors = [
                    float(np.median(np.abs(values[chosen] / self.measured_ms[chosen] - 1)))
                    for values in (self.predicted_ms, self.additive_ms)
                ]
                name = f"{first}" if first == last else f"{first}-{last:g}"
                groups.append((name, int(chosen.sum()), errors[0], errors[1]))
        return groups

    @property
    def error_text(self) -> str:
        """The median error, and the part of it that is the model's own."""
        error = f"{self.score.median_error:.1%}"
        if self.net_error is None:
            return f"{error} (how much of it is noise is not known)"
        return f"{error}: model {self.net_error:.1%}, noise {self.noise:.1%}"

    def lines(self) -> list[tuple[str, str]]:
        """Returns names and texts of the metrics for reports, by number of tables at the end."""
        additive = self.baselines["additive"].kendall_tau
        tau = f"{self.score.kendall_tau:.3f} (sum of tables alone {additive:.3f})"
        return [
            ("median error", self.error_text),
            ("Kendall tau", tau),
            ("90 % interval", f"holds {self.coverage_90:.1%}"),
            *(
                (f"{name} tables", f"error {own:.1%}, of the sum {summed:.1%} ({count} shards)")
                for name, count, own, summed in self.by_size()
            ),
        ]

    def to_json(self) -> dict[str, Any]:
        """Returns the metrics by their published names."""
        return {
            "num_test": len(self.sizes),
            "test_mape": {"median": self.score.median_error, "mean": self.score.mean_error},
            "test_mape_net": self.net_error,
            "noise_mape": self.noise,
            "test_kendall_tau": self.score.kendall_tau,
            "noise_floor_mape": self.noise_floor,
            "coverage_90": self.coverage_90,
            "baselines": {
                name: {"kendall_tau": score.kendall_tau, "mape": score.median_error}
                for name, score in self.baselines.items()
            },
            "by_number_of_tables": [
                {"tables": name, "shards": count, "mape": own, "additive_mape": additive}
                for name, count, own, additive in self.by_size()
            ],
        }


def net_of_noise(median_error: float, noise: float) -> float:
    """Removes noise from a median error against costs whose own median error is `noise`.

    Both errors are independent, so variances add up: the result is the square root of the
    difference of squares, at least 0. Medians stand for deviations, because outliers do not affect
    them.
    """
    return math.sqrt(max(0.0, median_error**2 - noise**2))


def evaluate(model: ComputeCostModel, training: CostDataset, test: CostDataset) -> Evaluation:
    """Evaluates the model on `test`. Baselines have no unit; it is fitted on `training`."""
    measured = test.totals_ms
    prices = model.predict(test.shards, test.batch_sizes)
    predicted = prices.total_ms.double().numpy()
    half_widths = prices.deviation.double().numpy() * model.uncertainty.width_90
    additive = additive_ms(model, test)
    start_ms = _start_ms(additive_ms(model, training), training)
    baselines = {
        "additive": Score.of(additive, measured),
        "additive_less_starts": Score.of(_less_starts(additive, test, start_ms), measured),
    }
    for name, proxy in COST_PROXIES.items():
        unit = np.median(training.totals_ms / _proxy_cost(training.shards, proxy))
        baselines[name] = Score.of(unit * _proxy_cost(test.shards, proxy), measured)
    return Evaluation(
        sizes=np.array([len(shard) for shard in test.shards]),
        measured_ms=measured,
        predicted_ms=predicted,
        additive_ms=additive,
        widths=np.abs(np.log(measured / predicted)) / half_widths,
        score=Score.of(predicted, measured),
        baselines=baselines,
        noise_floor=test.noise_floor(),
        noise=test.noise(),
    )


def additive_ms(model: ComputeCostModel, data: CostDataset) -> Floats:
    """Returns the sum of each shard's pieces, each priced in an operator of its own."""
    pieces = {
        (piece.digest, batch_size): piece
        for shard, batch_size in zip(data.shards, data.batch_sizes, strict=True)
        for piece in shard.pieces
    }
    alone = model.predict(
        [Shard((piece,)) for piece in pieces.values()], [batch for _, batch in pieces]
    ).total_ms.tolist()
    cost = dict(zip(pieces, alone, strict=True))
    return np.array(
        [
            sum(cost[piece.digest, batch_size] for piece in shard.pieces)
            for shard, batch_size in zip(data.shards, data.batch_sizes, strict=True)
        ]
    )


def _start_ms(additive: Floats, data: CostDataset) -> float:
    """Returns the start time to subtract from each table alone so that their sum fits best."""

    def error(start_ms: float) -> float:
        missed = _less_starts(additive, data, start_ms) / data.totals_ms - 1
        return float(np.median(np.abs(missed)))

    candidates = np.linspace(0, 2 * additive.min(), _STARTS_TRIED)
    return float(min(candidates, key=error))


def _less_starts(additive: Floats, data: CostDataset, start_ms: float) -> Floats:
    """Returns the sum of tables alone, with the start of an operator counted once."""
    others = np.array([len(shard) - 1 for shard in data.shards])
    return np.maximum(additive - others * start_ms, _MIN_MS)


def _proxy_cost(shards: tuple[Shard, ...], proxy: Callable[[Piece], float]) -> Floats:
    return np.array([sum(map(proxy, shard.pieces)) for shard in shards], dtype=float)


def evaluations_per_second(oracle: EstimatedCosts, pieces: Sequence[Piece]) -> float:
    """Returns how often one core prices "this device plus that piece" in a second."""
    return placements_per_second(oracle.model.compute, oracle.amounts(pieces))


def placements_per_second(pricing: ComputeCostModel | Pricing, amounts: Tensor) -> float:
    """Returns the same for items with these amounts, by any pricing."""
    with one_thread():
        homes = np.arange(len(amounts)) % _TIMED_DEVICES
        sums = sums_of_devices(amounts, homes, _TIMED_DEVICES)
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < _TIMED_SECONDS:
            pricing.price(sums.float() + amounts[:, None])
            count += len(homes) * _TIMED_DEVICES
        return count / (time.perf_counter() - started)
