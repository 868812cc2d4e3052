"""Links (latency and bandwidth) fitted to measured collectives, for search, training and reports.

Both are fitted to the slowest rank of all-to-alls with a device for each rank: ranks that share a
device say nothing about the network. Those of rings are fitted to all-reduces.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import scipy  # which loads its parts when they are used

from autoshard.benchmark import Exchange
from autoshard.benchmark.measurement import ExchangeKey, MeasuredCollective
from autoshard.workload import Link, Network, Objective
from autoshard.workload.arrays import Floats
from autoshard.workload.plans.step_price import StepPrice
from autoshard.workload.tables.operators import FLOAT_BYTES
from autoshard.workload.tasks.links import AnyLink, all_reduce_ms

MIN_EXCHANGES = 5  # all-to-alls with a device for each rank
_MIN_ALL_REDUCES = 3
_FIFTHS = 5
_MS = 1e3


class _Line(NamedTuple):
    """Milliseconds of collectives: latency, which may grow with the ranks, and what flows.

    Args:
        base_ms: Latency without ranks.
        rank_ms: Latency of each rank.
        slope: Milliseconds for each millisecond at 1 byte/s.
        error: Root of the mean squared relative error.
        max_ranks: The most ranks that it was fitted to.
    """

    base_ms: float
    rank_ms: float
    slope: float
    error: float
    max_ranks: int

    @staticmethod
    def of(
        exchanges: Sequence[Exchange],
        flow: Callable[[ExchangeKey], float],
        took_ms: Callable[[Exchange], float],
        least: int,
    ) -> "_Line | None":
        """Fits a line; None if there are fewer than the least."""
        if len(exchanges) < least:
            return None
        terms = np.array([[1.0, e.key.ranks, flow(e.key)] for e in exchanges])
        if len(set(terms[:, 1])) == 1:  # which says nothing of others
            terms[:, 1] = 0.0
        measured_ms = np.array([took_ms(e) for e in exchanges])
        weights = fit_terms(terms, measured_ms)
        error = float(np.sqrt(np.square(terms @ weights / measured_ms - 1).mean()))
        base_ms, rank_ms, slope = weights.tolist()
        return _Line(base_ms, rank_ms, slope, error, max(e.key.ranks for e in exchanges))

    def links(self, ranks: Iterable[int]) -> dict[int, Link]:
        """Returns a link for each number of ranks; none where more columns take no longer."""
        if self.slope <= 0:
            return {}
        bytes_s = float(f"{1 / self.slope:.3g}")
        latencies_ms = {n: self.base_ms + self.rank_ms * n for n in ranks}
        return {n: Link(bytes_s, float(f"{ms / _MS:.3g}")) for n, ms in latencies_ms.items()}


def fit_links(exchanges: Sequence[Exchange]) -> dict[int, AnyLink]:
    """Returns a link for each number of ranks, from 2 up to the most that had a device each.

    All-to-alls give latency and bandwidth, and all-reduces those of rings.

    Ranks that fill several nodes get a network of two levels, or a link between nodes with one
    device each. Latency may grow with the number of ranks; bandwidth is the same for all. Nothing
    is returned where too few of the all-to-alls had a device for each rank, or more columns take no
    longer.
    """
    usable, all_reduces = _usable(exchanges, "all_to_all"), _usable(exchanges, "all_reduce")
    found: dict[int, AnyLink] = {}
    inside = _all_to_all_line([e for e in usable if not e.key.nodes], _flow)
    if inside is not None:
        rings = _ring_links([e for e in all_reduces if not e.key.nodes])
        for ranks, link in inside.links(range(2, inside.max_ranks + 1)).items():
            found[ranks] = link.with_rings(rings[ranks], ranks) if ranks in rings else link
    sizes = Counter(size for e in usable if (size := e.key.devices_per_node))
    if not sizes:
        return found
    node = max(sizes, key=lambda size: (size > 1, sizes[size]))
    among = [e for e in usable if e.key.devices_per_node == node]
    # Devices of a node have a network card each, or share one.
    flows = [partial(_between_flow, shared=shared) for shared in (False, True)]
    lines = [line for flow in flows if (line := _all_to_all_line(among, flow)) is not None]
    if not lines:
        return found
    between = min(lines, key=lambda line: line.error)
    found = {ranks: link for ranks, link in found.items() if ranks <= node}
    rings = _ring_links([e for e in all_reduces if e.key.devices_per_node == node])
    for ranks, plain in between.links(range(2 * node, between.max_ranks + 1, node)).items():
        network: AnyLink = plain
        if node > 1:
            if not isinstance(within := found.get(node), Link):
                continue
            network = Network(within, plain, node)
        found[ranks] = network.with_rings(rings[ranks], ranks) if ranks in rings else network
    return found


def link_error(exchanges: Sequence[Exchange]) -> float | None:
    """Returns the median relative error on a fifth of all-to-alls by links fitted to the others.

    None where too few are left.
    """
    usable = _usable(exchanges, "all_to_all")
    links = fit_links([exchange for n, exchange in enumerate(usable) if n % _FIFTHS])
    errors = [
        abs(exchange_ms(e.key.dims, e.key.batch_size, link) / _slowest_ms(e) - 1)
        for e in usable[::_FIFTHS]
        if (link := links.get(e.key.ranks)) is not None
    ]
    return float(np.median(errors)) if errors else None


def _usable(exchanges: Sequence[Exchange], collective: MeasuredCollective) -> list[Exchange]:
    """Returns the collectives of this kind with a device for each rank."""
    keys = [(exchange, exchange.key) for exchange in exchanges]
    return [e for e, key in keys if key.collective == collective and 1 < key.ranks <= key.devices]


def _all_to_all_line(
    exchanges: Sequence[Exchange], flow: Callable[[ExchangeKey], float]
) -> _Line | None:
    """Returns the line of these all-to-alls; None if they are too few."""
    return _Line.of(exchanges, flow, _slowest_ms, MIN_EXCHANGES)


def _ring_links(exchanges: Sequence[Exchange]) -> dict[int, Link]:
    """Returns the links fitted to these all-reduces, for each number of ranks up to the most.

    Empty where they are too few, or take as long with more columns.
    """
    line = _Line.of(exchanges, _reduced_flow, lambda e: max(e.backward_ms), _MIN_ALL_REDUCES)
    return {} if line is None else line.links(range(2, line.max_ranks + 1))


def _reduced_flow(key: ExchangeKey) -> float:
    """Returns the milliseconds of an all-reduce at 1 byte/s."""
    return all_reduce_ms(Link(1.0), key.ranks, key.reduced_bytes)


def _slowest_ms(exchange: Exchange) -> float:
    """Returns the time of the slowest rank, as the mean of both directions."""
    return (max(exchange.forward_ms) + max(exchange.backward_ms)) / 2


def _flow(key: ExchangeKey) -> float:
    """Returns the milliseconds of an all-to-all at 1 byte/s, without latency."""
    return exchange_ms(key.dims, key.batch_size, Link(1.0))


def _between_flow(key: ExchangeKey, shared: bool) -> float:
    """Returns the milliseconds at 1 byte/s of what a device, or its share of a node, sends to other
    nodes.
    """
    node = key.devices_per_node or key.ranks
    dims = np.array(key.dims, float).reshape(-1, node)
    columns = dims.mean(1).max() if shared else dims.max()
    to_others = key.batch_size * (key.ranks - node) / key.ranks
    return float(_MS * FLOAT_BYTES * columns * to_others)


def exchange_ms(dims: Sequence[int] | Floats, batch_size: int, link: AnyLink) -> float:
    """Returns the milliseconds of an all-to-all, in either direction.

    Args:
        dims: Columns of each rank.
        batch_size: Samples of the batch of all ranks.
        link: Link or network between them.
    """
    columns = np.asarray(dims, dtype=float)
    objective = Objective("operators", link)
    price = StepPrice.of(objective, batch_size, len(columns), float(columns.sum()))
    return float(price.exchange_ms(columns).max())


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
