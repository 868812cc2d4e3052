"""Measures all-to-alls on two nodes of two devices; prints predicted over measured times as JSON.

Links are fitted to other all-to-alls, those that `doctor.py` measures. Argument: address of Ray.
"""

import json
import logging
import sys
import tempfile
from pathlib import Path

import ray

from autoshard.benchmark import BenchmarkPool
from autoshard.cost_model.link_fit import exchange_ms, fit_links

_BATCH = 1024
_FITTED = (16, 64, 128, 256, 512)  # columns of each rank
_SHAPES = {  # columns of ranks inside one node, and on two
    "of 96 columns each": ((96, 96), (96, 96, 96, 96)),
    "of 384 columns each": ((384, 384), (384, 384, 384, 384)),
    "of 768 columns each": ((768, 768), (768, 768, 768, 768)),
    "with twice as many on one": ((128, 256), (128, 128, 256, 256)),
}


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
                key = pool.exchange(dims, _BATCH, nodes)
                measured_ms = (max(key.forward_ms) + max(key.backward_ms)) / 2
                predicted_ms = exchange_ms(dims, _BATCH, links[len(dims)])
                found[f"{place}, {label}"] = predicted_ms / measured_ms
        pool.close()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
