"""The two environments of the episode for Gymnasium: one episode, and many side by side."""

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from episodes import AMPLE, Sketch, fewest, greedily, instance, ragged, seeds
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from hypothesis import given

from autoshard.envs import (
    Balance,
    RandomTaskSampler,
    ShardingEnv,
    ShardingVectorEnv,
    TableCatalog,
    TaskInstance,
)
from autoshard.envs.options import OPTION_KINDS

SMALL = RandomTaskSampler(
    (3, 7), (2, 4), fill=(0.9, 1.0), unevenness=0.7
)  # with infeasible ends now and then
NUM_ENVS = 4


def some(mask: np.ndarray, rng: np.random.Generator) -> int:
    """An action, now and then a forbidden one."""
    allowed = np.flatnonzero(mask)
    if not len(allowed) or rng.random() < 0.02:
        return int(rng.integers(len(mask)))
    return int(rng.choice(allowed))


def episode(env: gym.Env, seed: int) -> list[Any]:
    """What is seen, paid and told until the end."""
    rng = np.random.default_rng(seed)
    seen, info = env.reset(seed=seed)
    told: list[Any] = [seen, info["action_mask"]]
    while True:
        seen, reward, ended, cut, info = env.step(some(info["action_mask"], rng))
        told += [seen, reward, ended, cut, *info.values()]
        if ended:
            return told


@fewest
@given(dealt=ragged, seed=seeds)
def test_one_environment_of_a_batch_is_a_single_one(
    split_catalog: TableCatalog, dealt: list[Sketch], seed: int
) -> None:
    instances, task_sampler = (
        [sketch.on(split_catalog) for sketch in dealt],
        RandomTaskSampler((9, 9), (4, 4)),
    )
    rng = np.random.default_rng(seed)
    many = ShardingVectorEnv(split_catalog, len(instances), task_sampler)
    ones = [ShardingEnv(split_catalog, task_sampler) for _ in instances]
    seen, _ = many.reset(options={"instances": instances})
    going = dict(enumerate(ones))
    masks = []
    for env_id, env in enumerate(ones):
        view, info = env.reset(options={"instance": instances[env_id]})
        np.testing.assert_allclose(seen[env_id], view, rtol=1e-4, atol=1e-5)
        masks.append(info["action_mask"])
    while going:
        actions = np.array([some(mask, rng) for mask in masks])
        seen, rewards, ended, cut, infos = many.step(actions)
        for env_id, env in list(going.items()):
            view, reward, over, _, info = env.step(np.int64(actions[env_id]))
            assert (ended[env_id], cut[env_id]) == (over, False)
            np.testing.assert_allclose(seen[env_id], view, rtol=1e-4, atol=1e-5)
            assert rewards[env_id] == pytest.approx(reward, rel=1e-3, abs=1e-5)
            masks[env_id] = info["action_mask"]
            if over:
                for name in ("plan_ms", "lower_bound_ms", "infeasible"):
                    assert infos[name][env_id] == pytest.approx(info[name], rel=1e-4)
                    assert infos[f"_{name}"][env_id]
                del going[env_id]


def test_both_environments_sample_the_same_for_a_seed_over_many_episodes(
    split_catalog: TableCatalog,
) -> None:
    one, many = ShardingEnv(split_catalog, SMALL), ShardingVectorEnv(split_catalog, 1, SMALL)
    rng = np.random.default_rng(0)
    view, info = one.reset(seed=5)
    seen, _ = many.reset(seed=5)
    ended_episodes = over = 0
    while ended_episodes < 12:
        action = some(info["action_mask"], rng)
        seen, rewards, ended, _, infos = many.step(np.array([action]))
        if over:  # the step after an end deals
            view, info = one.reset()
            reward, over = 0.0, False
            assert not infos
        else:
            view, reward, over, _, info = one.step(np.int64(action))
        ended_episodes += over
        assert ended[0] == over
        assert rewards[0] == pytest.approx(reward)
        np.testing.assert_array_equal(seen[0], view)


def test_the_step_after_an_end_samples_anew_and_pays_nothing(catalog: TableCatalog) -> None:
    env = ShardingVectorEnv(catalog, 2, RandomTaskSampler((3, 3), (2, 2)))
    assert env.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    env.reset(
        seed=0, options={"instances": [instance([5], AMPLE, AMPLE), instance([3, 8], AMPLE, AMPLE)]}
    )
    _, _, ended, _, infos = env.step(np.array([0, 0]))
    assert ended.tolist() == infos["_plan_ms"].tolist() == [True, False]
    seen, rewards, ended, _, infos = env.step(np.array([1, 1]))  # the first is ignored
    assert rewards[0] == 0
    assert ended.tolist() == infos["_plan_ms"].tolist() == [False, True]
    parts = env.layout.split(seen)
    assert parts["progress"][:, 0].tolist() == [0, 1]
    assert env.episodes.placed.tolist() == [0, 2]
    _, rewards, ended, _, infos = env.step(np.array([0, 0]))
    assert not infos
    assert not ended.any()
    assert rewards[0] < 0
    assert rewards[1] == 0
    assert env.episodes.placed.tolist() == [1, 0]


