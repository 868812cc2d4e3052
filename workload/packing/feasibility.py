"""Finds any valid plan, or proves that there is none, where greedy packing fails.

Solves a mixed-integer program (HiGHS, through SciPy) over columns of tables on devices. It has no
objective.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import scipy  # which loads its parts when they are used

from autoshard.workload.errors import UserError
from autoshard.workload.packing.admission import RuleMasks
from autoshard.workload.tables.table import DIM_STEP, Piece
from autoshard.workload.tasks.rules import Rule
from autoshard.workload.tasks.task import ShardingTask

_SECONDS = 20.0  # time limit of a search
_WHOLE_SHARE = 0.5  # share of the time for plans of whole tables, where tables may be split
_INFEASIBLE = 2  # status of scipy.optimize.milp
_TOLERANCE = 2e-6  # tolerance of the solver, relative to a device's memory

Placed = Sequence[tuple[Piece, int]]
Answer = TypeVar("Answer")


class Undecided(UserError):  # noqa: N818 - neither yes nor no
    """The search reached its time limit without an answer."""


@dataclass(frozen=True)
class Contradiction:
    """A minimal set of rules that exclude each other: without any of them there is a plan.

    Args:
        rules: Names of the rules.
        memory: Whether the memory of the devices is part of the conflict.
    """

    rules: tuple[str, ...]
    memory: bool


def _cached(
    solve: Callable[[ShardingTask, bool], Answer],
) -> Callable[[ShardingTask, bool], Answer]:
    """Caches answers and `Undecided`, because several sharders solve the same task."""

    @lru_cache(maxsize=8)
    def outcome(task: ShardingTask, split: bool) -> Answer | Undecided:
        try:
            return solve(task, split)
        except Undecided as undecided:
            return undecided

    @wraps(solve)
    def answer(task: ShardingTask, split: bool) -> Answer:
        found = outcome(task, split)
        if isinstance(found, Undecided):
            raise found
        return found

    return answer


@_cached
def any_plan(task: ShardingTask, split: bool) -> Placed | None:
    """Returns pieces and devices of some valid plan; None if there is none.

    Args:
        task: Task to plan.
        split: Whether tables may be split by columns.

    Raises:
        Undecided: The time limit was reached.
    """
    return _any_plan(task, split, time.monotonic() + _SECONDS)


@_cached
def contradiction(task: ShardingTask, split: bool) -> Contradiction | None:
    """Returns a minimal set of rules that exclude each other; None if there is a plan.

    Raises:
        Undecided: The time limit was reached.
    """
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
    """Returns a minimal conflicting subset of the task's rules by QuickXplain (Junker, 2004)."""

    def impossible(rules: Sequence[Rule]) -> bool:
        return _any_plan(replace(task, rules=tuple(rules)), split, deadline) is None

    def conflict(rules: list[Rule], background: list[Rule], has_grown: bool) -> list[Rule]:
        if has_grown and impossible(background):
            return []
        if len(rules) == 1:
            return rules
        first, second = rules[: len(rules) // 2], rules[len(rules) // 2 :]
        late = conflict(second, background + first, bool(first))
        early = conflict(first, background + late, bool(late))
        return early + late

    if not task.rules or impossible(()):
        return []
    return conflict(list(task.rules), [], False)


def _without_memory(task: ShardingTask) -> ShardingTask | None:
    """Returns the task of all tables with rules, with more memory than they need; None without any.

    The other tables can then be on any device, and no table has to be split.
    """
    ruled = {name for rule in task.rules for name in rule.tables}
    tables = tuple(table for table in task.tables if table.name in ruled)
    needed = sum(map(task.table_bytes, tables))
    devices = tuple(
        replace(device, memory_bytes=device.memory_bytes + needed) for device in task.devices
    )
    return replace(task, tables=tables, devices=devices) if tables else None


def _any_plan(task: ShardingTask, split: bool, deadline: float) -> Placed | None:
    """Tries whole tables first, because that is faster in most cases."""
    if not split:
        return _Program(task, split=False).solved(deadline)
    with suppress(Undecided):  # where whole tables hardly fit, split ones may be solved at once
        now = time.monotonic()
        found = _Program(task, split=False).solved(now + _WHOLE_SHARE * (deadline - now))
        if found is not None:
            return found
    return _Program(task, split=True).solved(deadline)


class _Program:
    """The mixed-integer program of a task.

    Variables, each [tables, devices] in row-major order: whether the table has columns on the
    device (binary), and how many, in units of DIM_STEP (integer).
    """

    def __init__(self, task: ShardingTask, split: bool) -> None:
        self._task = task
        self._split = split
        self._masks = RuleMasks(task)
        self._tables, self._devices = len(task.tables), len(task.devices)
        self._steps = np.array([table.dim // DIM_STEP for table in task.tables], np.float64)
        units = self._masks.numbers([table.whole() for table in task.tables])
        parts = np.minimum(self._masks.max_parts[units], self._devices if split else 1)
        self._max_parts = parts.astype(np.float64)
        self._min_steps = np.ceil(self._masks.min_width[units] / DIM_STEP)
        self._allowed = self._masks.allowed[units].astype(float)

    def solved(self, deadline: float) -> Placed | None:
        """Returns a plan, or None if there is none; raises Undecided at the deadline."""
        for margin in (0.0, _TOLERANCE):
            remaining = deadline - time.monotonic()
            found = self._solve(margin, remaining) if remaining > 0 else None
            if found is None or (found.x is None and found.status != _INFEASIBLE):
                break
            if found.x is None:
                if margin:  # a plan within the tolerance is neither found nor excluded
                    break
                return None
            placed = self._placed(np.rint(found.x))
            if self._fits(placed):
                return placed
        raise Undecided(
            f"within {_SECONDS:.0f} s neither a plan is found that keeps all constraints, nor that "
            "there is none"
        )

    def _solve(self, margin: float, seconds: float) -> "scipy.optimize.OptimizeResult":
        count = self._tables * self._devices
        allowed = self._allowed
        upper = np.concatenate([allowed.ravel(), (allowed * self._steps[:, None]).ravel()])
        return scipy.optimize.milp(
            np.zeros(2 * count),
            integrality=np.ones(2 * count),
            bounds=scipy.optimize.Bounds(0, upper),
            constraints=[*self._columns(), *self._together(), *self._memory(margin)],
            options={"time_limit": seconds},
        )

    def _columns(self) -> "list[scipy.optimize.LinearConstraint]":
        """Returns constraints on columns: all are placed, in parts that the rules allow."""
        identity = scipy.sparse.identity(self._tables * self._devices, format="csr")
        of_table = scipy.sparse.kron(
            scipy.sparse.identity(self._tables), np.ones((1, self._devices)), format="csr"
        )
        nothing = scipy.sparse.csr_matrix(of_table.shape)
        steps = np.repeat(self._steps, self._devices)
        # A table that is not split may be narrower than the minimum width of parts.
        min_steps = np.minimum(np.maximum(self._min_steps, 1), self._steps)
        lower = np.repeat(min_steps, self._devices)
        return [
            scipy.optimize.LinearConstraint(
                scipy.sparse.hstack([nothing, of_table]), self._steps, self._steps
            ),
            scipy.optimize.LinearConstraint(
                scipy.sparse.hstack([of_table, nothing]), 1, self._max_parts
            ),
            scipy.optimize.LinearConstraint(
                scipy.sparse.hstack([scipy.sparse.diags(steps), -identity]), 0, np.inf
            ),  # no columns where the table is not
            scipy.optimize.LinearConstraint(
                scipy.sparse.hstack([-scipy.sparse.diags(lower), identity]), 0, np.inf
            ),
        ]

    def _together(self) -> "list[scipy.optimize.LinearConstraint]":
        """Returns constraints of the rules over several tables."""
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

    def _memory(self, margin: float) -> "list[scipy.optimize.LinearConstraint]":
        """Returns constraints on memory: bytes of a part are linear in its columns."""
        capacities = self._task.usable_bytes.astype(float)
        narrow = [self._task.piece_bytes(Piece(t, 0, DIM_STEP)) for t in self._task.tables]
        whole = [self._task.table_bytes(table) for table in self._task.tables]
        sizes = np.array([narrow, whole], np.float64).T
        per_step = (sizes[:, 1] - sizes[:, 0]) / np.maximum(self._steps - 1, 1)
        fixed = sizes[:, 0] - per_step
        scale = 1 / capacities.max()
        on_device = scipy.sparse.identity(self._devices)
        parts = [
            scipy.sparse.hstack([on_device * value * scale for value in values])
            for values in (fixed, per_step)
        ]
        upper = capacities * scale * (1 - margin)
        return [scipy.optimize.LinearConstraint(scipy.sparse.hstack(parts, format="csr"), 0, upper)]

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
