"""Measures, models and optimises how embedding tables are sharded over devices, on Ray.

The root of the repository is this package: `workload`, `benchmark`, `cost_model`, `envs`,
`sharders`, `integration` and `experiments` are its subpackages.
"""

__version__ = "0.2.0"
