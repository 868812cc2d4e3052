"""docs/published-gpus.md has each published point with its present price, and their order by it."""

import re

import pytest
from pages import text_of
from published_points import Held, by_source, held, points
from scipy.stats import kendalltau, spearmanr

_ROW = re.compile(r"\| \[(\S+)\]\(\S+\) \| .* \| (\S+) \| (\S+) \| (yes)? ?\|$", re.MULTILINE)
_ORDER = re.compile(
    r"^\| (\w+) \| ([\w-]+) \| ([\w -]+) \| (\d+) \| (\S+) \| (\S+) \| (\S+) \|", re.MULTILINE
)
_EVERY = 12  # points that are priced again
_MANY = 5  # steps of a source whose order is computed again


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


def test_the_page_has_the_order_of_prices_within_each_source() -> None:
    page = text_of("docs/published-gpus.md")
    ratios = {row[1]: float(row[3]) for row in _ROW.finditer(page)}
    known = [point for point in points() if point["id"] in ratios]
    priced = [
        # A step takes a plan, and is not priced again.
        Held(point, ratios[point["id"]] * point["value"])
        if point["what"] == "step"
        else held(point)
        for point in known
    ]
    found = {row.group(1, 3, 2): row for row in _ORDER.finditer(page)}
    expected = by_source([each for each in priced if each is not None])
    assert len(expected) > 10
    assert set(found) == set(expected)
    for key, some in expected.items():
        prices, values = zip(*((one.price, one.point["value"]) for one in some), strict=True)
        assert int(found[key][4]) == len(some)
        spearman, kendall = spearmanr(prices, values)[0], kendalltau(prices, values)[0]
        if key[1] != "training steps":
            assert float(found[key][6]) == pytest.approx(spearman, abs=0.006)
            assert float(found[key][7]) == pytest.approx(kendall, abs=0.006)
        elif len(some) >= _MANY:  # ratios have two digits: nearly equal prices change places
            assert float(found[key][6]) == pytest.approx(spearman, abs=0.1)
