"""Documents with metrics: docs/figures.json, the page made from it, and tables in other pages.

A page quotes metrics in a table with the head `| metric | target | measured |`. Its author writes
the name of a metric into the first cell of a row; `save` fills in the other cells.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from autoshard.workload import UserError, documents
from bench.metric import GroupResult, Metric

SCHEMA = documents.Schema("autoshard.figures", 1)
DATA, PAGE = "figures.json", "figures.md"
_HEAD, _RULE = "| metric | target | measured |", "|---|---|---|"
_INTRODUCTION = """# Metrics

`make bench` measures these metrics and writes this page and the tables in the README and other
pages. The command below a group measures it alone. Differences within an interval are not
significant. Ratios of step times over several tasks are geometric means of the tasks' ratios; those
measured before 2026-11-28 are of mean steps (plans, policies and families) or means of ratios.
"""


def load(folder: Path) -> dict[str, GroupResult]:
    """Reads the measured groups of a folder of documents; empty if nothing was measured yet."""
    path = folder / DATA
    if not path.exists():
        return {}
    with documents.naming(path):
        document = documents.read(path)
        SCHEMA.check(document)
        with documents.fields_of("the document"):
            groups = document["groups"].items()
            return {name: GroupResult.from_json(group) for name, group in groups}


def save(folder: Path, groups: Mapping[str, GroupResult]) -> None:
    """Writes the metrics, their page, and the tables that quote them in other pages."""
    body = {"groups": {name: result.to_json() for name, result in groups.items()}}
    documents.write(folder / DATA, SCHEMA.stamp(body))
    _write(folder / PAGE, page(groups))
    for path in (folder.parent / "README.md", *sorted(folder.glob("*.md"))):
        if path.exists():
            text = path.read_text(encoding="utf-8")
            if (quoting := with_quotations(text, groups)) != text:
                _write(path, quoting)


def page(groups: Mapping[str, GroupResult]) -> str:
    """Returns the text of `docs/figures.md`: for each group a table, machine and command."""
    parts = [_INTRODUCTION]
    for name, result in groups.items():
        rows = "\n".join((_HEAD, _RULE, *(row(metric) for metric in result.metrics)))
        parts.append(f"""## {result.title}

{rows}

Measured on {result.date} in {result.seconds:,.0f} s, commit {result.commit}, on {result.machine}:

```
python tests/run_bench.py --only {name}
```
""")
    return "\n".join(parts)


def row(metric: Metric) -> str:
    """Returns the metric's row of a table."""
    cells = (metric.name, metric.target, metric.measured)
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def quotations(text: str) -> list[str]:
    """Returns the names of the metrics that a page quotes."""
    return [name for _, name in _quoting_lines(text.splitlines())]


def with_quotations(text: str, groups: Mapping[str, GroupResult]) -> str:
    """Returns the page with current values; rows with unknown names stay unchanged."""
    rows = {metric.name: row(metric) for result in groups.values() for metric in result.metrics}
    lines = text.split("\n")
    for number, name in _quoting_lines(lines):
        lines[number] = rows.get(name, lines[number])
    return "\n".join(lines)


def _quoting_lines(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yields the index of each line that quotes a metric, and the metric's name."""
    in_table = False
    for number, line in enumerate(lines):
        if line.strip() == _HEAD:
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        elif in_table and not re.fullmatch(r"[|\s:-]+", line):
            yield number, line.split("|")[1].strip()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
