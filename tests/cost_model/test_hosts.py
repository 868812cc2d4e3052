"""The costs of other machines that the repository holds, and their probes."""

from pathlib import Path

import pytest

import autoshard.cost_model
from autoshard.benchmark.store.parquet import read_parquet_probes
from autoshard.cost_model.networks.dataset import read_costs, split

HOSTS = Path(autoshard.cost_model.__file__).parent / "hosts"
FILES = sorted(HOSTS.glob("*.parquet"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_host_has_costs_to_learn_from(path: Path) -> None:
    data = read_costs([path])  # of one kind of hardware
    assert f"`{path.stem}`" in (HOSTS / "README.md").read_text()
    assert min(map(len, split(data).values())) >= 100
    assert {probe.hardware for probe in read_parquet_probes(path)} <= {data.hardware}


def test_hosts_measured_the_same_shards() -> None:
    first, *others = ({shard.digest for shard in read_costs([path]).shards} for path in FILES)
    assert others
    for other in others:
        assert len(first & other) > 0.9 * len(first)
