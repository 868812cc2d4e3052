"""How good a model is on tables it has never seen, and how much better than simpler beliefs."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from autoshard.cost_model.compute import ComputeCostModel
from autoshard.cost_model.dataset import CostDataset
from autoshard.cost_model.inputs import sums_of_devices
from autoshard.cost_model.oracle import EstimatedCosts
from autoshard.cost_model.scenarios import Pricing
from autoshard.cost_model.training import one_thread
from autoshard.workload import Piece, Shard
from autoshard.workload.cost_proxies import COST_PROXIES

Floats = npt.NDArray[np.float64]

_STARTS_TRIED, _MIN_MS = 200, 1e-3
_TIMED_SECONDS, _TIMED_DEVICES = 0.5, 8
_SIZES = (1, 2, 4, 8, 16, 32)  # numbers of tables at which groups of shards begin


@dataclass(frozen=True)
class Score:
    """Of predictions against measurements. Errors are relative."""

    median_error: float
    mean_error: float
    kendall_tau: float

    @staticmethod
    def of(predicted: Floats, measured: Floats) -> "Score":
        """The score of totals in milliseconds."""
        from scipy import stats  # slow to load, and only needed here

        errors = np.abs(predicted / measured - 1)
        tau = stats.kendalltau(predicted, measured).statistic
        return Score(float(np.median(errors)), float(errors.mean()), float(tau))


@dataclass(frozen=True)
class Evaluation:
    """A model on test shards: `predicted_ms` against `measured_ms`, and against simpler beliefs.

    `additive_ms` is the sum of what the model says that each slice costs alone. `widths` are how
    many half widths of its 90 % interval each measurement lies away. `noise_floor` is the median
    difference of two visits, `noise` the median error of the costs that the model is held against.
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
        """The model's own median error, without what measurements err by; None if that is not
        known.
        """
        return None if self.noise is None else net_of_noise(self.score.median_error, self.noise)

    @property
    def coverage_90(self) -> float:
        """Share of shards within their 90 % interval."""
        return float((self.widths <= 1).mean())

    def by_size(self) -> list[tuple[str, int, float, float]]:
        """Of each group of shards: numbers of tables, shards, the model's error, the sum's."""
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
        """The median error, and which part of it is the model's own."""
        error = f"{self.score.median_error:.1%}"
        if self.net_error is None:
            return f"{error} (how much of it is noise is not known)"
        return f"{error}: model {self.net_error:.1%}, noise {self.noise:.1%}"

    def lines(self) -> list[tuple[str, str]]:
        """Returns the figures for people: names and texts, by number of tables at the end."""
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
        """The figures, by the names under which they are published."""
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
    """What is left of a median error against costs that err by `noise` themselves, in the median.

    A model and what it is held against err independently, so their variances add up: the square
    root of the difference of squares. Medians stand for deviations, to which they are proportional
    as far as errors are distributed alike: one cost that is far off does not decide. 0 if noise
    explains all.
    """
    return math.sqrt(max(0.0, median_error**2 - noise**2))


def evaluate(model: ComputeCostModel, training: CostDataset, test: CostDataset) -> Evaluation:
    """The model on `test`. Simpler beliefs have no unit: theirs is fitted on `training`."""
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
    """The sum of what each slice of a shard costs in an operator of its own."""
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
    """What each table's cost alone must have too much in it for their sum to fit best."""

    def error(start_ms: float) -> float:
        missed = _less_starts(additive, data, start_ms) / data.totals_ms - 1
        return float(np.median(np.abs(missed)))

    candidates = np.linspace(0, 2 * additive.min(), _STARTS_TRIED)
    return float(min(candidates, key=error))


def _less_starts(additive: Floats, data: CostDataset, start_ms: float) -> Floats:
    """The sum of tables alone, with the cost of starting an operator in it only once."""
    others = np.array([len(shard) - 1 for shard in data.shards])
    return np.maximum(additive - others * start_ms, _MIN_MS)


def _proxy_cost(shards: tuple[Shard, ...], proxy: Callable[[Piece], float]) -> Floats:
    return np.array([sum(map(proxy, shard.pieces)) for shard in shards], dtype=float)


def evaluations_per_second(oracle: EstimatedCosts, pieces: Sequence[Piece]) -> float:
    """How many times a second "this device plus that table" is priced on one core."""
    return placements_per_second(oracle.model.compute, oracle.amounts(pieces))


def placements_per_second(pricing: ComputeCostModel | Pricing, amounts: Tensor) -> float:
    """The same for items with such amounts, by whatever prices them."""
    with one_thread():
        homes = np.arange(len(amounts)) % _TIMED_DEVICES
        sums = sums_of_devices(amounts, homes, _TIMED_DEVICES)
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < _TIMED_SECONDS:
            pricing.price(sums.float() + amounts[:, None])
            count += len(homes) * _TIMED_DEVICES
        return count / (time.perf_counter() - started)
