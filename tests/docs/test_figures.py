"""The figures that documents tell are those that `make bench` has taken."""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import run_bench as bench
from bench import report
from bench.figure import Figure, Group, Taken
from pages import DOCS, PAGES, text_of

from autoshard.experiments.console import cli
from autoshard.workload import UserError

SPEED = Figure("steps a second", "at least 100,000", 112_345.6)
RATIO = Figure("slowest device, ours over theirs", "", 0.88512, interval=(0.8711, 0.8993))
UNTOLD = Figure("noise", "at most 2 %", None, "%")


def taken(*figures: Figure, title: str = "Speed") -> Taken:
    return Taken(title, "cpu: X, 2 cores", "2026-01-02", "abc", 61.4, figures)


@pytest.mark.parametrize(
    ("figure", "told"),
    [
        (Figure("", "", 0.0123), "0.012"),
        (Figure("", "", 0.9996), "1.000"),
        (Figure("", "", 4.126, "s"), "4.13 s"),
        (Figure("", "", 27.94, "ms"), "27.9 ms"),
        (Figure("", "", 480.6), "481"),
        (Figure("", "", 1_347_512.0), "1,350,000"),
        (Figure("", "", 24), "24"),
        (Figure("", "", -1.5), "-1.500"),
        (RATIO, "0.885 (95 %: 0.871 to 0.899)"),
        (UNTOLD, "not told"),
    ],
)
def test_how_a_figure_is_told(figure: Figure, told: str) -> None:
    assert figure.measured == told


def test_the_page_tells_each_figure_and_what_it_was_taken_with() -> None:
    page = report.page({"speed": taken(SPEED, RATIO), "noise": taken(UNTOLD, title="Noise")})
    assert (
        page[page.index("## Speed") :]
        == """\
## Speed

| figure | goal | measured |
|---|---|---|
| steps a second | at least 100,000 | 112,000 |
| slowest device, ours over theirs | | 0.885 (95 %: 0.871 to 0.899) |

Taken on 2026-01-02 in 61 s, commit abc, with cpu: X, 2 cores:

```
python tests/run_bench.py --only speed
```

## Noise

| figure | goal | measured |
|---|---|---|
| noise | at most 2 % | not told |

Taken on 2026-01-02 in 61 s, commit abc, with cpu: X, 2 cores:

```
python tests/run_bench.py --only noise
```
"""
    )


def test_what_was_taken_is_read_again(tmp_path: Path) -> None:
    groups = {"speed": taken(SPEED, RATIO), "noise": taken(UNTOLD)}
    report.save(tmp_path / "docs", groups)
    assert report.load(tmp_path / "docs") == groups
    assert report.load(tmp_path / "elsewhere") == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "line 1"),
        ("{}", 'not a document of schema "autoshard.figures"'),
        ('{"schema": "autoshard.figures", "version": 1}', "no field 'groups'"),
        ('{"schema": "autoshard.figures", "version": 1, "groups": {"a": {}}}', "'figures'"),
    ],
)
def test_a_spoilt_document_is_told(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "figures.json").write_text(text)
    with pytest.raises(UserError, match=f"figures.json: .*{re.escape(why)}"):
        report.load(tmp_path)


QUOTING = """# Ours

| figure | goal | measured |
|---|---|---|
| steps a second | at least 7 | 8 |
| of nobody | | 9 |

| other | goal | measured |
|---|---|---|
| steps a second | at least 7 | 8 |
"""


def test_a_document_quotes_what_was_taken_last() -> None:
    assert report.quotations(QUOTING) == ["steps a second", "of nobody"]
    assert report.with_quotations(QUOTING, {"speed": taken(SPEED)}) == QUOTING.replace(
        "| steps a second | at least 7 | 8 |", "| steps a second | at least 100,000 | 112,000 |", 1
    )
    assert report.with_quotations(QUOTING, {}) == QUOTING


# The command, with groups that take no time.


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[str, Group]:
    def write(folder: Path) -> Sequence[Figure]:
        (folder / "scratch").write_text("")
        return [SPEED]

    def stop(_: Path) -> Sequence[Figure]:
        raise KeyboardInterrupt

    groups = {
        "speed": Group("Speed", write, on_ray=False),
        "ratio": Group("Ratio", lambda _: [RATIO], on_ray=False),
        "stopped": Group("Stopped", stop, on_ray=False),
    }
    monkeypatch.setattr(bench, "GROUPS", groups)
    return groups


def test_taking_a_group_leaves_the_others(groups: dict[str, Group], tmp_path: Path) -> None:
    readme, out = tmp_path / "README.md", tmp_path / "docs"
    readme.write_text(QUOTING)
    bench.main(bench.BenchConfig("ratio", out))
    assert readme.read_text() == QUOTING
    groups["ratio"] = Group("Ratio", lambda _: [UNTOLD], on_ray=False)
    bench.main(bench.BenchConfig("speed", out))
    found = report.load(out)
    assert [*found] == ["speed", "ratio"]  # in their order, whichever was taken first
    assert (found["speed"].figures, found["ratio"].figures) == ((SPEED,), (RATIO,))
    assert (out / "figures.md").read_text() == report.page(found)
    assert readme.read_text() == report.with_quotations(QUOTING, found) != QUOTING
    bench.main(bench.BenchConfig("ratio", out))
    assert report.load(out)["ratio"].figures == (UNTOLD,)


def test_an_interrupted_bench_keeps_what_was_taken(
    groups: dict[str, Group], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        bench.main(bench.BenchConfig("speed,ratio,stopped", tmp_path))
    assert [*report.load(tmp_path)] == ["speed", "ratio"]


def test_documents_are_written_anew_without_measuring(
    groups: dict[str, Group], tmp_path: Path
) -> None:
    bench.main(bench.BenchConfig("speed", tmp_path))
    page = (tmp_path / "figures.md").read_text()
    (tmp_path / "figures.md").unlink()
    bench.main(bench.BenchConfig("", tmp_path))
    assert (tmp_path / "figures.md").read_text() == page


def test_a_group_that_is_not_there_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["run_bench.py", "--only", "noise,speeed", "--out", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as left:
        cli.run_command(bench.main, bench.BenchConfig)
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line == f"--only: no group of figures is called speeed: there are {', '.join(bench.GROUPS)}"
    )
    assert not [*tmp_path.iterdir()]


# What is told of this repository.


def test_figures_were_taken_by_the_groups_that_are_there() -> None:
    groups = report.load(DOCS)
    assert groups
    assert {name: taken.title for name, taken in groups.items()} == {
        name: bench.GROUPS[name].title for name in groups
    }
    names = Counter(figure.name for taken in groups.values() for figure in taken.figures)
    assert [name for name, count in names.items() if count > 1] == []


def test_the_page_is_made_from_the_figures() -> None:
    assert (DOCS / "figures.md").read_text() == report.page(report.load(DOCS))


def test_the_readme_quotes_figures() -> None:
    assert report.quotations(text_of("README.md"))


@pytest.mark.parametrize("page", PAGES)
def test_what_is_quoted_was_taken(page: str) -> None:
    """If not: `run_bench.py --only ''` writes what was taken into the tables of figures."""
    groups = report.load(DOCS)
    known = {figure.name for taken in groups.values() for figure in taken.figures}
    assert [name for name in report.quotations(text_of(page)) if name not in known] == []
    assert report.with_quotations(text_of(page), groups) == text_of(page)
