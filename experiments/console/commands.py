"""The command `autoshard`: one subcommand for each script in `experiments/`, of its name.

A subcommand runs its script as a script, so it has the same options and loads nothing else.
"""

import ast
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

from autoshard.experiments.console import cli

_MODULES = (
    "shard",
    "compare",
    "collect_costs",
    "profile_tables",
    "train_cost_model",
    "ppo_shard",
    "tune_shard",
    "analyze_sweep",
    "plan_world",
    "diff_plans",
    "check_drift",
    "train_torchrec",
    "rehearse",
    "doctor",
    "pool",
    "probe",
    "store",
    "demo",
)
COMMANDS = {module.replace("_", "-"): module for module in _MODULES}  # by what users type
_SCRIPTS = "autoshard.experiments"


def main() -> None:
    """Runs the subcommand that the command line names."""
    name, *options = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        cli.console.print(_help(), markup=False, soft_wrap=True)
    elif name == "--version":
        from autoshard import __version__

        cli.say(f"autoshard {__version__}")
    elif name.startswith("--tyro-"):
        _complete()
    elif name not in COMMANDS:
        cli.say_error(f"autoshard {name}: there is no such command: use {', '.join(COMMANDS)}")
        sys.exit(cli.BAD_INPUT)
    else:
        typed = {f"{script}.py": f"autoshard {command}" for command, script in COMMANDS.items()}
        cli.set_program(f"autoshard {name}", typed)
        sys.argv[1:] = options
        runpy.run_module(f"{_SCRIPTS}.{COMMANDS[name]}", run_name="__main__", alter_sys=True)


def _help() -> str:
    """Returns the commands, each with the first line of its script's docstring."""
    lines = ["usage: autoshard COMMAND [OPTIONS]", ""]
    for name, script in COMMANDS.items():
        source = (Path(__file__).parents[1] / f"{script}.py").read_text()
        text = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
        lines.append(f"  {name:<18}{text}")
    return "\n".join([*lines, "", "autoshard COMMAND --help shows the options of a command."])


def _complete() -> None:
    """Prints or writes the completion of all commands for a shell."""
    import tyro

    scripts = {name: import_module(f"{_SCRIPTS}.{script}") for name, script in COMMANDS.items()}
    configs = {
        name: next(iter(get_type_hints(script.main).values())) for name, script in scripts.items()
    }
    tyro.extras.subcommand_cli_from_dict(configs, prog="autoshard")
