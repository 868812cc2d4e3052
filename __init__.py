"""Measures, models and optimises how embedding tables are sharded over devices, on Ray.

The root of the repository is this package: `workload`, `benchmark`, `cost_model`, `envs`,
`sharders`, `integration` and `experiments` are its subpackages. Importing it loads none of what
they need.
"""

from typing import TYPE_CHECKING

from autoshard.workload.lazy import lazy_exports

# What this imports `if TYPE_CHECKING` is exported, and loaded when it is used.
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = ["__version__"]

__version__ = "0.2.0"
