"""Data sheets of GPUs: those that are known, and a user's own."""

import json
from pathlib import Path
from typing import Any

import pytest

from autoshard.cost_model.hardware import Reporter, model_of_sheet
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
    shares = [450 * 0.75, 450 * 0.75, 25 * 0.9]  # that NCCL reaches
    assert [link.bytes_s / 1e9 for link in links[:3] if isinstance(link, Link)] == shares
    nodes = links[3]
    assert isinstance(nodes, Network)
    assert nodes == Network(links[1], nodes.between, 4)
    assert nodes.between.bytes_s == 22.5e9
    assert nodes.between.latency_s > nodes.inside.latency_s > 0


def test_a_file_without_the_link_to_the_host_says_so(tmp_path: Path) -> None:
    said = list[str]()
    for host_gb_s in (64, None):
        sheet = read_data_sheet("GPU", written(tmp_path, host_gb_s=host_gb_s))
        model_of_sheet(sheet, None, Reporter(len, said.append))
    assert len(said) == 1
    assert "has no host_gb_s: for tables in host memory, 32 GB/s" in said[0]


def test_more_nodes_take_longer_to_start() -> None:
    sheet = DATA_SHEETS["h100-80gb"]
    two, sixteen = (sheet.link(ranks) for ranks in (16, 128))
    for collective in ("all_to_all", "ring"):
        few, many = two.of(collective, 16), sixteen.of(collective, 128)  # type: ignore[arg-type]
        assert few.latency_s < many.latency_s


def test_72_gpus_share_one_nvlink() -> None:
    assert isinstance(DATA_SHEETS["gb300-288gb"].link(72), Link)
    assert DATA_SHEETS["gb300-288gb"].link(144).nodes(144) == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"memory_gb_s": None},
            r"sheet\.json: .* no field 'memory_gb_s': add the GB/s of its memory \(3350 of",
        ),
        ({"gpus_per_node": None}, r"no field 'gpus_per_node': add the number .* \(8 of an H100\)"),
        ({"link_gb_s": 0}, r"sheet\.json: link_gb_s must be a number more than 0, got 0"),
        ({"link_gb_s": "fast"}, r"sheet\.json: link_gb_s must be a number more than 0"),
        ({"schema": "another"}, r'is not a document of schema "autoshard\.data_sheet"'),
    ],
)
def test_a_faulty_file_ends_in_one_line(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_data_sheet("GPU", written(tmp_path, **changes))
