"""Links (latency and bandwidth) fitted to measured all-to-alls, for search, training and reports.

Both are fitted to the slowest rank of all-to-alls with a device for each rank: ranks that share a
device say nothing about the network.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import scipy  # which loads its parts when they are used

from autoshard.benchmark import Exchange
from autoshard.workload import Link, Objective
from autoshard.workload.arrays import Floats
from autoshard.workload.step_price import StepPrice

MIN_EXCHANGES = 5  # all-to-alls with a device for each rank
_FIFTHS = 5
_MS = 1e3


def fit_links(exchanges: Sequence[Exchange]) -> dict[int, Link]:
    """Returns a link for each number of ranks, from 2 up to the most that had a device each.

    Latency may grow with the number of ranks; bandwidth is the same for all. Nothing is returned
    where too few of the all-to-alls had a device for each rank, or more columns take no longer.
    """
    usable = _with_a_device_each(exchanges)
    if len(usable) < MIN_EXCHANGES:
        return {}
    terms = np.array([[1.0, e.key.ranks, flow_ms(e.key.dims, e.key.batch_size)] for e in usable])
    base_ms, rank_ms, slope = fit_terms(terms, np.array([_slowest_ms(e) for e in usable]))
    max_ranks = max(e.key.ranks for e in usable)
    return links_of_fits({n: (base_ms + rank_ms * n, slope) for n in range(2, max_ranks + 1)})


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
            predicted_ms = _MS * link.latency_s
            predicted_ms += flow_ms(exchange.key.dims, exchange.key.batch_size, link)
            errors.append(abs(predicted_ms / _slowest_ms(exchange) - 1))
    return float(np.median(errors)) if errors else None


def _with_a_device_each(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Returns usable all-to-alls: inside one node, or among several, of which there are more."""
    usable = [e for e in exchanges if 1 < e.key.ranks <= e.key.devices]
    among = [e for e in usable if e.key.nodes]
    inside = [e for e in usable if not e.key.nodes]
    return max(inside, among, key=len)


def _slowest_ms(exchange: Exchange) -> float:
    """Returns the time of the slowest rank, as the mean of both directions."""
    return (max(exchange.forward_ms) + max(exchange.backward_ms)) / 2


def flow_ms(columns: Sequence[int] | Floats, batch_size: int, link: Link | None = None) -> float:
    """Returns the milliseconds of an all-to-all without latency; by default at 1 byte/s."""
    objective = Objective("operators", Link(1.0 if link is None else link.bytes_s))
    dims = np.asarray(columns, dtype=float)
    price = StepPrice.of(objective, batch_size, len(dims), float(dims.sum()))
    return float(price.exchange_ms(dims).max())


def fit_terms(terms: Floats, measured_ms: Floats, whole_ms: Floats | None = None) -> Floats:
    """Returns non-negative weights of terms by least squares of relative errors.

    Args:
        terms: Amounts, [measurements, terms].
        measured_ms: What they took, [measurements].
        whole_ms: What errors are relative to. Default: what was measured.
    """
    whole_ms = measured_ms if whole_ms is None else whole_ms
    weights, _ = scipy.optimize.nnls(terms / whole_ms[:, None], measured_ms / whole_ms)
    return np.asarray(weights)


def links_of_fits(fits: Mapping[int, tuple[float, float]]) -> dict[int, Link]:
    """Returns links of latencies in ms and seconds per byte, rounded to three digits."""
    return {
        ranks: Link(float(f"{1 / slope:.3g}"), float(f"{latency_ms / _MS:.3g}"))
        for ranks, (latency_ms, slope) in fits.items()
        if slope > 0
    }
