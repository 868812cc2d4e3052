"""The page about a plan in a real browser: it draws, sorts and searches without a network.

AUTOSHARD_PICTURES=FOLDER writes the picture of docs/plans.md there.
"""

import io
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import run, wait_until
from PIL import Image
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from autoshard.cost_model import EstimatedCosts, load_model
from autoshard.sharders import SharderContext, make_sharder, write_report
from autoshard.sharders.explaining import report
from autoshard.sharders.explaining.report import plan_document, write_page
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Link,
    Objective,
    ShardingTask,
    synthetic_tables,
)
from autoshard.workload.tasks.rules import Rule

NASTY = "<img src=x onerror=\"document.title='hacked'\"></script><script>document.title='hacked'"
MLPERF = (
    "--tables mlperf:dlrm-v2 --hardware h100-80gb --num-devices 16 --memory-gb 80 "
    "--batch-size 65536 --link 400GB/s,20us --inter-node-link 50GB/s,20us --devices-per-node 8 "
    "--report plan.html"
)


class Page:
    """A page that is open in a browser without a network."""

    def __init__(self, driver: Chrome, path: Path) -> None:
        self.driver = driver
        driver.get(path.as_uri())

    def all(self, selector: str) -> list[str]:
        """Texts of elements."""
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        found: list[str] = self.driver.execute_script(script, selector)
        return found

    def rows(self) -> list[list[str]]:
        """The tables that are drawn."""
        script = """return [...document.querySelectorAll('#tables tbody tr[aria-rowindex]')].map(
            row => [...row.children].map(cell => cell.textContent))"""
        found: list[list[str]] = self.driver.execute_script(script)
        return found

    def sort(self, column: str) -> str | None:
        """Clicks on the head of a column; returns how it is sorted then."""
        path = f"//*[@id='tables']//th[button='{column}']"
        self.driver.find_element(By.XPATH, f"{path}/button").click()
        return self.driver.find_element(By.XPATH, path).get_attribute("aria-sort")

    def paper(self, **media: str) -> str:
        """The colour of the background with a medium or a preference of colours."""
        scheme = {"features": [{"name": "prefers-color-scheme", "value": media.get("scheme", "")}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", **scheme})
        script = "return getComputedStyle(document.body).backgroundColor"
        return str(self.driver.execute_script(script))


@pytest.fixture
def offline(chromium: Chrome) -> Iterator[Chrome]:
    """A browser without a network, whose console and list of requests stay empty."""
    off = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    chromium.execute_cdp_cmd("Network.enable", {})
    chromium.execute_cdp_cmd("Network.emulateNetworkConditions", off)
    chromium.get_log("browser")
    yield chromium
    said = [entry["message"] for entry in chromium.get_log("browser")]
    script = "return performance.getEntriesByType('resource').map(entry => entry.name)"
    asked = chromium.execute_script(script)
    on = {**off, "offline": False, "downloadThroughput": -1, "uploadThroughput": -1}
    chromium.execute_cdp_cmd("Network.emulateNetworkConditions", on)
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    assert said == []
    assert [name for name in asked if not name.startswith("data:")] == []


def task_of(tables: tuple[EmbeddingTable, ...], devices: int, **changes: Any) -> ShardingTask:
    task = ShardingTask(tables, Device.uniform(devices, 2**34), 4096)
    return replace(task, objective=Objective("step", Link(25e9, 3e-5)), **changes)


def oracle_of(task: ShardingTask) -> EstimatedCosts:
    model = load_model("cpu").for_objective(task.objective, len(task.devices))
    return EstimatedCosts(model, task.batch_size)


def test_five_thousand_tables_are_sorted_and_searched(offline: Chrome, tmp_path: Path) -> None:
    nasty = EmbeddingTable(NASTY, 7, 16, 1.0)
    task = task_of((nasty, *synthetic_tables(4_999, seed=1, profile="small")), 128)
    plan = make_sharder("dim").shard(task)
    write_page(tmp_path / "plan.html", plan_document(plan, task, oracle_of(task), []), NASTY)
    page = Page(offline, tmp_path / "plan.html")
    assert page.all("h1") == [NASTY]
    assert len(page.all("#chart .track")) == 2 * (128 + 1)
    assert len(page.all("#chart .slow")) == 4
    drawn = page.rows()
    assert len(drawn) < 100
    times = [float(row[6].split()[0]) for row in drawn]
    assert times == sorted(times, reverse=True)

    counts = sorted(table.rows for table in task.tables)
    assert page.sort("rows") == "descending"
    assert page.rows()[0][1] == f"{counts[-1]:,}"
    assert page.sort("rows") == "ascending"
    assert page.rows()[0][:2] == [NASTY, "7"]
    offline.execute_script("document.querySelector('#tables .scroll').scrollTop = 1e9")
    wait_until("the last table", lambda: page.rows()[-1][1] == f"{counts[-1]:,}")
    assert len(page.rows()) < 100

    search = offline.find_element(By.CSS_SELECTOR, "#tables input")
    search.send_keys("T4998")
    assert [row[0] for row in page.rows()] == ["t4998"]
    assert page.all("#tables .tools span") == ["1 of 5,000"]
    search.clear()
    search.send_keys("<IMG")
    assert [row[0] for row in page.rows()] == [NASTY]
    assert offline.title == NASTY


def test_it_is_read_in_the_dark_on_paper_and_by_screen_readers(
    offline: Chrome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_TORCHREC_SIZE", 0)
    heavy = EmbeddingTable("heavy", 500_000, 64, 50.0)
    tables = (heavy, *synthetic_tables(30, seed=1, profile="small"))
    ruled = task_of(tables, 4, rules=(Rule("copied", ("t01",)),))
    context, task = SharderContext(oracle_of(ruled)), replace(ruled, rules=())
    plan = make_sharder("cost_fused", context).shard(ruled)
    write_report(tmp_path / "plan.html", plan, task, context)
    page = Page(offline, tmp_path / "plan.html")
    light, dark = page.paper(scheme="light"), page.paper(scheme="dark")
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(20, 23, 27)")
    heads = page.all("h2")
    assert heads[:2] == ["Expected step", "Time and memory of each device"]
    assert heads[2:] == [
        "Tables", "What each option saves", "What would help next", "To know before training",
    ]  # fmt: skip
    assert len(page.all("table")) == len(page.all("table > caption"))
    assert len(page.all("thead th")) == len(page.all("thead th[scope=col]"))
    assert "slowest" in page.all("#chart .slow")
    label = offline.find_element(By.ID, "chart").get_attribute("aria-label")
    assert "Slowest in backward: device" in str(label)
    assert page.all("#savings tbody th") == ["t01"]
    printed = offline.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})
    assert len(printed["data"]) > 10_000
    assert len(page.rows()) == 31


def test_the_picture_of_the_documents(offline: Chrome, tmp_path: Path) -> None:
    done = run("shard.py", MLPERF, tmp_path)
    assert "the report is in plan.html" in done.stdout
    page = Page(offline, tmp_path / "plan.html")
    page.paper(scheme="light")
    assert len(page.rows()) == 26
    folder = os.environ.get("AUTOSHARD_PICTURES")
    if folder:
        end = "return document.querySelector('#tables .scroll').getBoundingClientRect().top + 300"
        offline.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        page_size = {"width": 1280, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        offline.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", page_size)
        height = int(offline.execute_script(end))
        page_size["height"] = height
        offline.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", page_size)
        shot = Image.open(io.BytesIO(offline.get_screenshot_as_png()))
        shot.convert("RGB").quantize(256).save(Path(folder) / "plan-report.png", optimize=True)
        page_size |= {"width": 1600, "height": 1000}
        offline.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", page_size)
