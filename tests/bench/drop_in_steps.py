"""Steps of training by plans of `AutoShardPlanner` and of TorchRec's planner, as rehearsals.

Each pair of plans is of a model of its own, so that intervals have both in them: how models differ,
and the noise of measuring.
"""

import gc
import itertools
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from statistics import fmean
from typing import Any

from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import get_default_sharders

from autoshard.benchmark.rehearsals.times import Step
from autoshard.benchmark.rehearsals.trace import BACKWARD, DENSE
from autoshard.experiments.console import cli
from autoshard.experiments.evaluation.ratio import relative
from autoshard.integration import AutoShardPlanner
from autoshard.integration.rehearsal.rank import RehearsalRank
from autoshard.integration.rehearsal.rank_group import Effort, RankGroup
from autoshard.workload import ShardingPlan, ShardingTask
from bench.drop_in_models import LEARNING_RATE, MODELS, draw
from bench.metric import Metric
from bench.workbench import say

RANKS, BATCH = 4, 512  # samples of a rank: what TorchRec's planner takes for granted
_DRAWN = 5  # models of each kind
_ROUNDS = 2  # of each plan
_BATCHES = 8
_MEMORY = 2**33  # of a rank: no plan lacks any
_OURS, _THEIRS = "ours", "theirs"
_PARTS = (("step", "at most 0.88"), ("step without the dense part", ""))


def drop_in_step_metrics() -> list[Metric]:
    """Returns the ratio of steps by both planners' plans, for each kind of model."""
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    found = list[Metric]()
    with closing(_ModelRanks(RANKS, "cpu")) as ranks:
        for kind in MODELS:
            say(f"steps of {kind} by both planners' plans")
            steps = [ranks.steps_ms(kind, seed) for seed in range(_DRAWN)]
            for part, (what, target) in enumerate(_PARTS):
                ours, theirs = zip(*(of_model[part] for of_model in steps), strict=True)
                ratio = relative(ours, theirs)
                assert ratio is not None
                name = f"{what} by AutoShardPlanner over EmbeddingShardingPlanner's, {kind}"
                found.append(Metric(name, target, ratio.value, "", (ratio.low, ratio.high)))
    return found


def plans_of(kind: str, seed: int) -> tuple[dict[str, Any], AutoShardPlanner]:
    """Returns both planners' plans of a model, and our planner."""
    _, tables = MODELS[kind](seed)
    batches = [draw(tables, BATCH, number) for number in range(4 * RANKS)]
    topology = Topology(RANKS, "cpu", ddr_cap=_MEMORY, created_by_factory=True)
    ours = AutoShardPlanner(topology=topology, batches=batches, debug=False)
    theirs = EmbeddingShardingPlanner(topology=topology, debug=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plans = {
            name: planner.plan(MODELS[kind](seed).model, get_default_sharders())
            for name, planner in ((_OURS, ours), (_THEIRS, theirs))
        }
    return plans, ours


class _ModelRank(RehearsalRank):
    """A rank that trains a model of `MODELS`."""

    def prepare_model(self, name: str, kind: str, seed: int, plan: Any) -> None:
        """Builds a model by a plan of TorchRec's kind, at the same time as the other ranks."""
        self._trainings[name] = _Training(kind, seed, plan, self._rank, self._phases)
        gc.collect()
        gc.freeze()  # as for other rehearsals


class _ModelRanks(RankGroup):
    """Ranks that train models of `MODELS`."""

    rank_type = _ModelRank

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kind, self._seed = "", 0
        self._plans: Mapping[str, Any] = {}

    def steps_ms(self, kind: str, seed: int) -> list[tuple[float, float]]:
        """Returns the steps of a model by our plan and by theirs, for each of `_PARTS`."""
        self._kind, self._seed = kind, seed
        self._plans, planner = plans_of(kind, seed)
        task = planner.task
        assert task is not None
        names = dict.fromkeys(self._plans)
        made = self.train_interleaved(task, names, Effort(_ROUNDS))
        # The dense part is the same by both plans: what it seems to differ by is noise.
        dense_ms = fmean(each.phases_ms[:, DENSE].mean() for each in made.values())
        found = [
            (replace(made[_OURS], dense_ms=dense).step_ms,
             replace(made[_THEIRS], dense_ms=dense).step_ms)
            for dense in (dense_ms, 0.0)
        ]  # fmt: skip
        shown = ", ".join(
            f"{ours:.2f} / {theirs:.2f} = {ours / theirs:.3f}" for ours, theirs in found
        )
        cli.console.print(f"  {kind} {seed}: {shown}")
        return found

    def prepare(
        self,
        name: str,
        task: ShardingTask,
        plan: ShardingPlan | None,
        hot: bool = False,
    ) -> None:
        """Builds the model at hand by the plan with this name; `plan` is None."""
        self._all("prepare_model", name, self._kind, self._seed, self._plans[name])
        self._tasks[name] = task, plan


class _Training:
    """Training of a model on one rank."""

    def __init__(self, kind: str, seed: int, plan: Any, rank: int, phases: Any) -> None:
        import torch
        from torchrec.distributed import DistributedModelParallel
        from torchrec.optim.optimizers import in_backward_optimizer_filter

        torch.manual_seed(0)
        model, tables = MODELS[kind](seed)
        self._model = DistributedModelParallel(
            model, device=torch.device("cpu"), plan=plan, sharders=get_default_sharders()
        )
        # Dense layers, and tables that a plan copies.
        rest = dict(in_backward_optimizer_filter(self._model.named_parameters()))
        copies = [rest.pop(name) for name in list(rest) if ".embedding" in name]
        self._dense = torch.optim.SGD(rest.values(), lr=LEARNING_RATE)
        self._copies = torch.optim.Adagrad(copies, lr=LEARNING_RATE) if copies else None
        drawn = [draw(tables, BATCH, number * RANKS + rank) for number in range(_BATCHES)]
        self._batches = itertools.cycle(drawn)
        self._phases = phases
        phases.observe(self._model.module)

    def step(self, at_once: bool) -> Callable[[], Step]:
        """Runs a step; what is returned reads it, as `Training.step`."""
        import torch.distributed as dist

        batch = next(self._batches)
        self._model.zero_grad()
        if at_once:
            dist.barrier()
        self._phases.start()
        loss = self._model(batch.fresh())
        loss.backward()
        self._phases.begin(DENSE)
        self._dense.step()
        if self._copies is not None:
            self._phases.begin(BACKWARD)
            self._copies.step()
        traced = self._phases.stop()
        return lambda: Step(traced(), loss.item())
