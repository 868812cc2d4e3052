"""Published systems by our own code: real training from nothing, tables that stay whole ever after,
and what a recipe does not let go.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run

from autoshard.benchmark import MeasurementStore
from autoshard.cost_model import CostModel, EstimatedCosts
from autoshard.envs.options import OPTION_KINDS
from autoshard.experiments.ppo_shard import main
from autoshard.experiments.training.config import (
    Hyperparameters,
    LearnerName,
    PPOShardConfig,
    RecipeName,
    TrainingSetup,
)
from autoshard.experiments.training.ppo import Trainer, make_environment
from autoshard.experiments.training.recipes import RECIPES, recipe_defaults
from autoshard.sharders import PolicySharder, load_policy
from autoshard.sharders.policy.network import PolicyNetwork, PolicyShape
from autoshard.sharders.policy.rollouts import PolicyRollouts, RolloutConfig
from autoshard.workload import Device, EmbeddingTable, ShardingTask, UserError

Tables = tuple[EmbeddingTable, ...]
GIANT = EmbeddingTable("giant", 100_000, 256, 150.0, zipf_alpha=0.8)
TINY = (
    "--tables synthetic:80:1:small --num-tables 6 --num-devices 2 --check-tasks 2 "
    "--batch-size 256 --memory-fill 0.1-0.6 --test-seconds 0 --iterations 2 --check-every 1 "
    "--json result.json --out run"
)


@pytest.fixture(scope="module", params=RECIPES)
def trained(
    request: pytest.FixtureRequest, cluster: object, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RecipeName, Path]:
    """A short run by a recipe, from a folder of its own."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    options = {"autoshard": "--num-envs 8", "dreamshard": "--num-envs 20 --collect 16"}
    run("ppo_shard.py", f"--recipe {name} {TINY} {options[name]}", folder)
    return name, folder


def tight(tables: Tables, devices: int) -> ShardingTask:
    """A task whose memory is 80 % full; the largest table fits in half of a device."""
    loose = ShardingTask(tables, Device.uniform(devices, 2**50), 1024)
    sizes = [loose.table_bytes(table) for table in tables]
    room = max(2 * max(sizes), int(sum(sizes) / devices / 0.8) + 1)
    return replace(loose, devices=Device.uniform(devices, room))


def test_what_a_recipe_trains_places_whole_tables_anywhere(
    trained: tuple[RecipeName, Path], oracle: EstimatedCosts, tables: Tables
) -> None:
    name, folder = trained
    policy = load_policy(folder / "run")
    assert policy.trained["recipe"] == name
    assert policy.trained["objective"] == "compute"
    sharder = PolicySharder(policy, oracle)
    for task in (tight(tables[:40], 5), tight((GIANT, *tables[:7]), 3), tight(tables[:1], 1)):
        plan = sharder.shard(task)
        plan.check(task)
        assert {len(places) for places in plan.by_table().values()} == {1}


def test_a_run_keeps_its_recipe(trained: tuple[RecipeName, Path]) -> None:
    """With what was asked for beside it, also where it is gone on with."""
    name, folder = trained
    kept = json.loads((folder / "run" / "training.json").read_text())["config"]
    found = PPOShardConfig.from_json(kept)
    recipe = RECIPES[name]
    for fixed in ("learner", "goal", "reward", "objective"):
        assert getattr(found, fixed) == getattr(recipe, fixed)
    assert found.hyper == recipe.hyper
    run("ppo_shard.py", "--resume --iterations 3 --json more.json --out run", folder)
    assert json.loads((folder / "more.json").read_text())["iterations"] == 3
    assert load_policy(folder / "run").trained["recipe"] == name


def test_the_cost_model_of_dreamshard_learns_what_its_policy_plans(
    trained: tuple[RecipeName, Path],
) -> None:
    """Plans of training tables are measured in rounds; episodes are rewarded by the model."""
    name, folder = trained
    told = json.loads((folder / "result.json").read_text())["iterations_here"]
    with MeasurementStore(folder / "run" / "costs.db") as store:
        found = store.measurements()
    if name == "autoshard":
        assert not found
        return
    shards = 16 * 2  # plans of two devices, of which one may be empty
    first, last = (line["requested_shards"] for line in told)
    assert 0 < first <= shards
    assert last == 0  # nobody would learn from it
    assert len(found) > shards  # before the first iteration as well
    assert "new_shards" in told[0]


