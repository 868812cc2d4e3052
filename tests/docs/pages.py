"""The documents, and parts of them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "experiments/**/*.md")
    for page in ROOT.glob(pattern)
)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELL = ("", "bash", "sh", "shell", "console")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(text: str) -> str:
    """Returns the text without code blocks."""
    return _BLOCK.sub("", text)


def shell_lines(text: str) -> list[str]:
    """Returns the lines of shell blocks, with continuation lines joined."""
    blocks = (body for language, body in _BLOCK.findall(text) if language in _SHELL)
    return [
        line.removeprefix("$ ")
        for body in blocks
        for line in re.sub(r"\\\n\s*", " ", body).splitlines()
    ]


def python_blocks(text: str) -> list[str]:
    """Returns the contents of Python blocks."""
    return [body for language, body in _BLOCK.findall(text) if language == "python"]


def code_spans(text: str) -> list[str]:
    """Returns code spans in prose, which may span lines."""
    spans = re.findall(r"(`+)(.+?)\1", prose(text), re.DOTALL)
    return [re.sub(r"\s+", " ", span).strip() for _, span in spans]
