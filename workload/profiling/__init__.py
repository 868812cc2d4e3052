"""Access statistics of tables, counted in data.

Exports `profile` (tables with statistics, from a loader of batches) and `TableProfiler` (for data
in other forms). Imports only `workload`.
"""

from autoshard.workload.profiling.profiler import TableProfiler
from autoshard.workload.profiling.sources import profile

__all__ = ["TableProfiler", "profile"]
