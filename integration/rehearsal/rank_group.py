"""Rehearsals on a cluster: one process per rank, started by Ray and watched."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from autoshard.benchmark.backends import RequestedKind, best_backend, requested_backend
from autoshard.benchmark.backends.base import Place
from autoshard.benchmark.machine.device_lock import DeviceBusy
from autoshard.benchmark.pool.devices import first_line, nodes_that_measure
from autoshard.benchmark.pool.pool import find_pool, pool_names
from autoshard.benchmark.rehearsals.kept import KeptRehearsals, comparable, made_before
from autoshard.benchmark.rehearsals.times import Loop, RankReport, Rehearsal, Round
from autoshard.benchmark.store.measurements import MeasurementStore
from autoshard.integration.rehearsal.places import check_plan, places_of_ranks
from autoshard.integration.rehearsal.rank import RehearsalRank
from autoshard.workload import Device, PlanError, ShardingPlan, ShardingTask, UserError
from autoshard.workload.plans.replicas import rank_bytes

WARM_UP = 5  # steps
ROUND_STEPS = 10  # steps of a plan in a round of several
_ROUND_WARM_UP = 3  # after which the caches hold nothing of the plan before
MIN_ROUNDS = 3
_START_S = 180.0  # for which ranks wait for devices that others hold
_GRACE_S = 5.0  # for the errors of other ranks, one of which may be the cause


class RankError(UserError):
    """A rank failed or was lost, and with it the rehearsal."""


@dataclass(frozen=True)
class Effort:
    """When rounds of a plan end.

    Args:
        min_rounds: Rounds of each plan, at least.
        seconds: Time after which no further round begins.
        precision: Relative half width of a step's 95 % interval at which no further one is needed.
    """

    min_rounds: int = MIN_ROUNDS
    seconds: float = 0.0
    precision: float = 0.0


class RankGroup:
    """Running ranks, each in its own process, that train models one after another or interleaved.

    Args:
        ranks: Number of ranks.
        kind: Kind of devices.
        in_turns: Whether ranks compute in turns, one at a time; by default they do on cores of one
            machine, which slow each other down even where each rank has its own, and on one GPU if
            there are fewer than ranks.
        loop: Loop of training: `plain`, or `pipelined` by TorchRec's `TrainPipelineSparseDist`.
        clears_caches: Whether ranks in turns find caches cleared, as other ranks of their own would
            not share theirs. Where no time counts, training is faster without.

    Attributes:
        rank_type: Actor of a rank.
    """

    rank_type: type[RehearsalRank] = RehearsalRank

    def __init__(
        self,
        ranks: int,
        kind: RequestedKind = "auto",
        in_turns: bool | None = None,
        loop: Loop = "plain",
        clears_caches: bool = True,
    ) -> None:
        from autoshard.integration import to_torchrec  # noqa: F401 - says if it is missing

        nodes = nodes_that_measure(ray.nodes())  # type: ignore[no-untyped-call]
        self.backend = requested_backend(kind) or best_backend(nodes.values())
        self.loop = loop
        self.places = places_of_ranks(ranks, self.backend, nodes, in_turns is False)
        if self.backend.num_gpus:
            _take_over()
        on_one_machine = len({place.owner for place in self.places}) == 1
        are_beside = self.backend.is_shared or len({place.unit for place in self.places}) < ranks
        by_default = are_beside and on_one_machine and ranks > 1
        self.in_turns = by_default if in_turns is None else in_turns
        self._tasks: dict[str, tuple[ShardingTask, ShardingPlan | None]] = {}
        self._actors: list[Any] = []
        try:
            for rank, place in enumerate(self.places):
                self._actors.append(self._start(rank, place))
            self._wait_until_started()
            host, port = self._ask_first("open_rendezvous")
            self._all("join", host, port, self.in_turns, clears_caches)
            self._learn_memory()
            self.hardware, self._versions = self._ask_first("make")
        except BaseException:
            self.close()
            raise

    def devices(self) -> tuple[Device, ...]:
        """Returns the ranks as devices, with the memory of each."""
        return tuple(Device(place.name, place.memory_bytes) for place in self.places)

    def prepare(
        self, name: str, task: ShardingTask, plan: ShardingPlan | None, hot: bool = False
    ) -> None:
        """Builds the model of a task by a plan; without one, TorchRec's planner decides.

        Args:
            name: Of the model.
            task: The task.
            plan: Its plan.
            hot: Whether the same rows are used most in all batches, as beside plans with hot rows.

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
            check_plan(plan, here, self.places, self.backend)
        hot = hot or (plan is not None and bool(plan.hot_rows))
        self._all("prepare", name, here, plan or self._native_plan(here), self.loop, hot)
        self._tasks[name] = (here, plan)

    def is_planned_by_torchrec(self, task: ShardingTask) -> bool:
        """Returns whether TorchRec's planner finds a plan of a task for these ranks."""
        try:
            self._native_plan(replace(task, devices=self.devices()))
        except PlanError:
            return False
        return True

    def train(self, name: str, steps: int, warm_up: int = WARM_UP) -> Rehearsal:
        """Returns the results of so many steps of a prepared model, after the warm-up."""
        runs = self._all("train", name, steps + warm_up)
        task, plan = self._tasks[name]
        made = Round.of([run[warm_up:] for run in runs])
        return self._rehearsal(task, plan, [made], self._all("peak_bytes"))

    def train_interleaved(
        self,
        task: ShardingTask,
        plans: Mapping[str, ShardingPlan | None],
        effort: Effort,
        kept: MeasurementStore | None = None,
        levels_ms: Mapping[str, float] | None = None,
        progress: Callable[[int, int], None] = lambda made, missing: None,  # noqa: ARG005
    ) -> dict[str, Rehearsal]:
        """Trains a few steps by each plan in each round, so that disturbances affect all alike.

        Models are built anew in each round: where weights are in memory changes a step by 1 to 2 %.

        Args:
            task: Task of all plans.
            plans: Plans by name; None where TorchRec's planner decides.
            effort: How many rounds.
            kept: Store of rounds, to which new ones are added. Only those of one hour are
                compared: if an earlier hour has enough of each plan, none is made. Ranks must
                compute in turns.
            levels_ms: Time of the reference operator to which composed steps are normalised, by
                hardware; for other hardware that of the store, or the median of all rounds.
            progress: Called at first and after each round, with the number of rounds that were
                made, and of those that are missing until each plan has `effort.min_rounds`.
        """
        for plan in plans.values():
            if plan is not None and plan.replicas and plan.replicas.sync_interval > 1:
                raise UserError(
                    "steps with and without averages of the copies are not composed yet: rehearse "
                    "with a sync interval of 1, or let all ranks compute at once"
                )
        store, hot = None, any(plan is not None and plan.hot_rows for plan in plans.values())
        if kept is not None and not hot:  # rounds with other batches are not kept
            store = KeptRehearsals(kept, self.hardware, self._versions, self.loop)
        known = {n: store.rounds(task, p) if store else () for n, p in plans.items()}
        recent = made_before(known, time.time())
        rounds = comparable(known, effort.min_rounds) or recent
        are_recent = rounds == recent
        level_ms = (levels_ms or {}).get(self.hardware) or (
            None if store is None else store.level_ms
        )
        began = time.monotonic()

        def rehearsal(name: str) -> Rehearsal:
            beside = [r.reference_ms for some in rounds.values() for r in some if r.reference_ms]
            level = level_ms or (statistics.median(beside) if beside else None)
            return replace(self._rehearsal(task, plans[name], rounds[name]), level_ms=level)

        def missing() -> int:
            return sum(max(0, effort.min_rounds - len(some)) for some in rounds.values())

        def wants_more(name: str) -> bool:
            if not are_recent:  # an earlier hour has enough of each plan
                return False
            if len(rounds[name]) < effort.min_rounds:
                return True
            late = time.monotonic() >= began + effort.seconds
            return not late and rehearsal(name).half_width > effort.precision

        names, count = list(plans), 0
        progress(count, missing())
        while waiting := [name for name in names if wants_more(name)]:
            for name in waiting:
                self.prepare(name, task, plans[name], hot)
                (made,) = self.train(name, ROUND_STEPS, _ROUND_WARM_UP).rounds
                self.forget(name)
                rounds[name].append(made)
                count += 1
                progress(count, missing())
                if store is not None:
                    store.add(task, plans[name], made)
            names = [*names[1:], names[0]]
        return {name: rehearsal(name) for name in plans}

    def _rehearsal(
        self,
        task: ShardingTask,
        plan: ShardingPlan | None,
        rounds: Sequence[Round],
        peaks: Sequence[int | None] = (),
    ) -> Rehearsal:
        count = len(self.places)
        tables: Sequence[int | None] = [None] * count
        planned: Sequence[int | None] = [None] * count
        if plan is not None:
            planned = rank_bytes(plan, task)
            numbers, of_devices = range(count), plan.num_tables()
            devices = map(plan.replicas.device, numbers) if plan.replicas else numbers
            tables = [of_devices[device] for device in devices]
        names = [place.name for place in self.places]
        ranks = tuple(map(RankReport, names, tables, planned, peaks or [None] * count))
        objective = task.objective
        dense_ms = objective.dense_ms if objective.in_training else None
        return Rehearsal(ranks, tuple(rounds), self.in_turns, objective.link, dense_ms=dense_ms)

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
        units = [other.unit for other in self.places]
        options = self.backend.ray_options(place, units.count(place.unit))
        actor: Any = ray.remote(**options)(self.rank_type)
        first = place.unit not in units[:rank]
        return actor.remote(rank, len(self.places), self.backend, place, first)

    def _wait_until_started(self) -> None:
        """Waits until all ranks have their devices."""
        calls = [actor.device_name.remote() for actor in self._actors]
        limit_s = _START_S if self.backend.num_gpus else None  # nobody else can hold a core
        _, waiting = ray.wait(calls, num_returns=len(calls), timeout=limit_s)
        if waiting:
            left = ray.available_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
            raise RankError(
                f"{len(waiting)} of {len(calls)} ranks got no {self.backend.noun} within "
                f"{_START_S:.0f} s: {left:g} are free in the Ray cluster (ray list actors --detail "
                "shows who holds them): let others end, then try again"
            )
        units, names = {place.unit for place in self.places}, {*self._ask(calls)}
        if self.backend.num_gpus and len(units) == 1 < len(names):
            raise RankError(
                f"Ray gave the ranks parts of {', '.join(sorted(names))}, and ranks in turns need "
                f"one {self.backend.noun}: let others that use a part of one end, then try again"
            )

    def _learn_memory(self) -> None:
        """Learns the memory of ranks from devices that know it: what is left, in equal shares."""
        free = self._all("free_bytes")  # now all have their libraries there
        units = [place.unit for place in self.places]
        self.places = [
            replace(place, memory_bytes=place.memory_bytes or number // units.count(place.unit))
            for place, number in zip(self.places, free, strict=True)
        ]

    def _native_plan(self, task: ShardingTask) -> Any:
        """Returns TorchRec's own plan: by tables, columns, rows, or a copy on each rank."""
        from autoshard.integration.models.names import lookups_of, topology_of
        from autoshard.integration.plans.sharder import plan_by_torchrec
        from autoshard.integration.rehearsal.model import RehearsedModel

        lookups = {f"t{number}": lookups_of(table) for number, table in enumerate(task.tables)}
        model = RehearsedModel(task.tables, task.operator)
        topology = topology_of(task, self.backend.device.type, for_rows=True)
        return plan_by_torchrec(model, task, lookups, topology)

    def _ask_first(self, method: str) -> Any:
        """Calls a method of the first rank."""
        return self._ask([getattr(self._actors[0], method).remote()])[0]

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


def _take_over() -> None:
    """Has the cluster's pool release its GPUs; UserError while it measures."""
    found = [pool for name in pool_names() if (pool := find_pool(name)) is not None]
    busy = next(filter(None, ray.get([pool.hand_over.remote() for pool in found])), "")
    if busy:
        raise UserError(
            f"the cluster's pool holds its GPUs ({busy}): let it end, or end it with "
            "experiments/pool.py stop"
        )


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
