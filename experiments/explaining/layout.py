"""How explanations look: tables without frames between lines, and slices by their columns."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from autoshard.experiments.console import cli
from autoshard.workload import EmbeddingTable

Part = str | Table  # of an explanation: a line, or a table under the line before it


def show(parts: Iterable[Part]) -> None:
    """Print them, each as soon as it is there."""
    for part in parts:
        cli.console.print(part, soft_wrap=isinstance(part, str), markup=False)


def report(columns: Sequence[str], texts: int = 1) -> Table:
    """An empty table. Its first `texts` columns are read from the left, the others are numbers."""
    shown = Table(box=None, padding=(0, 0, 0, 1))
    for number, column in enumerate(columns):
        text = number < texts
        shown.add_column(
            column, justify="left" if text else "right", no_wrap=not text, overflow="fold"
        )
    return shown


def columns_told(table: EmbeddingTable, start: int, width: int) -> str:
    """`all 64`, or `0-32 of 64`."""
    whole = width == table.dim
    return f"all {table.dim}" if whole else f"{start}-{start + width} of {table.dim}"
