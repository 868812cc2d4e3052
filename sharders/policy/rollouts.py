"""Policy rollouts: several plans of one task in one batch."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.step.overhead import SplitCost, splits_of
from autoshard.envs import BatchedPlacementEnv, Layout, TableCatalog, TaskInstance
from autoshard.envs.options import NO_OPTIONS, changed_units
from autoshard.sharders.policy.groups import DEVICES, PIECES, Group, bundled, in_groups
from autoshard.sharders.policy.network import FORBIDDEN, PolicyNetwork, PolicyVariant
from autoshard.workload import Piece, ShardingTask
from autoshard.workload.arrays import Floats
from autoshard.workload.packing.admission import RuleMasks
from autoshard.workload.packing.table_options import TableOptions
from autoshard.workload.ways.option import Options

# Tried beside the learned policy, in order of their gain. On validation tasks of twelve families,
# the first is 2.5 % worse than the best of 42 variants, the first two are 0.8 %, four are 0.2 %.
_OTHER_VARIANTS = tuple(
    PolicyVariant(*values)
    for values in ((0, 0, 1.5), (0, 0, 0.25), (1, 0, 1.5), (0, 0, 0.75), (1, 1, 0.25))
)
# Gain of a discrepancy beside all variants, on such tasks of 4 and 8 devices: 0.9 % with twelve
# rollouts, 1.0 % with 18, 1.35 % with 42. Three variants gain more than two, and than all.
_NUM_DISCREPANCY_VARIANTS = 3
_MIN_ROLLOUTS = 2
_ROWS, _WIDE_ROWS = 192, 384  # devices of all rollouts; pricing fewer takes hardly less time
# With more devices, which are mostly in groups, discrepancies gain nothing. With more tables, those
# that _WIDE_ROWS have time for gain 0.0 to 0.07 % before a search, and take a fifth of its time.
_MANY, _MANY_TABLES, _ROWS_OF_MANY = 2 * DEVICES - 1, 2 * PIECES, 96
_MAX_EXCESS = 0.04  # over the median group; slower groups are merged with fast ones
_EQUAL_LOGITS = 0.01  # a smaller difference mostly means equal devices, and an equal plan
_NEVER = -1
_PLAN_MS = attrgetter("plan_ms")


class RolloutConfig(NamedTuple):
    """Configuration of a rollout.

    Args:
        variant: Variant of the policy.
        discrepancy_step: Step, from 0, that takes the second-best action; by default none.
        sampled: Whether actions are sampled; else the best action is taken.
    """

    variant: PolicyVariant = PolicyVariant()
    discrepancy_step: int = _NEVER
    sampled: bool = False


@dataclass(frozen=True, eq=False)
class _GroupRollout:
    """Result of a rollout of one group of devices.

    Args:
        group: The group.
        placed: Pieces and their devices in the task.
        stages_ms: Time of the group's slowest device in each stage.
        plan_ms: Step time of the group; infinite if infeasible.
        options: Options of tables; None if none may be taken.
        common_ms: What options and splits add on all devices alike.
    """

    group: Group
    placed: tuple[tuple[Piece, int], ...]
    stages_ms: Floats
    plan_ms: float
    options: Options | None = None
    common_ms: float = 0.0

    @staticmethod
    def of(episodes: BatchedPlacementEnv, env_id: int, group: Group) -> "_GroupRollout":
        stages = episodes.stages_ms[env_id].amax(0).double().numpy()
        devices = group.devices.tolist()
        placed = tuple((piece, devices[own]) for piece, own in episodes.placed_pieces(env_id))
        options, common_ms = None, 0.0
        if episodes.tasks[env_id] != NO_OPTIONS:
            options, common_ms = episodes.options_of(env_id), float(episodes.common_ms[env_id])
        plan_ms = math.inf if episodes.infeasible[env_id] else float(stages.sum()) + common_ms
        return _GroupRollout(group, placed, stages, plan_ms, options, common_ms)


@dataclass(frozen=True)
class Rollout:
    """Result of a rollout.

    Args:
        placed: Pieces of tables in columns, and their devices.
        plan_ms: Predicted step time; infinite if infeasible.
        options: Options of tables that are not in columns, if they may be taken.
    """

    placed: tuple[tuple[Piece, int], ...]
    plan_ms: float
    options: Options = field(default_factory=dict)

    @staticmethod
    def combined(split_cost: SplitCost, rollouts: Sequence[_GroupRollout]) -> "Rollout":
        """Combines rollouts of all groups of a task."""
        placed = tuple(piece for rollout in rollouts for piece in rollout.placed)
        if max(map(_PLAN_MS, rollouts)) == math.inf:
            return Rollout(placed, math.inf)
        if (options := rollouts[0].options) is not None:  # of the only group
            return Rollout(placed, rollouts[0].plan_ms, options)
        stages = np.max([rollout.stages_ms for rollout in rollouts], axis=0)
        splits_ms = split_cost.ms(splits_of(placed))
        return Rollout(placed, float(stages.sum()) + splits_ms)


class PolicyRollouts:
    """Runs a policy network in the environment.

    Args:
        network: Policy network.
        oracle: Predicts costs.
    """

    def __init__(self, network: PolicyNetwork, oracle: EstimatedCosts) -> None:
        self._network = network
        self._oracle = oracle

    @property
    def variants(self) -> list[PolicyVariant]:
        """Distinct variants of the policy, the learned one first."""
        shape = self._network.shape
        if shape.sharpness == 0:  # without a greedy policy there are no variants
            return [PolicyVariant()]
        found = [PolicyVariant(), *_OTHER_VARIANTS]
        if not self._network.has_deviated:
            found = [variant._replace(learned=0) for variant in found]
        if not shape.splits:
            found = [variant._replace(elsewhere=1) for variant in found]
        return list(dict.fromkeys(found))

    def configs(self, tables: int, devices: int, wide: bool = False) -> list[RolloutConfig]:
        """Returns configurations of a batch of rollouts that takes little longer than one.

        All variants come first, then discrepancies, early steps first. A policy without variants
        runs once, unless `wide`.

        Args:
            tables: Number of tables of the task.
            devices: Number of devices.
            wide: Whether to return twice as many, for use before a local search.
        """
        variants = self.variants
        if devices == 1 or (len(variants) == 1 and not wide):
            return [RolloutConfig(variants[0])]
        many = devices > _MANY or tables >= _MANY_TABLES
        rows = _ROWS_OF_MANY if many else _WIDE_ROWS if wide else _ROWS
        count = max(_MIN_ROLLOUTS, rows // devices)
        configs = [
            RolloutConfig(variant, step)
            for step in range(min(tables, count))
            for variant in variants[:_NUM_DISCREPANCY_VARIANTS]
        ]
        return [*map(RolloutConfig, variants), *configs][:count]

    def option_configs(self, devices: int) -> list[RolloutConfig]:
        """Returns configurations of rollouts whose tables may take options: all variants, each as
        if options had been taken before, too.
        """
        variants = [v._replace(starts=starts) for v in self.variants for starts in (1.0, 0.0)]
        count = max(_MIN_ROLLOUTS, _ROWS // devices)
        return [*map(RolloutConfig, variants)][:count]

    @torch.inference_mode()
    def run(
        self,
        task: ShardingTask,
        configs: Sequence[RolloutConfig] = (RolloutConfig(),),
        split: bool = True,
        rng: torch.Generator | None = None,
        coarse: bool = False,
        options: tuple[TableOptions, Options] | None = None,
    ) -> list[Rollout]:
        """Returns the feasible rollouts of a task.

        Where the devices form groups, the rollouts that are not sampled are combined into one.

        Args:
            task: Task to plan.
            configs: Configurations, at least one of which is not sampled.
            split: Whether tables may be split, if the policy does so.
            rng: Random generator, required if a configuration is sampled.
            coarse: Whether, of many tables, small ones may be placed in bundles, and groups of
                devices may stay uneven: for use before a local search.
            options: Options that tables may take, and those by which `task` is what single devices
                hold of their task; by default none may be taken. In groups of devices none is.
        """
        assert rng is not None or not any(config.sampled for config in configs)
        masks = RuleMasks(task)
        bundles = coarse and not masks.any and len(masks.units) >= PIECES
        units = bundled(self._oracle, task, masks.units) if bundles else masks.units
        split = split and self._network.shape.splits and len(task.devices) > 1
        replacing = () if options is None else changed_units(*options)
        catalog = TableCatalog(self._oracle, units, split, task.operator, replacing)
        rules = masks if masks.any else None
        instance = TaskInstance(
            np.arange(len(units)),
            task.usable_bytes,
            rules,
            task.objective,
            hardware=task.hardware,
            options=NO_OPTIONS if options is None else catalog.add_options(*options),
        )
        whole = Group(np.arange(len(task.devices)), instance)
        groups = in_groups(catalog, whole)
        ended = self._run_groups(catalog, groups, configs, split, rng)
        split_cost = self._oracle.split_cost(task.columns_in_order, len(task.devices))
        combined = partial(Rollout.combined, split_cost)
        found = list(map(combined, ended))
        if len(groups) > 1:
            greedy = [number for number, config in enumerate(configs) if not config.sampled]
            by_group = zip(*(ended[number] for number in greedy), strict=True)
            best = [min(rollouts, key=_PLAN_MS) for rollouts in by_group]
            evened = best
            if not coarse or max(map(_PLAN_MS, best)) == math.inf:
                usual = [configs[number] for number in greedy]
                evened = self._rebalanced(catalog, best, usual, split)
            # The best rollouts of groups need not be the best together: their stages add up.
            mixed = [combined(rollouts) for rollouts in (best, evened)]
            sampled = [found[number] for number, config in enumerate(configs) if config.sampled]
            found = [min((*(found[n] for n in greedy), *mixed), key=_PLAN_MS), *sampled]
        return [rollout for rollout in found if rollout.plan_ms < math.inf]

    def _rebalanced(
        self,
        catalog: TableCatalog,
        ended: Sequence[_GroupRollout],
        configs: Sequence[RolloutConfig],
        split: bool,
    ) -> list[_GroupRollout]:
        """Runs slow groups again, each merged with a fast one; infeasible ones repeatedly."""
        ranked = sorted(ended, key=_PLAN_MS)
        limit = (1 + _MAX_EXCESS) * ranked[(len(ranked) - 1) // 2].plan_ms
        while True:
            pairs = []
            while len(ranked) > 1 and (
                ranked[-1].plan_ms > limit or ranked[-1].plan_ms == math.inf
            ):
                pairs.append((ranked.pop(0), ranked.pop()))
            if not pairs:
                return ranked
            groups = [fast.group.with_(slow.group) for fast, slow in pairs]
            found = self._run_groups(catalog, groups, configs, split)
            for (fast, slow), of_group in zip(pairs, zip(*found, strict=True), strict=True):
                both = min(of_group, key=_PLAN_MS)
                ranked += [both] if both.plan_ms <= slow.plan_ms else [fast, slow]
            ranked.sort(key=_PLAN_MS)
            limit = math.inf  # another round takes twice as long and gains next to nothing

    def _run_groups(
        self,
        catalog: TableCatalog,
        groups: Sequence[Group],
        configs: Sequence[RolloutConfig],
        split: bool,
        rng: torch.Generator | None = None,
    ) -> list[list[_GroupRollout]]:
        """Returns rollouts of each group with each configuration: [configs][groups]."""
        instances = [group.instance for group in groups]
        tables = max(len(instance.units) for instance in instances)
        devices = max(len(group.devices) for group in groups)
        rollouts = len(configs) * len(groups)
        episodes = BatchedPlacementEnv(
            catalog,
            rollouts,
            tables,
            devices,
            tables if split else 0,
            self._network.shape.kinds,
        )
        episodes.start(range(rollouts), instances * len(configs))
        layout = Layout(devices)
        variants, discrepancies, sampled = (
            torch.tensor(values).repeat_interleave(len(groups), 0)
            for values in zip(*configs, strict=True)
        )
        last_step = int(discrepancies.max())
        for step in itertools.count():
            if bool(episodes.over.all()):
                break
            logits, _ = self._network(layout.parts(episodes), variants)
            chosen = logits.argmax(1)
            if step <= last_step:
                chosen = torch.where(discrepancies == step, second_best(logits), chosen)
            if rng is not None:
                noise = torch.empty_like(logits).exponential_(generator=rng)
                chosen = torch.where(
                    sampled, (logits - noise.log()).argmax(1), chosen
                )  # Gumbel-max
            episodes.place(chosen)
        return [
            [
                _GroupRollout.of(episodes, config * len(groups) + number, group)
                for number, group in enumerate(groups)
            ]
            for config in range(len(configs))
        ]


def second_best(logits: Tensor) -> Tensor:
    """Returns the second-best action that leads to another plan, else the best: [envs]."""
    largest, best = logits.max(1)
    second, other = logits.masked_fill(logits > largest[:, None] - _EQUAL_LOGITS, FORBIDDEN).max(1)
    return torch.where(second > FORBIDDEN, other, best)
