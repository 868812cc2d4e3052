"""Measures collectives on two nodes of two devices; prints predicted over measured times as JSON.

Links are fitted to other all-to-alls, those that `doctor.py` measures. Argument: address of Ray.
"""

import json
import logging
import sys
import tempfile
from pathlib import Path

import ray

from autoshard.benchmark import BenchmarkPool
from autoshard.benchmark.measurement import MeasuredCollective
from autoshard.cost_model.link_fit import fit_links, over_price

_BATCH = 1024
_FITTED = (16, 64, 128, 256, 512)  # columns of each rank
_SHAPES = {  # columns of ranks inside one node, and on two
    "of 96 columns each": ((96, 96), (96, 96, 96, 96)),
    "of 384 columns each": ((384, 384), (384, 384, 384, 384)),
    "of 768 columns each": ((768, 768), (768, 768, 768, 768)),
    "with twice as many on one": ((128, 256), (128, 128, 256, 256)),
}
_OTHERS: tuple[MeasuredCollective, ...] = ("reduce_scatter", "all_reduce")
_COLUMNS = (96, 192, 384, 768)  # of each rank in these


def main(address: str) -> None:
    """Fits links, measures the shapes, and compares."""
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        pool = BenchmarkPool(Path(folder) / "costs.db")
        fitted = [
            pool.exchange((columns,) * ranks, _BATCH, nodes)
            for nodes, ranks in ((1, 2), (2, 4))
            for columns in _FITTED
        ]
        links, found = fit_links(fitted), {}
        for label, both in _SHAPES.items():
            for place, nodes, dims in zip(
                ("inside a node", "on two nodes"), (1, 2), both, strict=True
            ):
                took = pool.exchange(dims, _BATCH, nodes)
                found[f"all-to-all {place}, {label}"] = 1 / over_price(took, links[len(dims)])
        for collective in _OTHERS:
            for place, nodes, ranks in (("inside a node", 1, 2), ("on two nodes", 2, 4)):
                for columns in _COLUMNS:
                    took = pool.exchange((columns,) * ranks, _BATCH, nodes, collective)
                    what = took.key.what.partition(" ")[2]
                    label = f"{what} {place}, of {columns} columns"
                    found[label] = 1 / over_price(took, links[ranks])
        pool.close()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
