"""The metrics that documents quote are those that `make bench` has measured."""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import run_bench
from bench import report
from bench.metric import Group, GroupResult, Metric
from pages import DOCS, PAGES, text_of

from autoshard.experiments.console import cli
from autoshard.workload import UserError

SPEED = Metric("steps a second", "at least 100,000", 112_345.6)
RATIO = Metric("slowest device, ours over theirs", "", 0.88512, interval=(0.8711, 0.8993))
UNKNOWN = Metric("noise", "at most 2 %", None, "%")


def result(*metrics: Metric, title: str = "Speed") -> GroupResult:
    return GroupResult(title, "cpu: X, 2 cores", "2026-01-02", "abc", 61.4, metrics)


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (Metric("", "", 0.0123), "0.012"),
        (Metric("", "", 0.9996), "1.000"),
        (Metric("", "", 4.126, "s"), "4.13 s"),
        (Metric("", "", 27.94, "ms"), "27.9 ms"),
        (Metric("", "", 480.6), "481"),
        (Metric("", "", 1_347_512.0), "1,350,000"),
        (Metric("", "", 24), "24"),
        (Metric("", "", -1.5), "-1.500"),
        (RATIO, "0.885 (95 %: 0.871 to 0.899)"),
        (UNKNOWN, "not available"),
    ],
)
def test_how_a_metric_is_formatted(metric: Metric, text: str) -> None:
    assert metric.measured == text


def test_the_page_has_each_metric_with_machine_and_command() -> None:
    page = report.page({"speed": result(SPEED, RATIO), "noise": result(UNKNOWN, title="Noise")})
    assert (
        page[page.index("## Speed") :]
        == """\
## Speed

| metric | target | measured |
|---|---|---|
| steps a second | at least 100,000 | 112,000 |
| slowest device, ours over theirs | | 0.885 (95 %: 0.871 to 0.899) |

Measured on 2026-01-02 in 61 s, commit abc, on cpu: X, 2 cores:

```
python tests/run_bench.py --only speed
```

## Noise

| metric | target | measured |
|---|---|---|
| noise | at most 2 % | not available |

Measured on 2026-01-02 in 61 s, commit abc, on cpu: X, 2 cores:

```
python tests/run_bench.py --only noise
```
"""
    )


def test_results_are_read_again(tmp_path: Path) -> None:
    groups = {"speed": result(SPEED, RATIO), "noise": result(UNKNOWN)}
    report.save(tmp_path / "docs", groups)
    assert report.load(tmp_path / "docs") == groups
    assert report.load(tmp_path / "elsewhere") == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "line 1"),
        ("{}", 'not a document of schema "autoshard.figures"'),
        ('{"schema": "autoshard.figures", "version": 1}', "no field 'groups'"),
        ('{"schema": "autoshard.figures", "version": 1, "groups": {"a": {}}}', "'metrics'"),
    ],
)
def test_an_invalid_document_is_reported(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "figures.json").write_text(text)
    with pytest.raises(UserError, match=f"figures.json: .*{re.escape(why)}"):
        report.load(tmp_path)


QUOTING = """# Ours

| metric | target | measured |
|---|---|---|
| steps a second | at least 7 | 8 |
| unknown | | 9 |

| other | target | measured |
|---|---|---|
| steps a second | at least 7 | 8 |
"""


def test_a_document_quotes_the_latest_results() -> None:
    assert report.quotations(QUOTING) == ["steps a second", "unknown"]
    assert report.with_quotations(QUOTING, {"speed": result(SPEED)}) == QUOTING.replace(
        "| steps a second | at least 7 | 8 |", "| steps a second | at least 100,000 | 112,000 |", 1
    )
    assert report.with_quotations(QUOTING, {}) == QUOTING


# The command, with groups that take no time.


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[str, Group]:
    def write(folder: Path) -> Sequence[Metric]:
        (folder / "scratch").write_text("")
        return [SPEED]

    def stop(_: Path) -> Sequence[Metric]:
        raise KeyboardInterrupt

    groups = {
        "speed": Group("Speed", write, on_ray=False),
        "ratio": Group("Ratio", lambda _: [RATIO], on_ray=False),
        "stopped": Group("Stopped", stop, on_ray=False),
    }
    monkeypatch.setattr(run_bench, "GROUPS", groups)
    return groups


def test_measuring_a_group_leaves_the_others(groups: dict[str, Group], tmp_path: Path) -> None:
    readme, out = tmp_path / "README.md", tmp_path / "docs"
    readme.write_text(QUOTING)
    run_bench.main(run_bench.BenchConfig("ratio", out))
    assert readme.read_text() == QUOTING
    groups["ratio"] = Group("Ratio", lambda _: [UNKNOWN], on_ray=False)
    run_bench.main(run_bench.BenchConfig("speed", out))
    found = report.load(out)
    assert [*found] == ["speed", "ratio"]  # in the order of GROUPS
    assert (found["speed"].metrics, found["ratio"].metrics) == ((SPEED,), (RATIO,))
    assert (out / "figures.md").read_text() == report.page(found)
    assert readme.read_text() == report.with_quotations(QUOTING, found) != QUOTING
    run_bench.main(run_bench.BenchConfig("ratio", out))
    assert report.load(out)["ratio"].metrics == (UNKNOWN,)


def test_an_interrupted_bench_keeps_completed_groups(
    groups: dict[str, Group], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_bench.main(run_bench.BenchConfig("speed,ratio,stopped", tmp_path))
    assert [*report.load(tmp_path)] == ["speed", "ratio"]


def test_documents_are_rewritten_without_measuring(
    groups: dict[str, Group], tmp_path: Path
) -> None:
    run_bench.main(run_bench.BenchConfig("speed", tmp_path))
    page = (tmp_path / "figures.md").read_text()
    (tmp_path / "figures.md").unlink()
    run_bench.main(run_bench.BenchConfig("", tmp_path))
    assert (tmp_path / "figures.md").read_text() == page


def test_an_unknown_group_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["run_bench.py", "--only", "noise,speeed", "--out", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as left:
        cli.run_command(run_bench.main, run_bench.BenchConfig)
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"--only: unknown group speeed: use some of {', '.join(run_bench.GROUPS)}"
    assert not [*tmp_path.iterdir()]


# The documents of this repository.


def test_results_belong_to_existing_groups() -> None:
    groups = report.load(DOCS)
    assert groups
    assert {name: found.title for name, found in groups.items()} == {
        name: run_bench.GROUPS[name].title for name in groups
    }
    names = Counter(metric.name for found in groups.values() for metric in found.metrics)
    assert [name for name, count in names.items() if count > 1] == []


def test_the_page_is_made_from_the_metrics() -> None:
    assert (DOCS / "figures.md").read_text() == report.page(report.load(DOCS))


def test_the_page_of_results_quotes_metrics() -> None:
    assert report.quotations(text_of("docs/results.md"))


@pytest.mark.parametrize("page", PAGES)
def test_quoted_metrics_were_measured(page: str) -> None:
    """If not, `run_bench.py --only ''` updates the tables of metrics."""
    groups = report.load(DOCS)
    known = {metric.name for found in groups.values() for metric in found.metrics}
    assert [name for name in report.quotations(text_of(page)) if name not in known] == []
    assert report.with_quotations(text_of(page), groups) == text_of(page)