@pytest.mark.parametrize("name", RECIPES)
def test_it_starts_from_nothing(
    name: RecipeName, oracle: EstimatedCosts, many_tables: Tables
) -> None:
    """Untrained it draws plans as if by chance, where ours draws the greedy's."""
    task = tight(many_tables[:60], 4)
    nothing, greedy = (
        PolicyRollouts(PolicyNetwork(shape).eval(), oracle).run(
            task,
            [RolloutConfig(), *[RolloutConfig(sampled=True)] * 8],
            split=False,
            rng=torch.Generator().manual_seed(0),
        )[1:]
        for shape in (RECIPES[name].hyper.shape, PolicyShape())
    )
    ours, theirs = (np.mean([episodes.plan_ms for episodes in some]) for some in (nothing, greedy))
    assert ours > 1.2 * theirs


def test_reinforce_makes_one_gradient_of_all_that_was_played(
    cluster: object, model: CostModel, many_tables: Tables, tmp_path: Path
) -> None:
    """Whatever PPO's epochs and minibatches are: then nothing has moved that could be clipped."""
    config = PPOShardConfig(
        num_tables="4-8",
        num_devices="2-3",
        memory_fill="0.1",
        memory_unevenness=0.0,
        reward="estimated",
        learner="reinforce",
        num_envs=20,
        hyper=Hyperparameters(epochs=3, minibatch=8, group_size=5, shape=PolicyShape(kinds=())),
    )
    trainer = Trainer(TrainingSetup(config, {"train": many_tables}, model, tmp_path), seed=0)
    for made in (1, 2):
        told = trainer.iterate()
        assert np.isfinite(told["policy_loss"])
        assert told["episodes"] == 20
        (gradients,) = trainer.algorithm.learner_group.foreach_learner(gradients_made)
        assert gradients.get() == {made}
    trainer.stop()


def gradients_made(learner: Any) -> set[int]:
    (module,) = learner.module.keys()
    return {
        int(state["step"])
        for _, optimizer in learner.get_optimizers_for_module(module)
        for state in optimizer.state.values()
    }


@pytest.mark.parametrize("learner", ["critic", "reinforce"])
def test_games_of_whole_tables_never_offer_to_halve(
    learner: LearnerName, model: CostModel, many_tables: Tables, tmp_path: Path
) -> None:
    for kinds in ((), OPTION_KINDS):
        config = PPOShardConfig(
            num_tables="9",
            reward="estimated",
            learner=learner,
            hyper=Hyperparameters(group_size=2, shape=PolicyShape(kinds=kinds)),
        )
        setup = TrainingSetup(config, {"train": many_tables}, model, tmp_path)
        episodes = make_environment(setup, seed=0, num_envs=4)
        episodes.reset(seed=0)
        assert bool(episodes.episodes.splittable.any()) is bool(kinds)


CONTRADICTIONS = [
    (
        "autoshard --goal maximum",
        "--recipe autoshard goes with --goal balance: leave out --goal max",
    ),
    ("autoshard --learner reinforce", "with --learner critic: leave out --learner reinforce"),
    ("dreamshard --reward mixed", "goes with --reward estimated: leave out --reward mixed"),
    (
        "dreamshard --hyper.shape.kinds split",
        "with --hyper.shape.kinds: leave out --hyper.shape.ki",
    ),
    ("dreamshard --hyper.shape.sharpness 9", "leave out --hyper.shape.sharpness 9.0, or the rec"),
    ("dreamshard --collect 0", "--collect must be more than 0, got 0"),
    ("autoshard --hyper.entropy 0", "--hyper.entropy must be more than 0, got 0"),
    (
        "autoshard --objective step",
        "--objective compute: leave out --objective step, or the recipe",
    ),
    ("dreamshard --families all", "goes without --families: leave out --families all, or the"),
    ("autoshard --resume", "--resume uses the run's own recipe: leave out --recipe"),
]


@pytest.mark.parametrize(("asked", "line"), CONTRADICTIONS)
def test_what_contradicts_a_recipe_is_one_line(asked: str, line: str, tmp_path: Path) -> None:
    """Also where an option says what is the default without the recipe."""
    done = run("ppo_shard.py", f"--recipe {asked} --out run", tmp_path, code=2)
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"collect": 4}, "--reward mixed measures plans already: leave out --collect 4"),
        ({"collect": -1}, "--collect must be at least 0, got -1"),
    ],
)
def test_what_recipes_are_made_of_is_checked_without_them(
    changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=line.replace(".", r"\.")):
        main(replace(PPOShardConfig(), **changes))


def test_without_a_recipe_all_is_as_it_was() -> None:
    assert recipe_defaults(PPOShardConfig(num_envs=9)) == PPOShardConfig()
