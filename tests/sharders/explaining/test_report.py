"""The page about a plan: its figures, that names cannot be markup, and that it needs no network."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from autoshard.cost_model import EstimatedCosts, StepPredictor, load_model
from autoshard.cost_model.roofline import roofline_model
from autoshard.sharders import Policy, SharderContext, explain_text, make_sharder, write_report
from autoshard.sharders.explaining import report
from autoshard.sharders.explaining.report import plan_document, write_page
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Network,
    Objective,
    ShardingPlan,
    ShardingTask,
    UserError,
    synthetic_tables,
)
from autoshard.workload.data_sheets import DATA_SHEETS
from autoshard.workload.plans.placements import Placement
from autoshard.workload.ways.option import DATA_PARALLEL, ShardingOption

LINK = Link(25e9, 30e-6)
NASTY = '</script><script>alert("1")</script><b>&amp;\u2028'
VOID = {"meta", "link", "input"}


class Tags(HTMLParser):
    """Fails where an element is not closed, and keeps what is in those of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.texts = list[str](), dict[str, list[str]]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data


def read(path: Path) -> tuple[dict[str, Any], Tags]:
    """The figures of a page, and its elements."""
    tags = Tags()
    tags.feed(path.read_text("ascii"))
    assert tags.open == []
    figures, script = tags.texts["script"]
    assert script.strip().startswith('"use strict"')
    return json.loads(figures), tags


def task_of(*tables: EmbeddingTable, devices: int = 4, **changes: Any) -> ShardingTask:
    found = tables or synthetic_tables(12, seed=3, profile="small")
    task = ShardingTask(tuple(found), Device.uniform(devices, 2**30), 1024)
    return replace(task, **{"objective": Objective("step", LINK), **changes})


def oracle_of(task: ShardingTask) -> EstimatedCosts:
    model = load_model("cpu").for_objective(task.objective, len(task.devices))
    return EstimatedCosts(model, task.batch_size)


def test_it_says_what_the_plan_costs(tmp_path: Path, policy: Policy) -> None:
    task = task_of()
    oracle, plan = oracle_of(task), make_sharder("dim").shard(task)
    context = SharderContext(oracle, policy)
    write_report(tmp_path / "new" / "plan.html", plan, task, context, title="Mine", notes=["Hello"])
    found, tags = read(tmp_path / "new" / "plan.html")
    assert tags.texts["title"] == tags.texts["h1"] == ["Mine"]
    predictor, cost = StepPredictor(oracle, task), oracle.plan_cost(plan, task)
    step = predictor.of(plan)
    said = [found["step"][name] for name in ("ms", "low", "high")]
    assert said == pytest.approx([step.expected_ms, *step.interval_ms], rel=1e-4)
    names = [other["name"] for other in found["others"]]
    assert names[0] == "TorchRec's planner"
    best = re.fullmatch(r"best heuristic \((\w+)\)", names[1])
    assert best is not None
    than = step.over(predictor.of(make_sharder(best[1]).shard(task)))
    assert found["others"][1]["ratio"] == pytest.approx([than.ratio, than.low, than.high], rel=1e-4)
    assert found["stages"] == [[0], [2], [3], [1]]  # in the order of time
    for device, of, memory in zip(
        found["devices"], cost.devices, plan.device_memory(task), strict=True
    ):
        assert device["ms"] == pytest.approx(of.phases_ms, rel=1e-4)
        assert dict(zip(found["memory"], device["bytes"], strict=True)) == {
            name: size for name, size in memory._asdict().items() if name != "gradients"
        }
    slowest = sum(max(each["ms"][phase] for each in found["devices"]) for phase in range(4))
    assert slowest + found["common_ms"] == pytest.approx(found["step_ms"], rel=1e-3)
    assert sum(row[7] for row in found["tables"]) == sum(plan.device_bytes(task))
    assert {row[0]: row[4] for row in found["tables"]} == {
        t.name: "table-wise" for t in task.tables
    }
    assert found["savings"] == []
    again, memory, faster, more = found["alternatives"]
    assert again["name"] == "planned again by autoshard, nothing changed"
    assert again["ms"] <= found["step"]["ms"]
    assert memory["ms"] == pytest.approx(again["ms"], rel=1e-3)  # there is enough
    assert faster["ms"] < again["ms"]
    assert more["name"] == "one device more"
    assert found["changes"][0][1] < found["step"]["ms"]
    assert found["notes"] == ["Hello"]
    write_report(tmp_path / "again.html", plan, task, context, title="Mine", notes=["Hello"])
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "new" / "plan.html").read_bytes()


