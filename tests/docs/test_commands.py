"""Command lines in documents parse, and links have targets.

The commands' own parsers check them; nothing runs and no file needs to exist.
"""

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from typing import Any, get_type_hints

import pytest
import tyro
from pages import PAGES, ROOT, code_spans, prose, shell_lines, text_of

from autoshard.experiments.console.commands import COMMANDS as SUBCOMMANDS

EXPERIMENTS = ROOT / "experiments"
MODULE = "autoshard.experiments."
COMMANDS = {path.name: MODULE + path.stem for path in EXPERIMENTS.glob("[!_]*.py")} | {
    "run_bench.py": "run_bench"  # tests/run_bench.py
}
BETWEEN_COMMANDS = frozenset(("&&", "||", "|", ";", "&", ">", ">>"))

Invocation = tuple[str, tuple[str, ...]]  # the command's module, its arguments


def invocations(line: str) -> Iterator[Invocation]:
    """Yields our commands in a shell line: alone, by ray submit, by ray job submit, in quotes."""
    if MODULE not in line and ".py" not in line and not line.startswith("autoshard "):
        return  # output may not parse as shell
    words = shlex.split(line, comments=True)
    for place, word in enumerate(words):
        if " " in word:
            yield from invocations(word)
        elif word == "autoshard" and place == 0:
            name, *rest = words[1:]
            if name in SUBCOMMANDS:
                yield MODULE + SUBCOMMANDS[name], tuple(arguments(rest))
        elif (module := module_of(word, place == 0)) is not None:
            yield module, tuple(arguments(words[place + 1 :]))


def module_of(word: str, first: bool) -> str | None:
    """Returns the module that a word names; at the start of a line, the folder may be missing.

    The module of a file that does not exist is returned as well; importing it fails.
    """
    if word.startswith(MODULE):
        return word
    if found := re.fullmatch(r"(?:\./)?experiments/(.+)\.py", word):
        return MODULE + found[1].replace("/", ".")
    if word == "tests/run_bench.py":
        return "run_bench"
    return COMMANDS.get(word) if first else None


def arguments(words: list[str]) -> Iterator[str]:
    """Yields the arguments up to the next command; `--` separates those of `ray submit`."""
    for place, word in enumerate(words):
        if word in BETWEEN_COMMANDS:
            return
        if place or word != "--":
            yield word


@cache
def config_of(module: str) -> type[Any]:
    """Returns the typed command line, the argument of `main`."""
    command = importlib.import_module(module)
    config: type[Any] = next(iter(get_type_hints(command.main).values()))
    return config


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Returns all options, including those of subcommands."""
    found: set[str] = set()
    for action in parser._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                found |= options_of(each)
    return found


@cache
def options(module: str) -> set[str]:
    return options_of(tyro.extras.get_parser(config_of(module)))


def parse(module: str, arguments: tuple[str, ...]) -> None:
    """Parses arguments as the command does; fails the test if it exits with an error."""
    try:
        tyro.cli(config_of(module), args=arguments)
    except SystemExit as left:
        if left.code:
            pytest.fail(f"not understood: {module} {shlex.join(arguments)}")


def typed(page: str) -> list[Invocation]:
    """Returns commands in code blocks, and complete commands in sentences."""
    text = text_of(page)
    said = [span for span in code_spans(text) if re.match(r"python |ray ", span)]
    return [each for line in (*shell_lines(text), *said) for each in invocations(line)]


@pytest.mark.parametrize(
    ("page", "module", "arguments"),
    [
        pytest.param(page, *each, id=f"{page}: {each[0]} {' '.join(each[1])}")
        for page in PAGES
        for each in dict.fromkeys(typed(page))
    ],
)
def test_a_command_line_parses(page: str, module: str, arguments: tuple[str, ...]) -> None:
    parse(module, arguments)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_a_mentioned_option_exists(page: str) -> None:
    """Options after a command must be its own; options alone must be those of any command."""
    known = set().union(*(options(stem) for stem in COMMANDS.values()))
    for span in code_spans(text_of(page)):
        first, _, rest = span.partition(" ")
        if first == "autoshard" and rest[:1].isalpha():
            name, _, rest = rest.partition(" ")
            assert name in SUBCOMMANDS, span
            first = f"{SUBCOMMANDS[name]}.py"
        mentioned = re.findall(r"(?<!\S)--[a-z][\w.-]*", rest)
        if first in COMMANDS:
            assert set(mentioned) <= options(COMMANDS[first]), span
        elif re.match(r"--[a-z]", first):
            assert {first, *mentioned} <= known, span


def test_commands_are_found_however_they_are_typed() -> None:
    ppo = (f"{MODULE}ppo_shard", ("--seed", "1"))
    for line in (
        "python experiments/ppo_shard.py --seed 1  # with --some more",
        "ray submit CLUSTER experiments/ppo_shard.py -- --seed 1",
        "ray job submit --address http://localhost:8265 --working-dir . -- "
        "python experiments/ppo_shard.py --seed 1",
        "ray exec CLUSTER 'python -m autoshard.experiments.ppo_shard --seed 1'",
        "ppo_shard.py --seed 1",
        "autoshard ppo-shard --seed 1",
        "cd autoshard && python experiments/ppo_shard.py --seed 1 | tee log",
    ):
        assert [*invocations(line)] == [ppo], line
    assert [*invocations("python my_own.py --seed 1")] == []


@pytest.mark.parametrize(
    "block",
    [
        "python experiments/shard.py --tables t.csv --num-devices 8 --memory-gb 32 --ouut a.json",
        "python experiments/shard.py --tables t.csv --num-devices eight --memory-gb 32",
        "python experiments/shard.py --tables t.csv \\\n    --memory-gb 8",
        "python experiments/store.py inform costs.db",
    ],
)
def test_a_wrong_command_line_is_found(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = shell_lines(f"Some text:\n\n```\n{block}\n```\n")
    ((module, arguments),) = invocations(line)
    with pytest.raises(pytest.fail.Exception, match="not understood"):
        parse(module, arguments)
    assert capsys.readouterr().err  # with a reason


def test_a_removed_command_is_found() -> None:
    ((module, arguments),) = invocations("python experiments/noises.py --quick")
    with pytest.raises(ModuleNotFoundError):
        parse(module, arguments)


@pytest.mark.parametrize("page", PAGES)
def test_make_has_the_targets(page: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = text_of(page)
    lines = [*shell_lines(text), *code_spans(text)]
    named = {found[1] for line in lines for found in re.finditer(r"(?:^|&& )make ([\w-]+)", line)}
    assert named <= targets


# Links.


def anchors(text: str) -> set[str]:
    """Returns the anchors of headings, as GitHub creates them."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def links(text: str) -> list[str]:
    """Returns targets of links and pictures in this repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    return [each for each in found if not re.match(r"[a-z]+:", each)]


@pytest.mark.parametrize("page", PAGES)
def test_links_have_targets(page: str) -> None:
    here = (ROOT / page).parent
    for link in links(text_of(page)):
        target, _, anchor = link.partition("#")
        path = here / target if target else ROOT / page
        assert path.exists(), link
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), link
