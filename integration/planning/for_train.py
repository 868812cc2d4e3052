"""`plan_for_train`: the plan of a training that may restart, also with another number of ranks."""

from pathlib import Path
from typing import Any

from torch import distributed, nn
from torchrec.distributed.types import ModuleSharder
from torchrec.distributed.types import ShardingPlan as TorchRecPlan

from autoshard.integration.checkpoints.folders import plan_of_checkpoint
from autoshard.integration.planning.planner import AutoShardPlanner
from autoshard.integration.planning.ranks import on_first_rank
from autoshard.workload.errors import UserError
from autoshard.workload.plans.plan import ShardingPlan


def plan_for_train(
    model: nn.Module,
    checkpoint: Path | str | None = None,
    sharders: list[ModuleSharder[Any]] | None = None,
    **options: Any,
) -> tuple[TorchRecPlan, ShardingPlan]:
    """Returns the plan of a checkpoint if it is for as many ranks, else a new one; on all ranks.

    All ranks of the process group call it, and the first one plans.

    Args:
        model: Model that is not sharded; it may be on device meta.
        checkpoint: Folder that `save_checkpoint` wrote. None: training begins.
        sharders: TorchRec's sharders; by default those of TorchRec.
        options: Arguments of `AutoShardPlanner`, such as `batch_size` and `batches`.

    Returns:
        The plan for `DistributedModelParallel(plan=)`, and that for `save_checkpoint`.

    Raises:
        PlannerError: There is no plan that fits, or constraints leave a table no option.
        UserError: The checkpoint cannot be read, an option is not valid, ranks differ, or
            TorchRec's planner had to plan all tables, which leaves no plan to save.
    """
    group = distributed.group.WORLD if distributed.is_initialized() else None
    if group is None:
        raise UserError(
            "the process group is not initialised: call torch.distributed.init_process_group first"
        )
    topology = options.get("topology")
    ranks = group.size() if topology is None else topology.world_size

    def make() -> tuple[TorchRecPlan, ShardingPlan]:
        last = None if checkpoint is None else plan_of_checkpoint(checkpoint)
        kept = {"sharder": last} if last is not None and last.num_devices == ranks else {}
        planner = AutoShardPlanner(**{**options, **kept})
        found = planner.plan(model, sharders)
        if planner.sharding_plan is None:
            raise UserError(
                f"there is no plan to save: {'; '.join(planner.notes)}; call "
                "AutoShardPlanner.collective_plan, and save by torch.distributed.checkpoint"
            )
        return found, planner.sharding_plan

    return on_first_rank(group, model, ranks, make)
