"""How every command starts and ends: a typed command line, one line for a fault, an exit code."""

import os
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn, TypeVar

import tyro
from rich.console import Console

from autoshard.workload import UserError

Config = TypeVar("Config")

BAD_INPUT = 2
INTERRUPTED = 130

console = Console(highlight=False)
error_console = Console(stderr=True, highlight=False, soft_wrap=True)


def run_command(
    main: Callable[[Config], None],
    config: type[Config],
    begun_with: Callable[[Config], Config] | None = None,
) -> NoReturn:
    """Parse the command line into `config`, run `main`, and leave with its exit code.

    The docstring of the config's class is the help text. Where an option says what others are by
    default, `begun_with` tells these defaults of what was parsed with the usual ones.
    """
    warnings.formatwarning = lambda message, *_args, **_options: f"note: {message}\n"
    asked = tyro.cli(config)
    if begun_with is not None:
        asked = tyro.cli(config, default=begun_with(asked))
    sys.exit(_exit_code(main, asked))


def _exit_code(main: Callable[[Config], None], config: Config) -> int:
    try:
        main(config)
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


def say_error(line: str) -> None:
    """One line to standard error, as it is."""
    error_console.print(line, markup=False)


def reason_of(error: BaseException) -> str:
    """What an error of a library says, in one line that fits ours."""
    return (str(error) or type(error).__name__).splitlines()[0][:200]
