"""TorchRec models and plans, and the door for Python.

Exports `AutoShardPlanner` (in the place of TorchRec's planner), `AutoShardProvider` (for TorchRec's
planning API), `plan` and `Planned` (a plan in one call), `plan_for_train` (the plan of a training
that may restart), `tables_of` (tables of a model, with lookups counted from batches), `to_torchrec`
(a plan for `DistributedModelParallel(plan=)`), `replica_options` (arguments of `DMPCollection` for
a plan with replica groups), `from_torchrec` (the plan of a sharded model), `load_state` (weights
into a sharded model), `save_checkpoint`, `load_checkpoint` and `plan_of_checkpoint` (checkpoints
for any plan), `reshard` (another plan while a model trains), `with_even_columns` (for loading by
TorchRec), `TorchRecSharder` (TorchRec's planner as a sharder), `AccessStatistics` (of a profiled
table, for TorchRec's caches), `memory_constraints` (rows in slower memory, for TorchRec's planner)
and `with_hot_rows` (a model with `HotCold` collections).

TorchRec is imported only here, when one of these is used. May import `sharders` and all below;
inner packages only those below them: `planning` and `rehearsal`, `checkpoints`, `plans`, `models`.
"""

from typing import TYPE_CHECKING

from autoshard.workload.errors import UserError
from autoshard.workload.lazy import lazy_exports

if TYPE_CHECKING:
    from autoshard.integration.checkpoints.folders import (
        load_checkpoint,
        plan_of_checkpoint,
        save_checkpoint,
    )
    from autoshard.integration.checkpoints.resharding import reshard
    from autoshard.integration.checkpoints.states import load_state
    from autoshard.integration.models.tables import ModelTables, tables_of
    from autoshard.integration.planning.for_train import plan_for_train
    from autoshard.integration.planning.one_call import Planned, plan
    from autoshard.integration.planning.planner import AutoShardPlanner
    from autoshard.integration.planning.provider import AutoShardProvider
    from autoshard.integration.plans.cache_statistics import AccessStatistics
    from autoshard.integration.plans.conversion import (
        from_torchrec,
        replica_options,
        to_torchrec,
        with_even_columns,
    )
    from autoshard.integration.plans.hot_cold import HotCold, with_hot_rows
    from autoshard.integration.plans.sharder import TorchRecSharder
    from autoshard.integration.plans.slower_memory import memory_constraints
else:
    _load, __dir__ = lazy_exports(__name__)

    def __getattr__(name):  # noqa: ANN001, ANN202 - as type checkers see it, all is imported above
        try:
            return _load(name)
        except (ImportError, OSError) as error:  # OSError: a library that cannot be loaded
            reason = str(error).splitlines()[0][:160]
            raise UserError(
                f"TorchRec cannot be imported ({reason}): pip install 'autoshard[torchrec]' and, "
                "by --no-deps, the torchrec of the version that fbgemm has; make setup does both"
            ) from error


__all__ = [
    "AccessStatistics",
    "AutoShardPlanner",
    "AutoShardProvider",
    "HotCold",
    "ModelTables",
    "Planned",
    "TorchRecSharder",
    "from_torchrec",
    "load_checkpoint",
    "load_state",
    "memory_constraints",
    "plan",
    "plan_for_train",
    "plan_of_checkpoint",
    "replica_options",
    "reshard",
    "save_checkpoint",
    "tables_of",
    "to_torchrec",
    "with_even_columns",
    "with_hot_rows",
]
