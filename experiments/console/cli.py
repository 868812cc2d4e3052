"""How every command starts and ends: a typed command line, one line for a fault, an exit code."""

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

import tyro
from rich.console import Console

from autoshard.workload import UserError

Config = TypeVar("Config")

BAD_INPUT = 2
INTERRUPTED = 130

VERIFIED = {"--verified": "measuring corrects the cost model alone: leave it out"}  # dropped

_program: str | None = None  # by which name people call the command, if not by its script's

console = Console(highlight=False)
error_console = Console(stderr=True, highlight=False, soft_wrap=True)


def set_program(name: str) -> None:
    """Sets the name of the command for help texts and errors; by default it is its script's."""
    global _program
    _program = name


def run_command(
    main: Callable[[Config], None],
    config: type[Config],
    begun_with: Callable[[Config], Config] | None = None,
    dropped: Mapping[str, str] | None = None,
) -> NoReturn:
    """Parses the command line into `config`, runs `main`, and leaves with its exit code.

    Args:
        main: The command.
        config: Dataclass of its options; its docstring is the help text.
        begun_with: Returns the defaults to parse with, given what was parsed with the usual ones:
            for options that set the defaults of others.
        dropped: Options that older versions had, or values of options, and what to use instead:
            `{"--old-name": "use --new-name", "--learner both": "leave it out"}`.
    """
    warnings.formatwarning = lambda message, *_args, **_options: f"note: {message}\n"

    def parse_and_run() -> None:
        _check_dropped(dropped or {}, sys.argv[1:])
        asked = tyro.cli(config, prog=_program)
        if begun_with is not None:
            asked = tyro.cli(config, prog=_program, default=begun_with(asked))
        main(asked)

    sys.exit(_exit_code(parse_and_run))


def _check_dropped(dropped: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Raises UserError if the arguments name a dropped option, or give it a dropped value."""
    words: list[str] = []
    for argument in arguments:
        option, *value = argument.split("=", 1)
        words += [option.replace("_", "-") if option.startswith("--") else option, *value]
    line = f" {' '.join(words)} "
    for old, instead in dropped.items():
        if f" {old} " in line:
            raise UserError(f"{old} no longer exists: {instead}")


def _exit_code(run: Callable[[], None]) -> int:
    try:
        run()
    except UserError as error:
        say_error(str(error))
        return BAD_INPUT
    except KeyboardInterrupt as stop:
        say_error(f"interrupted{f': {stop}' if str(stop) else ''}")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone: nothing is left to be said
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def note(line: str) -> None:
    """Prints a note for people, as it is."""
    console.print(f"note: {line}", markup=False, soft_wrap=True)


def say_error(line: str) -> None:
    """One line to standard error, as it is."""
    error_console.print(line, markup=False)


def reason_of(error: BaseException) -> str:
    """What an error of a library says, in one line that fits ours."""
    return (str(error) or type(error).__name__).splitlines()[0][:200]
