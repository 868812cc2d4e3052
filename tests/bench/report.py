"""The documents that tell figures: docs/figures.json, the page made from it, and quotations.

A document quotes figures in a table with the head `| figure | goal | measured |`. Whoever writes
one gives the name in the first cell of a row; the others are filled in here.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from autoshard.workload import UserError, documents
from bench.figure import Figure, Taken

FIGURES_SCHEMA = documents.Schema("autoshard.figures", 1)
DATA, PAGE = "figures.json", "figures.md"
_HEAD, _RULE = "| figure | goal | measured |", "|---|---|---|"
_INTRODUCTION = """# Figures

`make bench` takes these figures and writes this page; what README and other pages quote of them
comes from here, too. Each group can be taken anew by itself, with the command below it. Where an
interval stands, a difference within it is noise.
"""


def load(folder: Path) -> dict[str, Taken]:
    """The groups of figures that the folder's documents hold; none where nothing was taken yet."""
    path = folder / DATA
    if not path.exists():
        return {}
    with documents.naming(path):
        document = documents.read(path)
        FIGURES_SCHEMA.check(document)
        with documents.fields_of("the document"):
            return {name: Taken.from_json(group) for name, group in document["groups"].items()}


def save(folder: Path, groups: Mapping[str, Taken]) -> None:
    """Write the figures, the page of them, and what the documents around quote of them."""
    body = {"groups": {name: taken.to_json() for name, taken in groups.items()}}
    documents.write(folder / DATA, FIGURES_SCHEMA.stamp(body))
    _write(folder / PAGE, page(groups))
    for path in (folder.parent / "README.md", *sorted(folder.glob("*.md"))):
        if path.exists():
            text = path.read_text(encoding="utf-8")
            if (quoting := with_quotations(text, groups)) != text:
                _write(path, quoting)


def page(groups: Mapping[str, Taken]) -> str:
    """`docs/figures.md`: a table a group, and what it was taken with."""
    parts = [_INTRODUCTION]
    for name, taken in groups.items():
        rows = "\n".join((_HEAD, _RULE, *(row(figure) for figure in taken.figures)))
        parts.append(f"""## {taken.title}

{rows}

Taken on {taken.date} in {taken.seconds:,.0f} s, commit {taken.commit}, with {taken.machine}:

```
python tests/run_bench.py --only {name}
```
""")
    return "\n".join(parts)


def row(figure: Figure) -> str:
    """A figure's line in a table, here and where it is quoted."""
    cells = (figure.name, figure.goal, figure.measured)
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def quotations(text: str) -> list[str]:
    """The names of the figures that a document quotes."""
    return [name for _, name in _quoting_lines(text.splitlines())]


def with_quotations(text: str, groups: Mapping[str, Taken]) -> str:
    """The document with what it quotes as it was taken last; what is not known stays as it is."""
    rows = {figure.name: row(figure) for taken in groups.values() for figure in taken.figures}
    lines = text.split("\n")
    for number, name in _quoting_lines(lines):
        lines[number] = rows.get(name, lines[number])
    return "\n".join(lines)


def _quoting_lines(lines: list[str]) -> Iterator[tuple[int, str]]:
    """The numbers of lines that quote a figure, and its name."""
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