def plans() -> Iterator[Any]:
    """Plans with each kind of option, and what the page says of the first table."""
    big = EmbeddingTable("big", 100_000, 64, 20.0, zipf_alpha=0.9)
    others = tuple(EmbeddingTable(f"t{n}", 5_000, 32, 4.0) for n in range(3))
    task = task_of(big, *others)
    rest = tuple(Placement(table.name, 0, 32, n) for n, table in enumerate(others))
    whole = (Placement("big", 0, 64, 3), *rest)
    network = Network(LINK, Link(1e9, 1e-4), 2)

    def case(says: str, home: str, task: ShardingTask, placed: Any, **options: Any) -> Any:
        plan = ShardingPlan(placed, len(task.devices), options)
        return pytest.param(task, plan, says, home, id=says)

    slices = (Placement("big", 0, 32, 0), Placement("big", 32, 32, 3), *rest)
    yield case("column-wise, 2 slices", "device0, device3", task, slices)
    yield case("row-wise, 4 blocks", "all devices", task, (Placement("big", 0, 64, 0, 4), *rest))
    nodes = replace(task, objective=Objective("step", network))
    blocks = (Placement("big", 0, 64, 2, 2), *rest)
    yield case("table-row-wise, 2 blocks", "device2, device3", nodes, blocks)
    grid = (Placement("big", 0, 32, 0, 2), Placement("big", 32, 32, 2, 2), *rest)
    yield case("grid, 2 slices x 2 blocks", "all devices", nodes, grid)
    yield case("data-parallel", "all devices", task, rest, big=DATA_PARALLEL)
    hot = ShardingOption(hot_rows=1024)
    yield case("table-wise; 1,024 hot rows data-parallel", "device3", task, whole, big=hot)
    hashed = (Placement("big", 0, 64, 0, 4), *rest)
    numbered = ShardingOption(hot_rows=0)
    yield case("row-wise, 4 blocks; hashed ids", "all devices", task, hashed, big=numbered)
    alone = task_of(big, devices=1, objective=Objective("step"))
    yield case("table-wise", "device0", alone, (Placement("big", 0, 64, 0),))
    compute = replace(task, objective=Objective("compute"))
    yield case("column-wise, 2 slices", "device0, device3", compute, slices)


@pytest.mark.parametrize(("task", "plan", "says", "home"), plans())
def test_all_options_are_on_it(
    task: ShardingTask, plan: ShardingPlan, says: str, home: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, policy: Policy,
) -> None:  # fmt: skip
    monkeypatch.setattr(report, "_TORCHREC_SIZE", 0)
    context = SharderContext(oracle_of(task), policy)
    write_report(tmp_path / "plan.html", plan, task, context)
    found, _ = read(tmp_path / "plan.html")
    assert found["tables"][0][4:6] == [says, home]
    assert all(row[6] > 0 for row in found["tables"])
    assert sum(row[7] for row in found["tables"]) == sum(plan.device_bytes(task))
    assert ("gradients" in found["memory"]) == plan.has_copies
    separate = task.objective.name == "step"
    assert found["stages"][:1] == ([[0]] if separate else [[0, 1]])
    assert found["lacks"][-1].startswith("TorchRec's planner is left out: ")
    kept = says.startswith(("table-wise", "grid")) and "hot" not in says
    assert [row[0] for row in found["savings"]] == ([] if kept else ["big"])
    assert explain_text(plan, task, context.costs).strip()