def test_what_one_step_told_stays_as_it_was(catalog: TableCatalog) -> None:
    env, rng = ShardingVectorEnv(catalog, NUM_ENVS, SMALL), np.random.default_rng(3)
    told: list[tuple[Any, Any]] = []
    env.reset(seed=2)
    for _ in range(20):
        *arrays, infos = env.step(rng.integers(0, 2, NUM_ENVS))
        arrays += infos.values()
        told.append((arrays, [np.copy(part) for part in arrays]))
    for arrays, copies in told:
        for part, copy in zip(arrays, copies, strict=True):
            np.testing.assert_array_equal(part, copy)


class Impossible(RandomTaskSampler):
    """Deals that end before anything can be placed."""

    def sample(
        self, catalog: TableCatalog, rng: np.random.Generator, count: int
    ) -> list[TaskInstance]:
        return [instance([int(rng.integers(9))], 1) for _ in range(count)]


def test_an_episode_without_memory_ends_with_its_first_step(
    catalog: TableCatalog,
) -> None:
    env = ShardingVectorEnv(catalog, 2, Impossible((1, 1), (2, 2)))
    env.reset(seed=0, options={"instances": [instance([3], 1), instance([3], AMPLE, AMPLE)]})
    worth = float(env.reward.infeasible(torch.ones(1)))
    for expected in ([True, True], [False, False], [True, True], [False, False]):
        _, rewards, ended, _, _ = env.step(np.array([0, 0]))
        assert ended.tolist() == expected
        assert rewards[0] == pytest.approx(worth * expected[0])
    assert env.tally()["infeasible"] == 3


def test_the_tally_counts_what_ended_since_it_was_asked(split_catalog: TableCatalog) -> None:
    env = ShardingVectorEnv(split_catalog, NUM_ENVS, SMALL)
    rng = np.random.default_rng(1)
    env.reset(seed=1)
    for _ in range(2):
        games, dead, relative = 0, 0, []
        for _ in range(60):
            masks = env.episodes.action_masks.numpy()
            _, _, ended, _, infos = env.step(np.array([some(mask, rng) for mask in masks]))
            games += int(ended.sum())
            for env_id in np.flatnonzero(ended):
                dead += infos["infeasible"][env_id]
                if not infos["infeasible"][env_id]:
                    relative.append(infos["plan_ms"][env_id] / infos["lower_bound_ms"][env_id])
        assert dead > 0
        assert relative
        assert env.tally() == {
            "episodes": games,
            "infeasible": dead,
            "step_over_bound": pytest.approx(np.mean(relative)),
            "requested_shards": 0,
        }
    assert set(env.tally().values()) == {0}


@pytest.mark.parametrize("seed", [0, 7])
def test_the_same_seed_plays_the_same(split_catalog: TableCatalog, seed: int) -> None:
    first, second, other = (
        episode(ShardingEnv(split_catalog, SMALL), n) for n in (seed, seed, seed + 1)
    )
    assert len(first) == len(second)
    for mine, yours in zip(first, second, strict=True):
        np.testing.assert_array_equal(mine, yours)
    assert not np.array_equal(first[0], other[0])


def test_the_same_env_plays_the_same_again_for_a_seed(catalog: TableCatalog) -> None:
    env, many = ShardingEnv(catalog, SMALL), ShardingVectorEnv(catalog, NUM_ENVS, SMALL)
    for mine, yours in zip(episode(env, 3), episode(env, 3), strict=True):
        np.testing.assert_array_equal(mine, yours)
    seen = [many.reset(seed=seed)[0] for seed in (4, None, 4, [4, 5, 6, 7])]
    np.testing.assert_array_equal(seen[0], seen[2])
    np.testing.assert_array_equal(seen[0], seen[3])
    assert not np.array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[0][0], seen[0][1])


def test_gymnasium_makes_one(catalog: TableCatalog) -> None:
    env = gym.make("Sharding-v0", catalog=catalog, task_sampler=SMALL, max_devices=6)
    assert env.action_space == gym.spaces.Discrete(6 + len(OPTION_KINDS))
    told = episode(env, 1)
    assert env.observation_space.contains(told[0])
    assert told[1].shape == (6 + len(OPTION_KINDS),)


