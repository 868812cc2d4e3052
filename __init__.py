"""Measures, models and optimises how embedding tables are sharded over devices, on Ray.

Exports `AutoShardPlanner`, which takes the place of TorchRec's planner, and `plan`, a plan in one
call. The root of the repository is this package: `workload`, `benchmark`, `cost_model`, `envs`,
`sharders`, `integration` and `experiments` are its subpackages. Importing it loads none of what
they need.
"""

from typing import TYPE_CHECKING

from autoshard.workload.lazy import lazy_exports

# What this imports is exported, and loaded when it is used.
if TYPE_CHECKING:
    from autoshard.integration import AutoShardPlanner, Planned, plan
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__version__ = "0.2.0"
__all__ = ["AutoShardPlanner", "Planned", "__version__", "plan"]
