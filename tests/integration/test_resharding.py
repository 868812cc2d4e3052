"""Tables move between ranks that train, and nothing is lost, whatever happens meanwhile."""

import os
import signal
import weakref
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from forked_ranks import run_forked
from small_model import Training, plan_of
from torch import distributed

from autoshard.integration import (
    load_checkpoint,
    plan_of_checkpoint,
    reshard,
    save_checkpoint,
)
from autoshard.integration.checkpoints import resharding
from autoshard.workload import ShardingPlan, UserError

A = plan_of(2, ("a", 0, 8, 1), ("b", 0, 16, 0), ("b", 16, 8, 1), ("c", 0, 16, 0), ("d", 0, 8, 0))
# Whole tables change places, slices their widths, and there are new slices.
B = plan_of(2, ("a", 0, 8, 0), ("b", 0, 8, 0), ("b", 8, 16, 1), ("c", 0, 8, 1), ("c", 8, 8, 0),
            ("d", 0, 8, 1))  # fmt: skip
# On three ranks, one of which has no table, and blocks of rows.
WHOLE = plan_of(3, ("a", 0, 8, 1), ("b", 0, 24, 0), ("c", 0, 16, 0), ("d", 0, 8, 0))
ROWS = plan_of(3, ("a", 0, 8, 0, 3), ("b", 0, 24, 2), ("c", 0, 16, 0, 3), ("d", 0, 8, 1))
# Slices that change ranks only, as row-wise Adagrad needs to go on alike.
SWAPPED = plan_of(2, ("a", 0, 8, 0), ("b", 0, 16, 1), ("b", 16, 8, 0), ("c", 0, 16, 1),
                  ("d", 0, 8, 0, 2))  # fmt: skip


def train(plans: list[ShardingPlan], optimizer: str) -> list[float]:
    """Losses of nine steps, with a plan for every three, and a learning rate that falls."""
    training, losses = Training(plans[0], optimizer), []
    for number, plan in enumerate(plans):
        before = weakref.ref(training.model.module.bags)
        if number:
            reshard(training.model, plan)
            assert (before() is None) == (plans[number - 1] != plan)
        for group in training.optimizer.param_groups:
            group["lr"] *= 0.9
        training.optimizer.zero_grad()  # tells the operators
        losses += training.steps(range(3 * number, 3 * number + 3))
    return losses


@pytest.mark.parametrize(
    ("optimizer", "first", "other"),
    [
        ("sgd", A, B),
        ("adagrad", A, B),
        ("adagrad", WHOLE, ROWS),
        ("rowwise_adagrad", WHOLE, ROWS),
        ("rowwise_adagrad", A, SWAPPED),
    ],
)
def test_moving_twice_changes_no_loss(
    optimizer: str, first: ShardingPlan, other: ShardingPlan
) -> None:
    ranks = first.num_devices
    expected, *_ = run_forked(ranks, train, [first, first, first], optimizer)
    found = run_forked(ranks, train, [first, other, first], optimizer)
    assert found == [pytest.approx(expected, abs=1e-5)] * ranks


Moment = Literal["moving", "saving", "after"]


def train_until_killed(folder: Path, moment: Moment, killed: int) -> None:
    """Saves by a plan, moves, and saves by the other one; a rank is killed on the way."""

    def die_at(number: int, then: Any) -> Any:
        """Runs a function so many times."""
        calls = iter(range(number))

        def run(*arguments: Any, **options: Any) -> Any:
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return then(*arguments, **options)

        return run

    training, dies = Training(A, "adagrad"), distributed.get_rank() == killed
    training.steps(range(3))
    save_checkpoint(folder / "3", {**training.state, "step": 3}, A)
    if dies and moment == "moving":
        resharding.batch_isend_irecv = die_at(2, resharding.batch_isend_irecv)
    try:
        reshard(training.model, B)
    except UserError as error:
        (folder / "said").write_text(str(error))
        return
    training.steps(range(3, 6))
    if dies and moment == "saving":
        torch.save = die_at(3, torch.save)
    save_checkpoint(folder / "6", {**training.state, "step": 6}, B)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()


def go_on(folder: Path) -> list[float]:
    training, state = Training(plan_of_checkpoint(folder), "adagrad"), {"step": 0}
    state |= training.state
    load_checkpoint(folder, state)
    return training.steps(range(state["step"], 9))


@pytest.mark.parametrize(
    ("moment", "killed", "step", "plan"),
    [
        ("moving", 0, 3, A),
        ("moving", 1, 3, A),
        ("saving", 0, 3, A),
        ("saving", 1, 3, A),
        ("after", 1, 6, B),
    ],
)
def test_a_rank_that_is_killed_costs_the_steps_since_the_checkpoint_only(
    moment: Moment, killed: int, step: int, plan: ShardingPlan, tmp_path: Path
) -> None:
    run_forked(2, train_until_killed, tmp_path, moment, killed, killed=killed)
    assert (tmp_path / "6").exists() == (moment != "moving")
    if moment == "moving":
        said = (tmp_path / "said").read_text()
        assert said.startswith("moving tables failed, most likely because a rank is gone (")
        assert said.endswith("): start all ranks again from the last checkpoint")
        assert "\n" not in said
    newest = max(tmp_path.glob("*/.metadata")).parent
    assert (newest.name, plan_of_checkpoint(newest)) == (str(step), plan)
    expected, *_ = run_forked(2, steps, A)
    found, *_ = run_forked(2, go_on, newest)
    assert found == pytest.approx(expected[step:], abs=1e-5)


def steps(plan: ShardingPlan) -> list[float]:
    return Training(plan, "adagrad").steps(range(9))


def refusals() -> list[str]:
    """What is said of plans that cannot be moved to; the training goes on by its own plan."""
    training = Training(A, "adagrad")
    copies = plan_of(2, ("a", 0, 8, 1), ("b", 0, 24, 0), ("c", 0, 16, 0), copied="d")
    others = [
        copies,
        WHOLE if distributed.get_rank() else A,
        ROWS,
        plan_of(2, *[("e", 0, 8, 0)], *[(name, 0, dim, 0) for name, dim in (("a", 8), ("b", 24))]),
    ]
    said = []
    for plan in others:
        with pytest.raises(UserError) as error:
            reshard(training.model, plan)
        said.append(str(error.value))
    training.model.module.bags.module_sharding_plan["b"].compute_kernel = "fused_uvm_caching"
    with pytest.raises(UserError) as error:
        reshard(training.model, B)
    said.append(str(error.value))
    assert training.steps(range(9)) == steps(A)
    return said


def test_what_cannot_be_moved_is_told_in_one_line() -> None:
    (said, _) = run_forked(2, refusals)
    copies, different, ranks, unknown, kernel = said
    assert "table bags.d has copies, which an optimizer of your own trains" in copies
    assert "use save_checkpoint, and load_checkpoint in a new model" in copies
    assert "ranks were given different plans" in different
    assert "the plan has blocks of rows for 3 devices, and 2 ranks train" in ranks
    assert "bags.e" in unknown
    assert "table bags.b runs in kernel fused_uvm_caching" in kernel
    assert not any("\n" in line for line in said)
