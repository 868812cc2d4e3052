"""Links (latency and bandwidth) fitted to measured all-to-alls, for search, training and reports.

Both are fitted to the slowest rank of all-to-alls with a device for each rank: ranks that share a
device say nothing about the network.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import scipy  # which loads its parts when they are used
import torch
from torch import Tensor

from autoshard.benchmark import Exchange
from autoshard.workload import Link, Objective
from autoshard.workload.arrays import Floats
from autoshard.workload.step_price import StepPrice

MIN_EXCHANGES = 5  # all-to-alls with a device for each rank
_FIFTHS = 5
_MS = 1e3
_IMBALANCES = (1.0, 1.5, 2.0, 3.0)  # columns of the first rank over those of each other


def fit_links(exchanges: Sequence[Exchange]) -> dict[int, Link]:
    """Returns a link for each number of ranks, from 2 up to the most that had a device each.

    Latency may grow with the number of ranks; bandwidth is the same for all. Nothing is returned
    where too few of the all-to-alls had a device for each rank, or more columns take no longer.
    """
    usable = _with_a_device_each(exchanges)
    if len(usable) < MIN_EXCHANGES:
        return {}
    terms = np.array([[1.0, e.key.ranks, _flow_ms(e.key.dims, e.key.batch_size)] for e in usable])
    base_ms, rank_ms, slope = _fit(terms, np.array([_slowest_ms(e) for e in usable]))
    max_ranks = max(e.key.ranks for e in usable)
    return _links({n: (base_ms + rank_ms * n, slope) for n in range(2, max_ranks + 1)})


def link_error(exchanges: Sequence[Exchange]) -> float | None:
    """Returns the median relative error on a fifth of all-to-alls by links fitted to the others.

    None where too few are left.
    """
    usable = _with_a_device_each(exchanges)
    links = fit_links([exchange for n, exchange in enumerate(usable) if n % _FIFTHS])
    errors = []
    for exchange in usable[::_FIFTHS]:
        link = links.get(exchange.key.ranks)
        if link is not None:
            flow_ms = _flow_ms(exchange.key.dims, exchange.key.batch_size, link)
            errors.append(abs((_MS * link.latency_s + flow_ms) / _slowest_ms(exchange) - 1))
    return float(np.median(errors)) if errors else None


def links_of_network(layers: Mapping[str, Tensor], scale: Tensor, devices: int) -> dict[int, Link]:
    """Returns links that approximate the all-to-all network of a model from before 0.2.0.

    The network predicted log milliseconds of a rank, forward and backward, from logarithms of what
    the rank and the busiest rank send and receive. Links are fitted to the slowest rank of even and
    uneven all-to-alls of as many columns as in the network's training data.

    Args:
        layers: Weights and biases of its two layers, each stacked by members.
        scale: Mean and deviation of each input, shape [2, inputs].
        devices: The largest number of ranks that had a device each.
    """
    found = {}
    centre, width = (float(row[4]) for row in scale)  # of the columns of all ranks, in samples
    for ranks in range(2, devices + 1):
        shares = np.array([[first] + [1.0] * (ranks - 1) for first in _IMBALANCES])
        shares /= shares.sum(1, keepdims=True)
        totals = np.exp([centre - width, centre, centre + width])
        own = (totals[:, None, None] * shares).reshape(-1, ranks)
        total, same = own.sum(1, keepdims=True), np.ones_like(own)
        sent, received = own * (ranks - 1) / ranks, (total - own) / ranks
        max_sent, max_received = (each.max(1, keepdims=True) * same for each in (sent, received))
        seen = (sent, received, max_sent, max_received, total * same, same * ranks, same)
        inputs = (torch.from_numpy(np.log1p(np.stack(seen, -1))).float() - scale[0]) / scale[1]
        hidden = torch.einsum("eri,mhi->merh", inputs, layers["layers.0.weight"])
        hidden = torch.nn.functional.silu(hidden + layers["layers.0.bias"][:, None, None])
        logs = torch.einsum("merh,moh->mero", hidden, layers["layers.2.weight"])
        times = (logs + layers["layers.2.bias"][:, None, None]).mean(0).exp().double().numpy()
        terms = np.stack([np.ones(len(own)), [_flow_ms(each, 1) for each in own]], -1)
        latency_ms, slope = _fit(terms, times.max(1).mean(-1))
        found[ranks] = (latency_ms, slope)
    return _links(found)


def _with_a_device_each(exchanges: Sequence[Exchange]) -> list[Exchange]:
    return [e for e in exchanges if 1 < e.key.ranks <= e.key.devices]


def _slowest_ms(exchange: Exchange) -> float:
    """Returns the time of the slowest rank, as the mean of both directions."""
    return (max(exchange.forward_ms) + max(exchange.backward_ms)) / 2


def _flow_ms(columns: Sequence[int] | Floats, batch_size: int, link: Link | None = None) -> float:
    """Returns the milliseconds of an all-to-all without latency; by default at 1 byte/s."""
    objective = Objective("step", Link(1.0 if link is None else link.bytes_s))
    dims = np.asarray(columns, dtype=float)
    price = StepPrice.of(objective, batch_size, len(dims), float(dims.sum()))
    return float(price.exchange_ms(dims).max())


def _fit(terms: Floats, measured_ms: Floats) -> Floats:
    """Returns non-negative weights of terms by least squares of relative errors."""
    weights, _ = scipy.optimize.nnls(terms / measured_ms[:, None], np.ones(len(terms)))
    return np.asarray(weights)


def _links(fits: Mapping[int, tuple[float, float]]) -> dict[int, Link]:
    """Returns links of latencies in ms and seconds per byte, rounded to three digits."""
    return {
        ranks: Link(float(f"{1 / slope:.3g}"), float(f"{latency_ms / _MS:.3g}"))
        for ranks, (latency_ms, slope) in fits.items()
        if slope > 0
    }
