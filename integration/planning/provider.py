"""`AutoShardProvider`: planners for the planning API of TorchRec 1.9 and newer."""

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.planner.types import StorageReservation, Topology

from autoshard.integration.planning.planner import AutoShardPlanner
from autoshard.workload.data_sheets import DATA_SHEETS
from autoshard.workload.errors import UserError

try:
    from torchrec.distributed.planner.provider import DefaultPlannerProvider
    from torchrec.distributed.planner.types import (
        PlannerSessionContext,
        PlannerVariant,
        ShardingPlanRequest,
    )
except ImportError:
    raise UserError(
        "AutoShardProvider is for the planning API of TorchRec 1.9, and an older one is "
        "installed: use AutoShardPlanner"
    ) from None

_GIB = 2**30
_BYTES_MS = 1e6  # in GB/s


class AutoShardProvider(DefaultPlannerProvider):  # type: ignore[misc]
    """Builds `AutoShardPlanner`s for `ShardingPlannerAPI` and its dry runs.

    Storage reservations, enumerators and what tables without a price are planned by are those of
    TorchRec's provider. So are topologies, but for memory and bandwidths of GPUs with a data sheet.

    Args:
        hardware: For each SKU a GPU by name (`h100-80gb`), or the file of a probe. SKUs that are
            called like a GPU here, such as H100, need none.
        options: Other arguments of `AutoShardPlanner`, such as `batches` or `objective`.
    """

    def __init__(self, hardware: Mapping[str, str] | None = None, **options: Any) -> None:
        self._hardware, self._options = dict(hardware or {}), options

    def build_topology(
        self, sku: str, request: ShardingPlanRequest, ctx: PlannerSessionContext
    ) -> Topology:
        """Returns TorchRec's topology; of a GPU with a data sheet, with its memory and bandwidths.

        What the request, or its override for the SKU, says comes first.
        """
        usual: Topology = super().build_topology(sku, request, ctx)
        own = (getattr(request, "per_sku_overrides", None) or {}).get(sku)
        hbm_gb = getattr(own, "hbm_gb", None) or request.hbm_gb
        sheet = DATA_SHEETS.get(self._hardware_of(sku, usual.compute_device, hbm_gb) or "")
        if sheet is None:
            return usual
        inside = getattr(own, "intra_host_bw", None) or sheet.link_gb_s * _BYTES_MS
        between = getattr(own, "inter_host_bw", None) or sheet.network_gb_s * _BYTES_MS
        ddr_gb = getattr(own, "ddr_gb", None)
        return Topology(
            world_size=usual.world_size,
            compute_device=usual.compute_device,
            hbm_cap=int((hbm_gb or sheet.memory_gb) * _GIB),
            ddr_cap=int(ddr_gb * _GIB) if ddr_gb else usual.devices[0].storage.ddr,
            local_world_size=usual.local_world_size,
            pod_size=request.pod_size,
            hbm_mem_bw=sheet.memory_gb_s * _BYTES_MS,
            intra_host_bw=inside,
            inter_host_bw=between,
            created_by_factory=True,
        )

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
            hardware=self._hardware_of(sku, topology.compute_device, request.hbm_gb),
            **self._options,
        )

    def _hardware_of(self, sku: str, device: str, hbm_gb: float | None) -> str | None:
        """Returns the hardware of a SKU; None if its name says nothing."""
        if sku in self._hardware or device == "cpu":
            return self._hardware.get(sku)
        named = sku.lower().replace("_", "-")
        alike = [name for name in DATA_SHEETS if name == named or name.startswith(f"{named}-")]
        if hbm_gb is not None:  # of several sizes, the one with that memory
            alike.sort(key=lambda name: abs(DATA_SHEETS[name].memory_gb - hbm_gb))
        return alike[-1 if hbm_gb is None else 0] if alike else None
