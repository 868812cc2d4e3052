"""What episodes are worth: by hand, and over whole episodes."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from episodes import (
    AMPLE,
    AtRandom,
    Sketch,
    episodes_of,
    fewest,
    greedily,
    instance,
    seeds,
    sketches,
)
from hypothesis import given
from hypothesis import strategies as st

from autoshard.envs import (
    Balance,
    BatchedPlacementEnv,
    Costs,
    CostSource,
    Dense,
    NegativeStep,
    RandomTaskSampler,
    Reward,
    ShardingVectorEnv,
    TableCatalog,
)

REWARDS: tuple[Reward, ...] = (Balance(), NegativeStep(), Dense(), Dense(Balance()))
LARGEST = RandomTaskSampler((9, 9), (4, 4))


class Told:
    """A source that says what it is told of devices, whatever has been played; a plan costs their
    sum.
    """

    measured = 0

    def __init__(self, *costs_ms: float) -> None:
        self._costs_ms = costs_ms

    def __call__(self, episodes: BatchedPlacementEnv, env_ids: Sequence[int]) -> Costs:
        costs = torch.zeros(len(env_ids), episodes.max_devices)
        costs[:, : len(self._costs_ms)] = torch.tensor(self._costs_ms)
        costs *= episodes.exists[list(env_ids)]
        return Costs(costs.sum(1), costs)


def test_rewards_of_costs_by_hand() -> None:
    devices = torch.tensor([[2.0, 4.0, 3.0], [5.0, 4.0, 0.0], [5.0, 4.0, 0.0], [6.0, 0.0, 2.0]])
    costs = Costs(torch.tensor([4.0, 5.0, 7.0, 6.0]), devices)
    exists = torch.tensor([[True] * 3, [True, True, False], [True, True, False], [True] * 3])
    bound = torch.tensor([2.0, 4.0, 4.0, 3.0])
    worth = {type(reward): reward.complete(costs, exists, bound).tolist() for reward in REWARDS[:3]}
    assert worth[Balance] == pytest.approx([0.5, 0.8, 0.8, 0.0])
    assert worth[NegativeStep] == pytest.approx([-2.0, -1.25, -1.75, -2.0])
    assert worth[Dense] == worth[NegativeStep]
    assert Dense(Balance()).complete(costs, exists, bound).tolist() == worth[Balance]


def test_rewards_on_the_way_by_hand() -> None:
    before, after = torch.tensor([0.0, 0.5, 0.75]), torch.tensor([0.5, 0.5, 1.5])
    assert Dense().shaping(before, after).tolist() == [-0.5, 0.0, -0.75]
    assert Balance().shaping(before, after).tolist() == [0.0] * 3
    assert NegativeStep().shaping(before, after).tolist() == [0.0] * 3


@pytest.mark.parametrize("reward", REWARDS)
def test_an_infeasible_end_is_worse_the_more_is_left(reward: Reward) -> None:
    worth = reward.infeasible(torch.tensor([0.01, 0.1, 0.5, 0.9, 1.0])).tolist()
    assert worth == sorted(worth, reverse=True)
    assert len(set(worth)) == 5
    worst = Costs(torch.tensor([9.0]), torch.tensor([[9.0, 0.0]]))
    assert worth[0] < Balance().complete(worst, torch.tensor([[True] * 2]), torch.ones(1))


@given(numbers=st.lists(st.integers(0, 99), min_size=6, max_size=12, unique=True))
def test_an_infeasible_end_is_worse_than_any_sensible_play(
    catalog: TableCatalog, numbers: list[int]
) -> None:
    episodes = episodes_of(
        catalog, *(instance(numbers, *[AMPLE] * devices) for devices in (1, 2, 3, 4))
    )
    while not episodes.over.all():
        episodes.place(greedily(episodes))
    costs = Costs(episodes.plan_ms, episodes.cost_ms)
    for reward in REWARDS:
        worst = reward.infeasible(torch.tensor([1 / len(numbers)]))
        assert (reward.complete(costs, episodes.exists, episodes.lower_bound_ms) > worst).all()


def worth_of_infeasible(rest_share: float) -> float:
    return float(NegativeStep().infeasible(torch.tensor([rest_share])))


def play(env: ShardingVectorEnv, instances: list, seed: int) -> tuple[np.ndarray, list, dict]:
    """Sum of the rewards, each step's rewards, and what the end told, of each environment."""
    choose = AtRandom(range(seed, seed + len(instances)), splitting=0.2)
    env.reset(seed=0, options={"instances": instances})
    steps: list[np.ndarray] = []
    ended, told = np.zeros(len(instances), np.bool_), {}
    while not ended.all():
        _, rewards, ends, _, infos = env.step(choose(env.episodes).numpy())
        steps.append(np.where(ended, 0, rewards))
        for env_id in np.flatnonzero(ends & ~ended):
            told[env_id] = {
                name: infos[name][env_id] for name in ("plan_ms", "lower_bound_ms", "infeasible")
            }
        ended |= ends
    return np.sum(steps, axis=0), steps, told


