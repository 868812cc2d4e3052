"""Files that documents name exist, and README names every page and command."""

import re

import pytest
from pages import PAGES, ROOT, code_spans, text_of

from autoshard.experiments.console.commands import COMMANDS

PACKAGES = "workload|benchmark|cost_model|envs|sharders|integration|experiments|tests"


@pytest.mark.parametrize("page", PAGES)
def test_a_named_file_exists(page: str) -> None:
    named = [
        span for span in code_spans(text_of(page)) if re.match(rf"({PACKAGES})/[\w/.-]*$", span)
    ]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_readme_is_short_and_names_every_page_and_command() -> None:
    readme = text_of("README.md")
    assert len(readme.splitlines()) <= 200
    pages = {page for page in PAGES if page.startswith("docs/")} | {"CONTRIBUTING.md"}
    assert {page for page in pages if f"({page})" not in readme} == set()
    missing = {name for name in COMMANDS if f"`autoshard {name}" not in readme}
    assert missing == {"demo"}  # it is `make demo`
