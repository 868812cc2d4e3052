"""Runs a command: parses its typed options, prints errors as one line, and sets the exit code."""

import contextlib
import errno
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro
from rich.console import Console, RenderableType
from rich.text import Text

from autoshard.workload import UserError

Config = TypeVar("Config")

BAD_INPUT = 2
INTERRUPTED = 130

_program: str | None = None  # the command as typed; None: the script's name
_typed: Mapping[str, str] = {}  # what to type in place of each script


def set_program(name: str, typed: Mapping[str, str]) -> None:
    """Sets the name of the command, and what the user types in place of each `SCRIPT.py`."""
    global _program, _typed
    _program, _typed = name, typed


class _Console(Console):
    """A console whose texts name commands as the user types them, as `autoshard ppo-shard`."""

    def render_str(self, text: str, **options: Any) -> Text:
        named = re.sub(
            r"(?<![\w/])(?:experiments/)?(\w+\.py)\b",
            lambda found: _typed.get(found[1], found[0]),
            text,
        )
        return super().render_str(named, **options)


console = _Console(highlight=False, emoji=False)  # paths may have :x: in them
error_console = _Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def run_command(
    main: Callable[[Config], None],
    config: type[Config],
    begun_with: Callable[[Config], Config] | None = None,
) -> NoReturn:
    """Parses the command line into `config`, runs `main`, and exits with its code.

    Args:
        main: The command.
        config: Dataclass of its options; its docstring is the help text.
        begun_with: Returns the defaults to parse with, given what was parsed with the usual ones:
            for options that set the defaults of others.
    """
    warnings.formatwarning = lambda message, *_args, **_options: f"note: {message}\n"

    code = 0
    try:
        options = _parsed(config)
        if begun_with is not None:
            options = _parsed(config, default=begun_with(options))
        if re.search("(models|runs):/", str(vars(options))):
            from autoshard.experiments.console.mlflow_uris import with_copies  # few need it

            options = with_copies(options)
        main(options)
    except UserError as error:
        say_error(str(error))
        code = BAD_INPUT
    except KeyboardInterrupt as stop:
        say_error(f"interrupted{f': {stop}' if str(stop) else ''}")
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of our output has ended: nothing can be printed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f"{error.filename}: " if error.filename else ""
        say_error(f"{where}the disk is full, or a quota is: free some space and run again")
        code = BAD_INPUT
    sys.exit(code)


def _parsed(config: type[Config], **defaults: Any) -> Config:
    """Returns the options of the command line; UserError in place of tyro's box of lines."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            options: Config = tyro.cli(config, prog=_program, **defaults)
            return options
    except SystemExit as end:
        if end.code != BAD_INPUT:
            raise
        raise UserError(_line_of(box.getvalue())) from None


def _line_of(box: str) -> str:
    """Returns what a box of tyro's says, in Unicode or ASCII, without what options mean."""
    parts: list[list[str]] = [[]]
    for row in re.sub(r"\x1b\[[\d;]*m", "", box).splitlines()[1:-1]:
        text = row.strip("│").removeprefix(" ").rstrip()
        if text.strip() and not text.strip("─- "):
            parts.append([])
        elif not text.startswith(" " * 8):  # descriptions are indented
            parts[-1].append(text.strip())
    command = _program or Path(sys.argv[0]).name
    said = [" ".join(part) for part in parts if part and "helptext" not in part[0]]
    return f"{'; '.join(said).rstrip('.')}: {command} --help describes the options"


def say(line: str) -> None:
    """Prints a line as it is, without markup."""
    console.print(line, markup=False, soft_wrap=True)


def show(parts: Iterable[RenderableType]) -> None:
    """Prints lines and tables of a report as they are made."""
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str), markup=False)


def note(line: str) -> None:
    """Prints a note as it is, without markup."""
    say(f"note: {line}")


def notice(line: str) -> None:
    """Prints a note about the run itself, such as what it waits for, to standard error."""
    say_error(f"note: {line}")


def say_error(line: str) -> None:
    """Prints a line to standard error as it is, without markup."""
    error_console.print(line, markup=False)