def test_gymnasium_makes_many(catalog: TableCatalog) -> None:
    arguments = {"catalog": catalog, "task_sampler": SMALL, "reward": Balance()}
    mode = "vector_entry_point"
    env = gym.make_vec("Sharding-v0", num_envs=NUM_ENVS, vectorization_mode=mode, **arguments)
    assert isinstance(env.unwrapped, ShardingVectorEnv)
    seen, _ = env.reset(seed=1)
    assert env.observation_space.contains(seen)
    assert env.single_action_space == gym.spaces.Discrete(4 + len(OPTION_KINDS))
    for _ in range(8):
        seen, rewards, ended, _, _ = env.step(greedily(env.unwrapped.episodes).numpy())
        assert env.observation_space.contains(seen)
        assert ((rewards == 0) | ended).all()  # Balance pays at the end only
    env.close()


def test_without_arguments_the_shipped_model_is_played() -> None:
    env = gym.make("Sharding-v0")
    seen, info = env.reset(seed=0)
    assert info["action_mask"].tolist() == [1, 1, 1, 1, 1, *[0] * (len(OPTION_KINDS) - 1)]
    seen, reward, ended, _, _ = env.step(0)
    assert np.isfinite(seen).all()
    assert reward < 0
    assert not ended
    many = gym.make_vec("Sharding-v0", num_envs=2, vectorization_mode="vector_entry_point")
    assert many.reset(seed=0)[0].shape == (2, len(seen))


@pytest.mark.parametrize("render_mode", [None, "ansi", "rgb_array"])
def test_gymnasiums_checker_finds_nothing(
    split_catalog: TableCatalog, render_mode: str | None
) -> None:
    arguments = {"catalog": split_catalog, "task_sampler": SMALL, "render_mode": render_mode}
    env = gym.make("Sharding-v0", **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)


def test_the_mask_is_what_the_observation_tells(split_catalog: TableCatalog) -> None:
    env, rng = ShardingEnv(split_catalog, SMALL), np.random.default_rng(0)
    forbidden, splittable = 0, set()
    for number in range(10):
        seen, info = env.reset(seed=number)
        ended = False
        while True:
            mask = info["action_mask"]
            parts = env.layout.split(seen)
            np.testing.assert_array_equal(mask, [*parts["allowed"], *parts["options"][:, 0]])
            splittable.add(bool(mask[env.layout.max_devices]))
            assert env.action_space.sample(mask) in np.flatnonzero(mask) or not mask.any()
            forbidden += int((mask == 0).sum())
            if ended:
                break
            seen, _, ended, _, info = env.step(np.int64(some(mask, rng)))
    assert forbidden > 0
    assert splittable == {False, True}


def test_a_text_shows_each_device(catalog: TableCatalog) -> None:
    env = ShardingEnv(catalog, SMALL, render_mode="ansi")
    size = int(catalog.bytes[5])
    env.reset(options={"instance": instance([5, 5 + 1], 2 * size, AMPLE)})
    first = env.render()
    assert isinstance(first, str)
    lines = first.splitlines()
    assert lines[0].startswith("0 of 2 pieces placed")
    assert [line.split()[0] for line in lines[1:]] == ["device0", "device1"]
    assert "#" not in first
    env.step(np.int64(1))
    cost_line = str(env.render()).splitlines()[2]
    assert "#" in cost_line
    assert " 1 pieces" in cost_line
    assert f"{float(torch.max(env._vector.episodes.cost_ms)):.2f} ms" in cost_line


def test_a_text_tells_of_an_infeasible_end(catalog: TableCatalog) -> None:
    env = ShardingEnv(catalog, SMALL, render_mode="ansi")
    env.reset(options={"instance": instance([5], 1)})
    assert "infeasible" in str(env.render())


def test_a_picture_changes_as_tables_are_placed(catalog: TableCatalog) -> None:
    env = ShardingEnv(catalog, SMALL, render_mode="rgb_array")
    env.reset(options={"instance": instance([5, 6], AMPLE, AMPLE)})
    first = env.render()
    assert isinstance(first, np.ndarray)
    assert (first.dtype, first.ndim, first.shape[2]) == (np.uint8, 3, 3)
    env.step(np.int64(0))
    second = env.render()
    assert second.shape == first.shape  # type: ignore[union-attr]
    assert not np.array_equal(first, second)
    assert ShardingEnv(catalog, SMALL).render() is None