@fewest
@given(dealt=st.lists(sketches(), min_size=2, max_size=4), seed=seeds, measured=st.booleans())
def test_what_is_paid_on_the_way_adds_up_to_what_the_end_is_worth(
    split_catalog: TableCatalog, dealt: list[Sketch], seed: int, measured: bool
) -> None:
    instances = [sketch.on(split_catalog) for sketch in dealt]
    source: CostSource | None = Told(3.0, 7.0, 5.0, 1.0) if measured else None
    sums = {}
    for reward in (NegativeStep(), Dense(), Balance(), Dense(Balance())):
        env = ShardingVectorEnv(split_catalog, len(instances), LARGEST, reward, source)
        sums[reward], steps, told = play(env, instances, seed)
        if not isinstance(reward, Dense):
            assert (np.count_nonzero(steps, axis=0) <= 1).all()
    np.testing.assert_allclose(sums[Dense()], sums[NegativeStep()], rtol=1e-4)
    np.testing.assert_allclose(sums[Dense(Balance())], sums[Balance()], rtol=1e-4, atol=1e-5)
    for env_id, end in told.items():
        if end["infeasible"]:
            assert sums[NegativeStep()][env_id] <= worth_of_infeasible(0.0)
            assert end["plan_ms"] == 0
        else:
            worth = -end["plan_ms"] / end["lower_bound_ms"]
            assert sums[NegativeStep()][env_id] == pytest.approx(worth, rel=1e-5)
            if measured:
                told_ms = (3.0, 7.0, 5.0, 1.0)[: len(instances[env_id].memory_bytes)]
                assert end["plan_ms"] == sum(told_ms)


def test_each_step_pays_the_rise_of_what_the_plan_is_predicted_to_cost(
    catalog: TableCatalog,
) -> None:
    dealt = instance(range(6), AMPLE, AMPLE)
    env, episodes = ShardingVectorEnv(catalog, 1, LARGEST), episodes_of(catalog, dealt)
    env.reset(options={"instances": [dealt]})
    worst = 0.0
    for device in (0, 0, 1, 0, 1, 1):
        episodes.place(torch.tensor([device]))
        now = float(episodes.plan_ms[0] / episodes.lower_bound_ms[0])
        _, rewards, _, _, _ = env.step(np.array([device]))
        assert rewards[0] == pytest.approx(worst - now, abs=1e-5)
        worst = now


def test_an_infeasible_end_in_an_episode_costs_by_what_was_left(catalog: TableCatalog) -> None:
    env = ShardingVectorEnv(catalog, 2, LARGEST)
    env.reset(options={"instances": [instance(range(4), AMPLE, AMPLE)] * 2})
    paid = np.zeros(2)
    for actions in (
        [0, 2],
        [0, 0],
        [0, 0],
        [3, 0],
    ):  # 1 at once, 0 at its last table
        _, rewards, ended, _, _ = env.step(np.array(actions))
        paid += [rewards[0], rewards[1] if actions[1] == 2 else 0]
    assert ended[0]
    assert paid.tolist() == pytest.approx([worth_of_infeasible(0.25), worth_of_infeasible(1.0)])
