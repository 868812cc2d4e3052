"""docs/published-gpus.md has each published point, with the price that it has now."""

import re

import pytest
from pages import text_of
from published_points import held, points

_ROW = re.compile(r"\| \[(\S+)\]\(\S+\) \| .* \| (\S+) \| (\S+) \| (yes)? ?\|$", re.MULTILINE)
_EVERY = 12  # points that are priced again


def test_the_page_has_the_published_points() -> None:
    rows = {row[1]: row for row in _ROW.finditer(text_of("docs/published-gpus.md"))}
    known = {point["id"]: point for point in points()}
    assert len(rows) > 150
    assert set(rows) <= set(known)
    for name, row in rows.items():
        assert float(row[2]) == pytest.approx(known[name]["value"], rel=1e-3)
        assert bool(row[4]) == known[name]["aside"]
    for name in sorted(rows)[::_EVERY]:
        found = held(known[name])
        assert found is not None
        assert float(rows[name][3]) == pytest.approx(found.ratio, rel=0.05, abs=0.01)
