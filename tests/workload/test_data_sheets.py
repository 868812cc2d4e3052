"""Data sheets of GPUs: those that are known, and a user's own."""

import json
from pathlib import Path
from typing import Any

import pytest

from autoshard.workload import Link, Network, UserError
from autoshard.workload.data_sheets import DATA_SHEETS, data_sheet_of, read_data_sheet

FIGURES = {
    "memory_gb": 96,
    "memory_gb_s": 4000,
    "link_gb_s": 450,
    "network_gb_s": 25,
    "gpus_per_node": 4,
}


def written(folder: Path, **changes: Any) -> Path:
    document = {"schema": "autoshard.data_sheet", "version": 1, **FIGURES, **changes}
    found = {name: value for name, value in document.items() if value is not None}
    (folder / "sheet.json").write_text(json.dumps(found))
    return folder / "sheet.json"


def test_hardware_is_known_by_the_name_that_torch_gives_it() -> None:
    h100, h200 = DATA_SHEETS["h100-80gb"], DATA_SHEETS["h200-141gb"]
    assert data_sheet_of("cuda: NVIDIA H100 80GB HBM3 sm90, 79 GiB") is h100
    assert data_sheet_of("cuda: NVIDIA H200 sm90, 140 GiB") is h200
    assert data_sheet_of(h200.hardware) is h200
    a_slice = "cuda: NVIDIA H100 80GB HBM3 MIG 1g.10gb sm90, 10 GiB"  # of one that is shared
    for other in ("cuda: NVIDIA H200 NVL sm90, 140 GiB", a_slice, "cpu: NVIDIA H200 sm90", "cuda"):
        assert data_sheet_of(other) is None


def test_ranks_of_several_nodes_are_linked_by_the_network(tmp_path: Path) -> None:
    own = read_data_sheet("GPU of 96 GB", written(tmp_path))
    assert own.name == "GPU of 96 GB"
    links = [own.link(ranks) for ranks in (2, 4, 6, 8)]
    assert [link.bytes_s / 1e9 for link in links[:3] if isinstance(link, Link)] == [450, 450, 25]
    assert links[3] == Network(Link(450e9, 20e-6), Link(25e9, 20e-6), 4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"memory_gb_s": None}, r"sheet\.json: the data sheet has no field 'memory_gb_s'"),
        ({"link_gb_s": 0}, r"sheet\.json: link_gb_s must be a number more than 0, got 0"),
        ({"link_gb_s": "fast"}, r"sheet\.json: link_gb_s must be a number more than 0"),
        ({"schema": "another"}, r'is not a document of schema "autoshard\.data_sheet"'),
    ],
)
def test_a_faulty_file_ends_in_one_line(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_data_sheet("GPU", written(tmp_path, **changes))
