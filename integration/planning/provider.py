"""`AutoShardProvider`: planners for the planning API of TorchRec 1.9 and newer."""

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.planner.types import StorageReservation, Topology

from autoshard.integration.planning.planner import AutoShardPlanner
from autoshard.workload.data_sheets import DATA_SHEETS
from autoshard.workload.errors import UserError

try:
    from torchrec.distributed.planner.provider import DefaultPlannerProvider
    from torchrec.distributed.planner.types import PlannerSessionContext, PlannerVariant
except ImportError:
    raise UserError(
        "AutoShardProvider is for the planning API of TorchRec 1.9, and an older one is "
        "installed: use AutoShardPlanner"
    ) from None


class AutoShardProvider(DefaultPlannerProvider):  # type: ignore[misc]
    """Builds `AutoShardPlanner`s for `ShardingPlannerAPI` and its dry runs.

    Topologies, storage reservations, enumerators and what tables without a price are planned by are
    those of TorchRec's provider.

    Args:
        hardware: For each SKU a GPU by name (`h100-80gb`), or the file of a probe. SKUs that are
            called like a GPU here, such as H100, need none.
        options: Other arguments of `AutoShardPlanner`, such as `batches` or `objective`.
    """

    def __init__(self, hardware: Mapping[str, str] | None = None, **options: Any) -> None:
        self._hardware, self._options = dict(hardware or {}), options

    def build_planner(
        self,
        sku: str,
        *,
        topology: Topology,
        storage_reservation: StorageReservation,
        ctx: PlannerSessionContext,
    ) -> AutoShardPlanner:
        """Returns the planner of a SKU; UserError for planners that TorchRec keeps to itself."""
        request = ctx.request
        config = request.planner_config
        if config.planner_variant not in (PlannerVariant.UNSET, PlannerVariant.OSS):
            raise UserError(
                f"planner_variant {config.planner_variant.value!r} is not open: leave it out, and "
                "autoshard plans"
            )
        return AutoShardPlanner(
            topology=topology,
            batch_size=request.batch_size,
            enumerator=self._build_enumerator(sku, topology, ctx),
            storage_reservation=storage_reservation,
            proposer=self._build_proposer(config, request.local_world_size),
            partitioner=self._build_partitioner(config),
            performance_model=self._build_performance_model(config, topology),
            stats=ctx.stats,
            constraints=request.constraints,
            debug=config.debug,
            timeout_seconds=config.timeout_seconds,
            hardware=self._hardware_of(sku, topology),
            **self._options,
        )

    def _hardware_of(self, sku: str, topology: Topology) -> str | None:
        """Returns the hardware of a SKU; None if its name says nothing."""
        if sku in self._hardware or topology.compute_device == "cpu":
            return self._hardware.get(sku)
        named = sku.lower().replace("_", "-")
        alike = [name for name in DATA_SHEETS if name == named or name.startswith(f"{named}-")]
        # Of several sizes, the one whose memory is that of the topology.
        memory_gb = topology.devices[0].storage.hbm / 2**30
        alike.sort(key=lambda name: abs(DATA_SHEETS[name].memory_gb - memory_gb))
        return next(iter(alike), None)
