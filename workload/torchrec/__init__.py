"""TorchRec, both ways: a model's tables come in, a plan to train by goes out.

Hands out `tables_of` (a model's tables, with lookups counted from a few batches), `to_torchrec`
(our plan as one for `DistributedModelParallel(plan=)`), `from_torchrec` (a running plan as ours),
`load_state` (weights into what is sharded), `with_even_columns` (for those who load them by
TorchRec), `planner` (our plans inside TorchRec's planner) and `plan_of_torchrec` (its own plan).

This is the one door to torchrec: it is imported when one of them is asked for, and without it one
line says what to install.
"""

from typing import TYPE_CHECKING

from autoshard.workload.errors import UserError
from autoshard.workload.lazy import lazy_exports

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
else:
    _load, __dir__ = lazy_exports(__name__)

    def __getattr__(name):  # noqa: ANN001, ANN202 - as type checkers see it, all is imported above
        try:
            return _load(name)
        except (ImportError, OSError) as error:  # OSError: a library that cannot be loaded
            reason = str(error).splitlines()[0][:160]
            raise UserError(
                f"TorchRec cannot be imported ({reason}): make setup TORCHREC=1 installs it"
            ) from error


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