def test_gpus_that_differ_and_tables_in_host_memory(tmp_path: Path) -> None:
    sheet = DATA_SHEETS["h100-80gb"]
    table = EmbeddingTable("big", 1_000_000, 64, 20.0, zipf_alpha=1.0)
    objective = Objective("operators", sheet.link(2))
    oracle = EstimatedCosts(roofline_model(sheet).for_objective(objective, 2), 1024)
    known = oracle.model.provenance.hardware
    devices = (Device("small", 2**28, 0, known), Device("large", 2**31, 2**20, known))
    task = ShardingTask((table,), devices, 1024, oracle.model.provenance.operator, (), objective)
    option = ShardingOption(cached_rows=50_000)
    plan = ShardingPlan((Placement("big", 0, 64, 0),), 2, {"big": option})
    write_page(tmp_path / "plan.html", plan_document(plan, task, oracle, []))
    found, _ = read(tmp_path / "plan.html")
    assert found["tables"][0][4] == "table-wise; in host memory (UVM), cache of 50,000 rows"
    assert [device["host"] for device in found["devices"]] == list(plan.host_bytes(task))
    assert [device["of"] for device in found["devices"]] == [2**28, 2**31]
    assert found["devices"][1]["reserved"] == 2**20
    facts = dict(found["facts"])
    assert facts["devices"] == f"1 x {known}, 0.25 GiB each; 1 x {known}, 2 GiB each"


def test_names_are_no_markup(tmp_path: Path) -> None:
    task = task_of(EmbeddingTable(NASTY, 1000, 16, 2.0), EmbeddingTable("b", 1000, 16, 2.0))
    plan, oracle = make_sharder("dim").shard(task), oracle_of(task)
    document = plan_document(plan, task, oracle, [], [f"note {NASTY}"])
    write_page(tmp_path / "plan.html", document, f"@figures@ {NASTY}")
    found, tags = read(tmp_path / "plan.html")
    assert found["tables"][0][0] == NASTY
    assert found["notes"] == [f"note {NASTY}"]
    assert tags.texts["h1"] == [f"@figures@ {NASTY}"]
    assert len(tags.texts["script"]) == 2
    assert "b" not in tags.texts


def test_many_tables_on_many_devices_need_no_network(tmp_path: Path) -> None:
    task = task_of(*synthetic_tables(5_000, seed=1, profile="small"), devices=128)
    plan, oracle = make_sharder("dim").shard(task), oracle_of(task)
    write_page(tmp_path / "plan.html", plan_document(plan, task, oracle, []))
    page = (tmp_path / "plan.html").read_text("ascii")
    assert len(page) < 1_000_000
    assert re.findall(r"\w+://|@import|url\(|\bsrc=|fetch\(|XMLHttp", page) == []
    assert re.findall(r'href="([^"]*)"', page) == ["data:,"]
    found, _ = read(tmp_path / "plan.html")
    assert len(found["tables"]) == 5_000


def test_it_is_made_without_torchrec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    monkeypatch.setitem(sys.modules, "autoshard.integration.plans.sharder", None)
    monkeypatch.delattr("autoshard.integration.TorchRecSharder", raising=False)
    task = task_of()
    plan = make_sharder("dim").shard(task)
    write_report(tmp_path / "plan.html", plan, task, SharderContext(oracle_of(task), policy))
    found, _ = read(tmp_path / "plan.html")
    assert "TorchRec's planner is left out: TorchRec cannot be imported" in found["lacks"][0]
    assert [other["name"].split()[0] for other in found["others"]] == ["best"]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"plan.html: the report cannot be written: "):
        write_page(tmp_path / "file" / "plan.html", {})


def test_an_explanation_is_plain_text() -> None:
    task = task_of()
    plan, oracle = make_sharder("dim").shard(task), oracle_of(task)
    text = explain_text(plan, task, oracle)
    assert text == explain_text(plan, task, oracle)
    assert "\x1b" not in text
    for words in (
        "phase, device",
        "next steps, each alone: step time in place of",
        "compared with",
    ):
        assert words in text
