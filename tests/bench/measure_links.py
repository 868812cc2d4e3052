"""Measures collectives on two nodes of two devices; prints predicted over measured times, and the
options of the fitted links, as JSON.

Links are fitted to other sizes, those that `doctor.py` measures. All are measured in several
passes, so that a minute in which the machine is slower counts for all alike. Argument: address of
Ray.
"""

import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import ray

from autoshard.benchmark import BenchmarkPool, Exchange
from autoshard.benchmark.measurement import ExchangeKey, MeasuredCollective
from autoshard.cost_model.learning.links import exchange_ms, fit_links
from autoshard.experiments.collecting.collection import measure_equal
from autoshard.workload.tasks.links import AnyLink, all_reduce_ms

_BATCH = 1024
_COLLECTIVES: tuple[MeasuredCollective, ...] = ("all_to_all", "reduce_scatter", "all_reduce")
_COLUMNS = (96, 192, 384, 768)  # of each rank
_TWICE = (128, 128, 256, 256)
_PASSES = 3


def main(address: str) -> None:
    """Fits links, measures the shapes, and compares."""
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    passes = [_measured() for _ in range(_PASSES)]
    fitted, shapes = ([_median_of(same) for same in zip(*part, strict=True)]
                      for part in zip(*passes, strict=True))  # fmt: skip
    links = fit_links(fitted)
    found = dict(each for e in shapes for each in _prices_over_measured(e, links[e.key.ranks]))
    sys.stdout.write(json.dumps({"ratios": found, "options": links[max(links)].options}))


def _measured() -> tuple[list[Exchange], list[Exchange]]:
    """Returns the collectives to fit links to, and those to compare with their price."""
    with tempfile.TemporaryDirectory() as folder:
        pool = BenchmarkPool(Path(folder) / "costs.db")
        uneven = [pool.exchange(_TWICE[1:3], _BATCH, 1), pool.exchange(_TWICE, _BATCH, 2)]
        # Now all devices are there.
        fitted = measure_equal(pool, _BATCH)
        equal = measure_equal(pool, _BATCH, dict.fromkeys(_COLLECTIVES, _COLUMNS))
        pool.close()
    return fitted, [*equal, *uneven]


def _prices_over_measured(exchange: Exchange, link: AnyLink) -> Iterator[tuple[str, float]]:
    """Yields collectives, and their price over what they took.

    All-to-alls are those of both directions together. The gradient of a reduce-scatter is an
    all-gather.
    """
    key, where = exchange.key, _where(exchange.key)
    forward_ms, backward_ms = max(exchange.forward_ms), max(exchange.backward_ms)
    if key.collective == "all_reduce":
        price_ms = all_reduce_ms(link, key.ranks, key.reduced_bytes, starts=1)
        yield f"all-reduce {where}", price_ms / (forward_ms + backward_ms)
    elif key.collective == "all_to_all":
        price_ms = 2 * exchange_ms(key.dims, key.batch_size, link)
        yield f"all-to-all {where}", price_ms / (forward_ms + backward_ms)
    else:
        price_ms = exchange_ms(key.dims, key.batch_size, link.ring(key.ranks))
        yield f"reduce-scatter {where}", price_ms / forward_ms
        yield f"all-gather {where}", price_ms / backward_ms


def _median_of(same: Sequence[Exchange]) -> Exchange:
    """Returns a collective with the median times of several passes."""
    forward, backward = (
        tuple(map(statistics.median, zip(*times, strict=True)))
        for times in ([e.forward_ms for e in same], [e.backward_ms for e in same])
    )
    return replace(same[0], forward_ms=forward, backward_ms=backward)


def _where(key: ExchangeKey) -> str:
    where = "on two nodes" if key.nodes else "inside a node"
    columns = f"of {key.dims[0]} columns each"
    return f"{where}, {columns if len(set(key.dims)) == 1 else 'with twice as many on one'}"


if __name__ == "__main__":
    main(sys.argv[1])
