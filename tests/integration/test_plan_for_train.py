"""`plan_for_train`: the plan of a checkpoint where the number of ranks is the same."""

from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_forked
from small_model import TABLES, SmallModel, Training, plan_of
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim import SGD

from autoshard.cost_model.hardware import load_quietly
from autoshard.integration import plan_for_train, save_checkpoint, to_torchrec
from autoshard.workload import ShardingPlan, UserError

# No planner places tables so: a split, and the rest on one rank.
ODD = plan_of(2, ("a", 0, 8, 1), ("b", 0, 8, 0), ("b", 8, 16, 1), ("c", 0, 16, 1), ("d", 0, 8, 1))


def model() -> SmallModel:
    made = SmallModel(TABLES)
    _apply_optimizer_in_backward(SGD, made.bags.parameters(), {"lr": 0.1})
    return made


def planned(checkpoint: Path | None, of: SmallModel | None = None, **options: Any) -> Any:
    known = {"cost_model": load_quietly("cpu"), "batch_size": 64, **options}
    return plan_for_train(of or model(), checkpoint, **known)


def failure(*arguments: Any, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        planned(*arguments, **options)
    return str(error.value)


def begins_and_goes_on(folder: Path) -> list[Any]:
    anew = planned(None)
    assert anew[0].plan == to_torchrec(anew[1], model(), device_type="cpu").plan
    training = Training(ODD, "sgd")
    save_checkpoint(folder, training.state, ODD)
    again = planned(folder)
    assert again[0].plan == to_torchrec(ODD, model(), device_type="cpu").plan
    mean = model()
    for table in mean.bags.embedding_bag_configs():
        table.pooling = PoolingType.MEAN
    return [
        anew[1],
        again[1],
        failure(folder.parent / "none"),
        failure(None, topology=Topology(3, "cpu", created_by_factory=True)),
        failure(None, mean),
    ]


def goes_on_alone(folder: Path) -> ShardingPlan:
    found: ShardingPlan = planned(folder)[1]
    return found


def test_the_plan_of_a_checkpoint_is_kept_by_as_many_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    first, second = run_forked(2, begins_and_goes_on, folder)
    assert first == second
    anew, again, none, ranks, unpriced = first
    assert anew.num_devices == 2
    assert anew != ODD
    assert again == ODD
    assert "is no checkpoint" in none
    assert "the topology has 3 ranks, and the process group 2" in ranks
    assert "there is no plan to save: planned by TorchRec's planner" in unpriced
    (alone,) = run_forked(1, goes_on_alone, folder)
    assert alone.num_devices == 1


def test_it_needs_a_process_group() -> None:
    assert "init_process_group" in failure(None)
