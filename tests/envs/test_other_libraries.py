"""`Sharding-v0` with stable-baselines3 and sb3-contrib, where they are installed."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from autoshard.envs import RandomTaskSampler, TableCatalog

SMALL = RandomTaskSampler((3, 6), (2, 3), (0.3, 0.6))


@pytest.fixture
def env(split_catalog: TableCatalog) -> Any:
    return gym.make("Sharding-v0", catalog=split_catalog, task_sampler=SMALL)


def test_the_mask_is_what_the_information_says(env: Any) -> None:
    _, info = env.reset(seed=0)
    ended = False
    while not ended:
        mask = env.unwrapped.action_masks()
        assert mask.dtype == np.bool_
        assert mask.tolist() == info["action_mask"].astype(bool).tolist()
        _, _, ended, _, info = env.step(np.flatnonzero(mask)[0])


def test_stable_baselines_finds_nothing_wrong(env: Any) -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    checker.check_env(env.unwrapped)


def test_maskable_ppo_learns_and_plans(env: Any) -> None:
    contrib = pytest.importorskip("sb3_contrib")
    from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported

    assert is_masking_supported(env)
    model = contrib.MaskablePPO("MlpPolicy", env, n_steps=32, batch_size=16, n_epochs=1, seed=0)
    model.learn(64)
    seen, _ = env.reset(seed=1)
    ended, info = False, {}
    while not ended:
        action, _ = model.predict(seen, action_masks=get_action_masks(env))
        seen, _, ended, _, info = env.step(action)
    assert info["plan_ms"] > 0
