"""TorchRec's own planner as a sharder."""

from typing import TYPE_CHECKING

from autoshard.cost_model import CostModel
from autoshard.workload import ShardingPlan, ShardingTask
from autoshard.workload.data_sheets import DataSheet, data_sheet_of

if TYPE_CHECKING:
    from autoshard.integration.plans.own_planner import Ways


class TorchRecSharder:
    """Plans by TorchRec's planner.

    Args:
        ways: Ways that it chooses from: whole tables, also even slices of columns, also blocks of
            rows, or also copies.
        model: Cost model, which knows what the plans are for; by default this machine's devices.

    Raises:
        UserError: TorchRec is not installed.
    """

    def __init__(self, ways: "Ways", model: CostModel | None = None) -> None:
        from autoshard.integration import plan_of_torchrec  # an optional dependency

        self._plan = plan_of_torchrec
        self._ways = ways
        self._device_type: str | None = None
        self._sheet: DataSheet | None = None
        if model is not None:
            self._device_type = model.kind
            self._sheet = model.data_sheet or data_sheet_of(model.provenance.hardware)

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Returns a valid plan; raises PlanError if TorchRec finds none, or it does not fit."""
        return self._plan(task, self._ways, self._device_type, self._sheet)
