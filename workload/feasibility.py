"""Is there a plan at all? An exact answer, where rules and tight memory leave no easy one.

A mixed-integer program (HiGHS, by way of SciPy) over columns of tables on devices. Nothing is
optimised: it finds some plan, or proves that there is none.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import scipy  # which loads its parts when they are used

from autoshard.workload.admission import RuleMasks
from autoshard.workload.errors import UserError
from autoshard.workload.rules import Rule
from autoshard.workload.tables import DIM_STEP, EmbeddingTable, Piece
from autoshard.workload.tasks import ShardingTask

_SECONDS = 20.0  # of search, for one question of a user
_WHOLE_SHARE = 0.5  # of the time is for whole tables, where they may be split
_INFEASIBLE = 2  # scipy.optimize.milp's
_TIGHTER = 2e-6  # the solver's own tolerance, of a device's memory

Placed = Sequence[tuple[Piece, int]]
Answer = TypeVar("Answer")


class Undecided(UserError):  # noqa: N818 - neither yes nor no
    """The time for the search was over."""


@dataclass(frozen=True)
class Contradiction:
    """What cannot be kept together: without any one of these there is a plan.

    Args:
        rules: their names.
        memory: whether the devices' memory is part of it.
    """

    rules: tuple[str, ...]
    memory: bool


def any_plan(task: ShardingTask, split: bool) -> Placed | None:
    """Some valid plan, as slices and their devices; None if there is none.

    `split`: tables may be split by columns. Undecided if that takes too long.
    """
    return _answer(_any_plan_in_time, task, split)


def contradiction(task: ShardingTask, split: bool) -> Contradiction | None:
    """Why there is no plan: a set of rules of which none can be left out; None if there is one.

    Undecided if that takes too long.
    """
    return _answer(_contradiction, task, split)


def _answer(
    question: Callable[[ShardingTask, bool], Answer | Undecided], task: ShardingTask, split: bool
) -> Answer:
    found = question(task, split)
    if isinstance(found, Undecided):
        raise found
    return found


def _remembered(
    ask: Callable[[ShardingTask, bool], Answer],
) -> Callable[[ShardingTask, bool], Answer | Undecided]:
    """That took long is remembered as well: several sharders ask the same."""

    @lru_cache(maxsize=8)
    def asked(task: ShardingTask, split: bool) -> Answer | Undecided:
        try:
            return ask(task, split)
        except Undecided as undecided:
            return undecided

    return asked


@_remembered
def _any_plan_in_time(task: ShardingTask, split: bool) -> Placed | None:
    return _any_plan(task, split, time.monotonic() + _SECONDS)


@_remembered
def _contradiction(task: ShardingTask, split: bool) -> Contradiction | None:
    deadline = time.monotonic() + _SECONDS
    if _any_plan(task, split, deadline) is not None:
        return None
    deadline += _SECONDS
    try:
        unlimited = _without_memory(task)
        if unlimited is not None and _any_plan(unlimited, False, deadline) is None:
            kept, memory = _conflicting(unlimited, False, deadline), False
        else:
            kept, memory = _conflicting(task, split, deadline), True
    except Undecided:
        raise Undecided(
            "there is no plan that keeps all constraints, and it takes too long to find out which "
            "of them contradict each other"
        ) from None
    return Contradiction(tuple(rule.name for rule in task.rules if rule in kept), memory)


def _conflicting(task: ShardingTask, split: bool, deadline: float) -> list[Rule]:
    """Of rules that admit no plan, some that admit none either, and one without any one of them.

    By halves, as QuickXplain does (Junker, 2004): few of many are found by few questions.
    """

    def impossible(rules: Sequence[Rule]) -> bool:
        return _any_plan(replace(task, rules=tuple(rules)), split, deadline) is None

    def of(rules: list[Rule], besides: list[Rule], has_grown: bool) -> list[Rule]:
        if has_grown and impossible(besides):
            return []
        if len(rules) == 1:
            return rules
        first, second = rules[: len(rules) // 2], rules[len(rules) // 2 :]
        late = of(second, besides + first, bool(first))
        early = of(first, besides + late, bool(late))
        return early + late

    if not task.rules or impossible(()):
        return []
    return of(list(task.rules), [], False)


def _without_memory(task: ShardingTask) -> ShardingTask | None:
    """The tables that rules are about, with more memory than they need; None without any.

    The others can lie anywhere then, and no table needs to be split.
    """
    ruled = {name for rule in task.rules for name in rule.tables}
    tables = tuple(table for table in task.tables if table.name in ruled)
    needed = sum(map(task.table_bytes, tables))
    devices = tuple(
        replace(device, memory_bytes=device.memory_bytes + needed) for device in task.devices
    )
    return replace(task, tables=tables, devices=devices) if tables else None


def _any_plan(task: ShardingTask, split: bool, deadline: float) -> Placed | None:
    """Of whole tables if there is one: that is found sooner, mostly."""
    if not split:
        return _Program(task, split=False).solved(deadline)
    with suppress(Undecided):  # where whole tables hardly fit, columns may fit at once
        now = time.monotonic()
        found = _Program(task, split=False).solved(now + _WHOLE_SHARE * (deadline - now))
        if found is not None:
            return found
    return _Program(task, split=True).solved(deadline)


class _Program:
    """For each table and device whether the table has columns there, and how many (in steps).

    Variables lie table by table: first whether (binary), then how many (whole).
    """

    def __init__(self, task: ShardingTask, split: bool) -> None:
        self._task = task
        self._split = split
        self._masks = RuleMasks(task)
        self._tables, self._devices = len(task.tables), len(task.devices)
        self._steps = np.array([table.dim // DIM_STEP for table in task.tables], np.float64)
        units = self._masks.numbers([table.whole() for table in task.tables])
        most = np.minimum(self._masks.max_parts[units], self._devices if split else 1)
        self._most = most.astype(np.float64)
        self._least = np.ceil(self._masks.min_width[units] / DIM_STEP)
        self._lawful = self._masks.lawful[units].astype(float)

    def solved(self, deadline: float) -> Placed | None:
        """A plan, or None if there is none; Undecided at the deadline."""
        for tighter in (0.0, _TIGHTER):
            left = deadline - time.monotonic()
            found = self._solve(tighter, left) if left > 0 else None
            if found is None or (found.x is None and found.status != _INFEASIBLE):
                break
            if found.x is None:
                if tighter:  # what fits to the last bytes only is not found, nor excluded
                    break
                return None
            placed = self._placed(np.rint(found.x))
            if self._fits(placed):
                return placed
        raise Undecided(
            f"within {_SECONDS:.0f} s neither a plan is found that keeps all constraints, nor that "
            "there is none"
        )

    def _solve(self, tighter: float, seconds: float) -> "scipy.optimize.OptimizeResult":
        count = self._tables * self._devices
        lawful = self._lawful
        most = np.concatenate([lawful.ravel(), (lawful * self._steps[:, None]).ravel()])
        return scipy.optimize.milp(
            np.zeros(2 * count),
            integrality=np.ones(2 * count),
            bounds=scipy.optimize.Bounds(0, most),
            constraints=[*self._columns(), *self._together(), *self._memory(tighter)],
            options={"time_limit": seconds},
        )

    def _columns(self) -> "list[scipy.optimize.LinearConstraint]":
        """All columns are somewhere, on as many devices and as wide as the rules say."""
        each = scipy.sparse.identity(self._tables * self._devices, format="csr")
        of_table = scipy.sparse.kron(
            scipy.sparse.identity(self._tables), np.ones((1, self._devices)), format="csr"
        )
        nothing = scipy.sparse.csr_matrix(of_table.shape)
        steps = np.repeat(self._steps, self._devices)
        # What is not split is as wide as its table, however wide slices have to be.
        least = np.repeat(np.minimum(np.maximum(self._least, 1), self._steps), self._devices)
        return [
            scipy.optimize.LinearConstraint(
                scipy.sparse.hstack([nothing, of_table]), self._steps, self._steps
            ),
            scipy.optimize.LinearConstraint(
                scipy.sparse.hstack([of_table, nothing]), 1, self._most
            ),
            scipy.optimize.LinearConstraint(
                scipy.sparse.hstack([scipy.sparse.diags(steps), -each]), 0, np.inf
            ),  # columns only where it is
            scipy.optimize.LinearConstraint(
                scipy.sparse.hstack([-scipy.sparse.diags(least), each]), 0, np.inf
            ),
        ]

    def _together(self) -> "list[scipy.optimize.LinearConstraint]":
        """Rules over several tables."""
        numbers = {table.name: number for number, table in enumerate(self._task.tables)}
        rows: list[tuple[dict[int, float], float, float]] = []
        for rule in self._task.rules:
            members = [numbers[name] for name in rule.tables]
            for device in range(self._devices):
                places = [member * self._devices + device for member in members]
                if rule.kind == "together":
                    rows += [({places[0]: 1.0, other: -1.0}, 0.0, 0.0) for other in places[1:]]
                elif rule.kind == "apart":
                    rows.append((dict.fromkeys(places, 1.0), 0.0, 1.0))
        if not rows:
            return []
        matrix = scipy.sparse.lil_matrix((len(rows), 2 * self._tables * self._devices))
        for number, (entries, _, _) in enumerate(rows):
            for place, value in entries.items():
                matrix[number, place] = value
        low, high = ([row[side] for row in rows] for side in (1, 2))
        return [scipy.optimize.LinearConstraint(matrix.tocsr(), low, high)]

    def _memory(self, tighter: float) -> "list[scipy.optimize.LinearConstraint]":
        """Bytes grow evenly with columns, from those that a table takes wherever it is."""
        rooms = self._task.usable_bytes.astype(float)
        sizes = np.array([self._bytes(table) for table in self._task.tables])
        per_step = (sizes[:, 1] - sizes[:, 0]) / np.maximum(self._steps - 1, 1)
        fixed = sizes[:, 0] - per_step
        scale = 1 / rooms.max()
        on_device = scipy.sparse.identity(self._devices)
        parts = [
            scipy.sparse.hstack([on_device * value * scale for value in values])
            for values in (fixed, per_step)
        ]
        most = rooms * scale * (1 - tighter)
        return [scipy.optimize.LinearConstraint(scipy.sparse.hstack(parts, format="csr"), 0, most)]

    def _bytes(self, table: EmbeddingTable) -> tuple[float, float]:
        """Of its narrowest slice, and whole."""
        narrow = Piece(table, 0, DIM_STEP)
        return float(self._task.piece_bytes(narrow)), float(self._task.table_bytes(table))

    def _placed(self, solution: npt.NDArray[np.float64]) -> Placed:
        steps = solution[self._tables * self._devices :].reshape(self._tables, self._devices)
        placed = []
        for table, on_devices in zip(self._task.tables, steps.astype(int).tolist(), strict=True):
            start = 0
            for device, count in enumerate(on_devices):
                if count:
                    placed.append((Piece(table, start, count * DIM_STEP), device))
                    start += count * DIM_STEP
        return placed

    def _fits(self, placed: Placed) -> bool:
        free = self._task.usable_bytes.copy()
        for piece, device in placed:
            free[device] -= self._task.piece_bytes(piece)
        return bool((free >= 0).all())
