"""`CommCostModel`: what each rank spends in the all-to-alls of a plan."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # which loads its parts when they are used
import torch
from torch import Tensor, nn

from autoshard.benchmark import Exchange
from autoshard.cost_model.ensemble import Ensemble
from autoshard.cost_model.training import (
    Curves,
    TrainOptions,
    fit,
    member_shares,
    relative_error,
    relative_loss,
)
from autoshard.workload import Link, Objective, UserError
from autoshard.workload.step_price import StepPrice

INPUTS = ("sent", "received", "most_sent", "most_received", "all", "ranks", "ranks_per_device")
_HIDDEN = 32
FEWEST_EXCHANGES = 20  # all-to-alls: with fewer nothing is learned
_FIFTHS = 5


@dataclass(frozen=True)
class ExchangeCosts:
    """Milliseconds of each rank in the forward and in the backward all-to-all."""

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]


class RankNetwork(nn.Module):
    """From what a rank sends and receives [..., inputs] to log milliseconds [..., 2]."""

    def __init__(self, mean: Tensor, deviation: Tensor, start: Tensor) -> None:
        super().__init__()
        self._mean, self._deviation = mean, deviation
        self.layers = nn.Sequential(
            nn.Linear(len(INPUTS), _HIDDEN), nn.SiLU(), nn.Linear(_HIDDEN, 2)
        )
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.bias.copy_(start)

    def forward(self, inputs: Tensor) -> Tensor:
        """Log milliseconds."""
        answer: Tensor = self.layers((inputs - self._mean) / self._deviation)
        return answer


class CommCostModel:
    """Prices the all-to-alls of any number of ranks from the columns that each computes.

    Ranks start together unless they are told to start apart: then nobody is through before the
    last has come, and the others wait for it.

    Args:
        ensemble: of `RankNetwork`s.
        scale: mean and deviation of each input, [2, inputs].
        devices: the most on which the ranks it learned from ran.
    """

    def __init__(self, ensemble: Ensemble, scale: Tensor, devices: int) -> None:
        self.ensemble = ensemble
        self.scale = scale
        self.devices = devices

    def devices_of(self, ranks: int) -> int:
        """On how many devices so many ranks would be measured."""
        return min(ranks, self.devices)

    def predict(
        self,
        dims: Sequence[int],
        batch_size: int,
        devices: int | None = None,
        starts_ms: Sequence[float] | None = None,
    ) -> ExchangeCosts:
        """What each rank spends when rank r computes `dims[r]` columns.

        Args:
            dims: columns of each rank.
            batch_size: samples in the whole batch.
            devices: on which the ranks run; by default as many as it knows, one for each rank.
            starts_ms: when each rank is ready for the forward all-to-all, and again, after its
                own gradients, for the backward one.
        """
        if len(dims) == 1:
            return ExchangeCosts((0.0,), (0.0,))
        inputs = rank_inputs(dims, batch_size, devices or self.devices_of(len(dims)))
        with torch.no_grad():
            costs = self.ensemble("", inputs).mean(0).exp().double().numpy()
        if starts_ms is not None:
            starts = np.asarray(starts_ms, dtype=float)
            costs = costs + (starts.max() - starts)[:, None]
        return ExchangeCosts(tuple(costs[:, 0].tolist()), tuple(costs[:, 1].tolist()))

    def link(self, ranks: int, batch_size: int) -> Link | None:
        """The link over which the slowest rank would take about as long, a device for each rank:
        for even and uneven spreads of as many columns as it has learned of. None if more columns
        take no longer.
        """
        mean, deviation = (float(row[INPUTS.index("all")]) for row in self.scale)
        most, slowest = [], []
        for columns in np.exp([mean - deviation, mean, mean + deviation]) / batch_size:
            for lead in (1.0, 1.5, 2.0, 3.0):  # of the first rank over the others
                shares = np.array([lead] + [1.0] * (ranks - 1))
                dims = np.maximum(1, np.round(columns * shares / shares.sum())).astype(int)
                found = self.predict(dims.tolist(), batch_size, ranks)
                most.append(float(dims.max()))
                slowest.append((max(found.forward_ms) + max(found.backward_ms)) / 2)
        # Relative errors count: else only the largest would.
        weights = 1 / np.array(slowest)
        lines = np.stack([weights, weights * np.array(most)], axis=1)
        (latency_ms, column_ms), _ = scipy.optimize.nnls(lines, np.ones(len(slowest)))
        if column_ms <= 0:
            return None
        one = float(StepPrice.of(Objective("step", Link(1.0)), batch_size, ranks, 0.0).column_ms())
        # It is near to them, no more: digits beyond would say nothing.
        return Link(_rounded(one / 2 / column_ms), _rounded(latency_ms / 1e3))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def rank_inputs(dims: Sequence[int], batch_size: int, devices: int) -> Tensor:
    """What the network sees of each rank: [ranks, inputs], logarithms of numbers and counts."""
    ranks, own = len(dims), np.asarray(dims, dtype=float)
    others = (ranks - 1) / ranks
    sent = own * batch_size * others
    received = (own.sum() - own) * batch_size / ranks
    same = np.ones(ranks)
    columns = [
        sent,
        received,
        same * sent.max(),
        same * received.max(),
        same * own.sum() * batch_size,
        same * ranks,
        same * ranks / devices,
    ]
    return torch.from_numpy(np.log1p(np.stack(columns, axis=1))).float()


def train_communication(
    exchanges: Sequence[Exchange], options: TrainOptions, seed: int
) -> tuple[CommCostModel, Curves]:
    """The model that learned from measured all-to-alls; a fifth of them stops it, a fifth tests."""
    if len(exchanges) < FEWEST_EXCHANGES:
        raise UserError(
            f"{len(exchanges)} all-to-alls are too few to learn from, {FEWEST_EXCHANGES} are "
            "needed: collect_costs.py --num-exchanges measures them"
        )
    held_out = [exchange for n, exchange in enumerate(exchanges) if n % _FIFTHS == 1]
    learned = [exchange for n, exchange in enumerate(exchanges) if n % _FIFTHS > 1]
    (inputs, costs), (other_inputs, other_costs) = _tensors(learned), _tensors(held_out)
    scale = torch.stack([inputs.mean(0), inputs.std(0).clamp_min(0.05)])
    start = costs.mean(0)
    fresh = Ensemble.fresh(lambda: RankNetwork(scale[0], scale[1], start), options.members, seed)
    shares = member_shares(len(inputs), options.members, seed)
    ensemble, curves = fit(
        fresh,
        lambda learner: relative_loss(learner("", inputs), costs, shares),
        lambda learner: relative_error(learner("", other_inputs), other_costs),
        options,
    )
    most_devices = max(exchange.key.devices for exchange in exchanges)
    return CommCostModel(ensemble, scale, most_devices), curves


def held_out_of(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Those that neither teach a model nor stop it."""
    return [exchange for n, exchange in enumerate(exchanges) if n % _FIFTHS == 0]


def communication_error(model: CommCostModel, exchanges: Sequence[Exchange]) -> float:
    """Median relative error of the slowest rank's forward and backward together."""
    errors = []
    for exchange in exchanges:
        key = exchange.key
        found = model.predict(key.dims, key.batch_size, key.devices)
        promised = max(map(sum, zip(found.forward_ms, found.backward_ms, strict=True)))
        measured = max(map(sum, zip(exchange.forward_ms, exchange.backward_ms, strict=True)))
        errors.append(abs(promised / measured - 1))
    return float(np.median(errors))


def _tensors(exchanges: Sequence[Exchange]) -> tuple[Tensor, Tensor]:
    inputs = [rank_inputs(e.key.dims, e.key.batch_size, e.key.devices) for e in exchanges]
    costs = [np.stack([e.forward_ms, e.backward_ms], axis=1) for e in exchanges]
    return torch.cat(inputs), torch.from_numpy(np.log(np.concatenate(costs))).float()
