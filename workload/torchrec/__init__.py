"""TorchRec, both ways: a model's tables come in, a plan to train by goes out.

Hands out `tables_of` (a model's tables, with lookups counted from a few batches), `to_torchrec`
(our plan as one for `DistributedModelParallel(plan=)`), `from_torchrec` (a running plan as ours),
`load_state` (weights into what is sharded), `with_even_columns` (for those who load them by
TorchRec), `planner` (our plans inside TorchRec's planner) and `plan_of_torchrec` (its own plan).

This is the one door to torchrec: it is imported when one of them is asked for, and without it one
line says what to install.
"""

import importlib
from typing import TYPE_CHECKING, Any

from autoshard.workload.errors import UserError

if TYPE_CHECKING:
    from autoshard.workload.torchrec.models import ModelTables, tables_of
    from autoshard.workload.torchrec.own_planner import plan_of_torchrec
    from autoshard.workload.torchrec.planning import planner
    from autoshard.workload.torchrec.plans import (
        from_torchrec,
        to_torchrec,
        with_even_columns,
    )
    from autoshard.workload.torchrec.states import load_state

__all__ = [
    "ModelTables",
    "from_torchrec",
    "load_state",
    "plan_of_torchrec",
    "planner",
    "tables_of",
    "to_torchrec",
    "with_even_columns",
]

_ROOMS = {
    "ModelTables": "models",
    "from_torchrec": "plans",
    "load_state": "states",
    "plan_of_torchrec": "own_planner",
    "planner": "planning",
    "tables_of": "models",
    "to_torchrec": "plans",
    "with_even_columns": "plans",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        room = importlib.import_module(f"{__name__}.{_ROOMS[name]}")
    except (ImportError, OSError) as error:  # OSError: a library that is there and cannot be loaded
        reason = str(error).splitlines()[0][:160]
        raise UserError(
            f"TorchRec cannot be imported ({reason}): make setup TORCHREC=1 installs it"
        ) from error
    return getattr(room, name)
