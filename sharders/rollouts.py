"""Playing the game with a policy: many plans of one task at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from autoshard.cost_model import EstimatedCosts
from autoshard.envs import BatchedPlacementEnv, Layout, TableCatalog, TaskInstance
from autoshard.sharders.groups import DEVICES, Group, in_groups
from autoshard.sharders.policy_network import FORBIDDEN, PolicyNetwork, PolicyVariant
from autoshard.workload import Piece, ShardingTask
from autoshard.workload.admission import RuleMasks
from autoshard.workload.step_price import Floats

# Beside what was learned, in the order in which they gain most: of 42, on validation tasks of
# twelve families, one style alone is 2.5 % worse than the best of all, two are 0.8 %, four 0.2 %.
_OTHERS = tuple(
    PolicyVariant(*values)
    for values in ((0, 0, 1.5), (0, 0, 0.25), (1, 0, 1.5), (0, 0, 0.75), (1, 1, 0.25))
)
# What one other choice wins beside all styles, on such tasks of 4 and of 8 devices: twelve games
# that make it 0.9 % (eighteen 1.0 %, 42 1.35 %), in three styles more than in two or in all.
_WITH_DISCREPANCY = 3
_FEWEST = 2  # games, however many devices there are
_ROWS, _WIDE_ROWS = 192, 384  # devices of all games: to price so many takes little longer
# Tasks of more devices, most of them in groups, win nothing by another choice.
_MANY, _ROWS_OF_MANY = 2 * DEVICES - 1, 96
_APART = 0.04  # beyond the middle group: those that take longer are evened out with fast ones
_ALIKE = 0.01  # logits less apart: mostly devices alike, which make no other plan
_NEVER = -1
_PLAN_MS = attrgetter("plan_ms")


class RolloutConfig(NamedTuple):
    """How a game is played.

    Args:
        style: of the policy.
        turn: the step, counted from 0, at which the second best choice is taken; by default none.
        drawn: by lot in place of the best choice.
    """

    variant: PolicyVariant = PolicyVariant()
    discrepancy_step: int = _NEVER
    sampled: bool = False


@dataclass(frozen=True, eq=False)
class _GroupRollout:
    """A group's game that has ended.

    Args:
        group: whose it was.
        placed: slices, and their devices in the task.
        waits_ms: before each, what the slowest device of the group spends.
        plan_ms: what a step of the group takes; infinite at a dead end.
    """

    group: Group
    placed: tuple[tuple[Piece, int], ...]
    stages_ms: Floats
    plan_ms: float

    @staticmethod
    def of(episodes: BatchedPlacementEnv, env_id: int, group: Group) -> "_GroupRollout":
        waits = episodes.stages_ms[env_id].amax(0).double().numpy()
        homes = group.devices.tolist()
        placed = tuple((piece, homes[home]) for piece, home in episodes.placed_pieces(env_id))
        return _GroupRollout(
            group, placed, waits, math.inf if episodes.infeasible[env_id] else float(waits.sum())
        )


@dataclass(frozen=True)
class Rollout:
    """A finished game.

    Args:
        placed: slices and their devices.
        plan_ms: what a step of that plan is estimated to take; infinite at a dead end.
        way: which of those that were asked for it was played in; 0 if it was made of several.
    """

    placed: tuple[tuple[Piece, int], ...]
    plan_ms: float
    config: int

    @staticmethod
    def together(rollouts: Sequence[_GroupRollout], config: int = 0) -> "Rollout":
        """Of games of all groups of a task."""
        waits = np.max([rollout.stages_ms for rollout in rollouts], axis=0)
        placed = tuple(piece for rollout in rollouts for piece in rollout.placed)
        ended_well = max(map(_PLAN_MS, rollouts)) < math.inf
        return Rollout(placed, float(waits.sum()) if ended_well else math.inf, config)


class PolicyRollouts:
    """Plays with a network.

    Args:
        network: scores devices.
        oracle: prices them.
    """

    def __init__(self, network: PolicyNetwork, oracle: EstimatedCosts) -> None:
        self._network = network
        self._oracle = oracle

    @property
    def variants(self) -> list[PolicyVariant]:
        """What tasks are played in: first as learned; then those of others that find better plans
        most often.
        """
        shape = self._network.shape
        if shape.sharpness == 0:  # there is nothing but what was learned
            return [PolicyVariant()]
        found = [PolicyVariant(), *_OTHERS]
        if not self._network.has_deviated:
            found = [variant._replace(learned=0) for variant in found]
        if not shape.halves:
            found = [variant._replace(elsewhere=1) for variant in found]
        return list(dict.fromkeys(found))

    def configs(self, tables: int, devices: int, wide: bool = False) -> list[RolloutConfig]:
        """To play a task of that size in one batch: in all styles, then with another choice once,
        as early as may be. As many as take little longer than one; more where `wide`. What was
        learned from nothing is played as it is, unless `wide`.
        """
        variants = self.variants
        if devices == 1 or (len(variants) == 1 and not wide):
            return [RolloutConfig(variants[0])]
        rows = _ROWS_OF_MANY if devices > _MANY else _WIDE_ROWS if wide else _ROWS
        most = max(_FEWEST, rows // devices)
        discrepancies = range(min(tables, most))
        configs = [
            RolloutConfig(variant, discrepancy_step)
            for discrepancy_step in discrepancies
            for variant in variants[:_WITH_DISCREPANCY]
        ]
        return [*map(RolloutConfig, variants), *configs][:most]

    @torch.inference_mode()
    def play(
        self,
        task: ShardingTask,
        configs: Sequence[RolloutConfig] = (RolloutConfig(),),
        split: bool = True,
        rng: torch.Generator | None = None,
    ) -> list[Rollout]:
        """Plans of a task, in all these ways; games that end at a dead end are left out.

        `split` games may halve tables, if the policy does. Ways that are drawn need `rng`, and one
        beside them that is not; of a task that is played in groups only the best of these others
        is handed out.
        """
        assert rng is not None or not any(config.sampled for config in configs)
        masks = RuleMasks(task)
        units = masks.units
        split = split and self._network.shape.halves and len(task.devices) > 1
        catalog = TableCatalog(self._oracle, units, split)
        rules = masks if masks.any else None
        instance = TaskInstance(np.arange(len(units)), task.usable_bytes, rules, task.objective)
        whole = Group(np.arange(len(task.devices)), instance)
        groups = in_groups(catalog, whole)
        ended = self._play_groups(catalog, groups, configs, split, rng)
        played = [Rollout.together(rollouts, number) for number, rollouts in enumerate(ended)]
        if len(groups) > 1:
            sure = [number for number, config in enumerate(configs) if not config.sampled]
            each = zip(*(ended[number] for number in sure), strict=True)
            best = [min(rollouts, key=_PLAN_MS) for rollouts in each]
            evened = self._evened_out(catalog, best, [configs[number] for number in sure], split)
            # What is best for each group need not be for all together, whose waits add up.
            mixed = [Rollout.together(rollouts) for rollouts in (best, evened)]
            sampled = [played[number] for number, config in enumerate(configs) if config.sampled]
            played = [min((*(played[n] for n in sure), *mixed), key=_PLAN_MS), *sampled]
        return [rollout for rollout in played if rollout.plan_ms < math.inf]

    def _evened_out(
        self,
        catalog: TableCatalog,
        ended: Sequence[_GroupRollout],
        configs: Sequence[RolloutConfig],
        split: bool,
    ) -> list[_GroupRollout]:
        """The slowest groups, each played once more in one with a fast one; and those that have no
        plan, until they have one.
        """
        ranked = sorted(ended, key=_PLAN_MS)
        bar = (1 + _APART) * ranked[(len(ranked) - 1) // 2].plan_ms
        while True:
            pairs = []
            while len(ranked) > 1 and (ranked[-1].plan_ms > bar or ranked[-1].plan_ms == math.inf):
                pairs.append((ranked.pop(0), ranked.pop()))
            if not pairs:
                return ranked
            groups = [fast.group.with_(slow.group) for fast, slow in pairs]
            found = self._play_groups(catalog, groups, configs, split)
            for (fast, slow), of_group in zip(pairs, zip(*found, strict=True), strict=True):
                both = min(of_group, key=_PLAN_MS)
                ranked += [both] if both.plan_ms <= slow.plan_ms else [fast, slow]
            ranked.sort(key=_PLAN_MS)
            bar = math.inf  # once more takes twice as long, and wins next to nothing

    def _play_groups(
        self,
        catalog: TableCatalog,
        groups: Sequence[Group],
        configs: Sequence[RolloutConfig],
        split: bool,
        rng: torch.Generator | None = None,
    ) -> list[list[_GroupRollout]]:
        """Games of each group in all ways: [ways][groups]."""
        instances = [group.instance for group in groups]
        tables = max(len(instance.units) for instance in instances)
        devices = max(len(group.devices) for group in groups)
        rollouts = len(configs) * len(groups)
        episodes = BatchedPlacementEnv(catalog, rollouts, tables, devices, tables if split else 0)
        episodes.start(range(rollouts), instances * len(configs))
        layout = Layout(devices)
        variants, discrepancies, sampled = (
            torch.tensor(each).repeat_interleave(len(groups), 0)
            for each in zip(*configs, strict=True)
        )
        last_step = int(discrepancies.max())
        for step in count():
            if bool(episodes.over.all()):
                break
            logits, _ = self._network(layout.parts(episodes), variants)
            chosen = logits.argmax(1)
            if step <= last_step:
                chosen = torch.where(discrepancies == step, second_best(logits), chosen)
            if rng is not None:
                noise = torch.empty_like(logits).exponential_(generator=rng)
                drawn = (logits - noise.log()).argmax(1)  # the Gumbel-max trick
                chosen = torch.where(sampled, drawn, chosen)
            episodes.place(chosen)
        return [
            [
                _GroupRollout.of(episodes, config * len(groups) + number, each)
                for number, each in enumerate(groups)
            ]
            for config in range(len(configs))
        ]


def second_best(logits: Tensor) -> Tensor:
    """The choice that makes another plan than the best, and comes next: [games]. The best where
    there is no other.
    """
    most, best = logits.max(1)
    second, other = logits.masked_fill(logits > most[:, None] - _ALIKE, FORBIDDEN).max(1)
    return torch.where(second > FORBIDDEN, other, best)
