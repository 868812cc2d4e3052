"""Rehearsals on a cluster: one process per rank, started by Ray and watched."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from autoshard.benchmark.backends import RequestedKind, best_backend, requested_backend
from autoshard.benchmark.backends.base import DeviceBackend, Node, Place
from autoshard.benchmark.core_lock import DeviceBusy
from autoshard.benchmark.devices import first_line, nodes_that_measure, reports_of
from autoshard.benchmark.rehearsal.rank import RehearsalRank
from autoshard.benchmark.rehearsal.times import RankReport, Rehearsal, Round
from autoshard.workload import Device, ShardingPlan, ShardingTask, UserError

WARM_UP = 5  # steps
ROUND_STEPS = 10  # steps of a plan in a round of several
_ROUND_WARM_UP = 3  # after which the caches hold nothing of the plan before
MIN_ROUNDS = 3
_UNKNOWN_BYTES = 2**50  # memory of a GPU, which fails itself if something does not fit
_GRACE_S = 5.0  # for the errors of other ranks, one of which may be the cause


class RankError(UserError):
    """A rank failed or was lost, and with it the rehearsal."""


class RankGroup:
    """Running ranks, each in its own process, that train models one after another or interleaved.

    Args:
        ranks: Number of ranks.
        kind: Kind of devices.
        in_turns: Whether ranks compute in turns, one at a time; by default they do on cores of one
            machine, which slow each other down even where each rank has its own.
    """

    def __init__(
        self, ranks: int, kind: RequestedKind = "auto", in_turns: bool | None = None
    ) -> None:
        from autoshard.workload.torchrec import to_torchrec  # noqa: F401 - says if it is missing

        nodes = nodes_that_measure(ray.nodes())  # type: ignore[no-untyped-call]
        self.backend = requested_backend(kind) or best_backend(nodes.values())
        self.places = _places(ranks, self.backend, nodes)
        on_one_machine = len({place.owner for place in self.places}) == 1
        by_default = self.backend.is_shared and on_one_machine and ranks > 1
        self.in_turns = by_default if in_turns is None else in_turns
        self._tasks: dict[str, tuple[ShardingTask, ShardingPlan | None]] = {}
        self._actors: list[Any] = []
        try:
            for rank, place in enumerate(self.places):
                self._actors.append(self._start(rank, place))
            host, port = self._ask([self._actors[0].open_rendezvous.remote()])[0]
            self._all("join", host, port, self.in_turns)
        except BaseException:
            self.close()
            raise

    def devices(self) -> tuple[Device, ...]:
        """Returns the ranks as devices, with the memory of each."""
        return tuple(Device(p.name, p.memory_bytes or _UNKNOWN_BYTES) for p in self.places)

    def prepare(self, name: str, task: ShardingTask, plan: ShardingPlan | None) -> None:
        """Builds the model of a task by a plan; without one, TorchRec's planner decides.

        Raises:
            PlanError: The plan does not fit the task or the memory of ranks.
        """
        ranks = len(self.places)
        if task.batch_size % ranks:
            raise UserError(
                f"a batch of {task.batch_size} samples cannot be split evenly among {ranks} ranks: "
                f"take {task.batch_size // ranks * ranks or ranks}"
            )
        here = replace(task, devices=self.devices())
        if plan is not None:
            plan.check(here)
            self._all("prepare", name, here, plan)
        else:
            self._all("prepare", name, here, self._native_plan(here))
        self._tasks[name] = (here, plan)

    def train(self, name: str, steps: int, warm_up: int = WARM_UP) -> Rehearsal:
        """Returns the results of so many steps of a prepared model, after the warm-up."""
        runs = self._all("train", name, steps + warm_up)
        peaks = self._all("peak_bytes")
        task, plan = self._tasks[name]
        tables: list[int | None] = [None] * len(runs)
        planned: list[int | None] = [None] * len(runs)
        if plan is not None:
            planned = list(plan.device_bytes(task))
            held = [{p.table for p in plan.placements if p.device == r} for r in range(len(runs))]
            tables = list(map(len, held))
        names = [place.name for place in self.places]
        ranks = tuple(map(RankReport, names, tables, planned, peaks))
        made = Round(tuple(tuple(run[warm_up:]) for run in runs))
        return Rehearsal(ranks, (made,), self.in_turns, task.objective.link)

    def train_interleaved(
        self,
        task: ShardingTask,
        plans: Mapping[str, ShardingPlan | None],
        seconds: float = 0.0,
        rounds: int = MIN_ROUNDS,
    ) -> dict[str, Rehearsal]:
        """Trains a few steps by each plan in each round, so that disturbances affect all alike.

        Models are built anew in each round: where weights are in memory changes a step by 1 to 2 %.

        Args:
            task: Task of all plans.
            plans: Plans by name; None where TorchRec's planner decides.
            seconds: Time after which no round begins but the first few.
            rounds: How many these are.
        """
        found: dict[str, list[Rehearsal]] = {name: [] for name in plans}
        names, began = list(plans), time.monotonic()
        while names and (len(found[names[-1]]) < rounds or time.monotonic() < began + seconds):
            for name in names:
                self.prepare(name, task, plans[name])
                found[name].append(self.train(name, ROUND_STEPS, _ROUND_WARM_UP))
                self.forget(name)
            names = [*names[1:], names[0]]
        beside = [r.reference_ms for some in found.values() for each in some for r in each.rounds]
        known = [ms for ms in beside if ms is not None]
        level_ms = statistics.median(known) if known else None
        return {name: Rehearsal.joined(some, level_ms) for name, some in found.items()}

    def parts(self, name: str) -> list[Any]:
        """Returns the parts of a model's tables on each rank."""
        return self._all("parts", name)

    def forget(self, name: str) -> None:
        """Deletes a model."""
        self._all("forget", name)
        del self._tasks[name]

    def close(self) -> None:
        """Ends all ranks."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _start(self, rank: int, place: Place) -> Any:
        actor: Any = ray.remote(**self.backend.ray_options(place))(RehearsalRank)
        first = place.unit not in [other.unit for other in self.places[:rank]]
        return actor.remote(rank, len(self.places), self.backend, place, first)

    def _native_plan(self, task: ShardingTask) -> Any:
        """Returns TorchRec's own plan: by tables, columns, rows, or a copy on each rank."""
        from autoshard.benchmark.rehearsal.model import RehearsedModel
        from autoshard.workload.torchrec.names import lookups_of
        from autoshard.workload.torchrec.own_planner import plan_by_torchrec

        lookups = {f"t{number}": lookups_of(table) for number, table in enumerate(task.tables)}
        model = RehearsedModel(task.tables, task.operator)
        return plan_by_torchrec(model, task, lookups, self.backend.device.type)

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of each rank."""
        return self._ask([getattr(actor, method).remote(*arguments) for actor in self._actors])

    def _ask(self, calls: Sequence[Any]) -> list[Any]:
        """Returns the answers of ranks; if one fails, ends all, because the others wait for it."""
        waiting = list(calls)
        while waiting:
            done, waiting = ray.wait(waiting)
            if (error := _error(done[0])) is not None:
                faults = {calls.index(done[0]): error}
                if not isinstance(error, RayActorError):  # it may have lost one that was killed
                    done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=_GRACE_S)
                    others = {calls.index(call): _error(call) for call in done}
                    faults |= {rank: fault for rank, fault in others.items() if fault is not None}
                self.close()
                raise self._as_user_error(faults) from None
        answers: list[Any] = ray.get(list(calls))
        return answers

    def _as_user_error(self, faults: Mapping[int, RayError]) -> UserError:
        """Returns the error of the rank that failed first."""
        rank = min(faults, key=lambda rank: _order(faults[rank]))
        error, who = faults[rank], f"rank {rank} ({self.places[rank].name})"
        cause = getattr(error, "cause", None)
        if isinstance(cause, UserError):
            return cause
        if isinstance(cause, DeviceBusy):
            return RankError(f"{who}: {cause}: let it end, then try again")
        if isinstance(error, RayActorError):
            return RankError(
                f"{who} died, killed or out of memory, and the others were ended: "
                f"{first_line(error)}"
            )
        if "memory" in str(cause).lower():
            return RankError(
                f"{who} is out of memory: take a smaller batch, or a plan for more ranks "
                f"({first_line(error)})"
            )
        return RankError(f"{who} failed: {first_line(error)}")


def _places(ranks: int, backend: DeviceBackend, nodes: Mapping[str, Node]) -> list[Place]:
    """Returns the place of each rank; ranks share devices that are too few, if possible."""
    found = backend.places(nodes, ray.get(reports_of(nodes)), ())
    if not found or ranks > len(found) * backend.max_ranks:
        raise UserError(
            f"{ranks} ranks need a {backend.noun} each, and the cluster has {len(found)}: take a "
            "plan for as many devices, or another kind of --devices"
        )
    places = [found[rank % len(found)] for rank in range(ranks)]
    return [replace(p, memory_bytes=p.memory_bytes // places.count(p)) for p in places]


def _error(answer: Any) -> RayError | None:
    try:
        ray.get(answer)
    except RayError as error:
        return error
    return None


def _order(error: RayError) -> int:
    """Orders errors by likely cause: ranks that died or report a user's error come first."""
    if isinstance(error, RayActorError):
        return 0
    return 1 if isinstance(getattr(error, "cause", None), UserError | DeviceBusy) else 2
