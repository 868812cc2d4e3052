"""Measures the cost of shards and plans on the devices of a Ray cluster.

May import `workload`. Exports the pool (`BenchmarkPool`, `MeasuredCosts`), its results
(`Measurement`), the store (`MeasurementStore`, Parquet beside it) and the cost of plans
(`measure_plan`, `price_plan`).
"""

from typing import TYPE_CHECKING

from autoshard.workload.lazy import lazy_exports

if TYPE_CHECKING:
    from autoshard.benchmark.measurement import (
        Exchange,
        Measurement,
        MeasurementError,
        MeasureSettings,
        ReferenceLevel,
        Timing,
        TimingOptions,
    )
    from autoshard.benchmark.plan_cost import DeviceCost, PlanCost, measure_plan, price_plan
    from autoshard.benchmark.pool.fleet import PoolError
    from autoshard.benchmark.pool.pool import BenchmarkPool, MeasuredCosts
    from autoshard.benchmark.probe.report import MachineProbe, load_probe, save_probe
    from autoshard.benchmark.store.file import StoreError
    from autoshard.benchmark.store.measurements import MeasurementStore
    from autoshard.benchmark.store.parquet import (
        export_parquet,
        import_parquet,
        read_parquet,
        read_parquet_exchanges,
    )
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "BenchmarkPool",
    "DeviceCost",
    "Exchange",
    "MachineProbe",
    "MeasureSettings",
    "MeasuredCosts",
    "Measurement",
    "MeasurementError",
    "MeasurementStore",
    "PlanCost",
    "PoolError",
    "ReferenceLevel",
    "StoreError",
    "Timing",
    "TimingOptions",
    "export_parquet",
    "import_parquet",
    "load_probe",
    "measure_plan",
    "price_plan",
    "read_parquet",
    "read_parquet_exchanges",
    "save_probe",
]
