"""A task's rules as those who place tables need them: what goes together, and what may go where."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoshard.workload.operators import OperatorOptions
from autoshard.workload.tables import TableSlice, can_be_halved, halves
from autoshard.workload.tasks import ShardingTask

Truths = npt.NDArray[np.bool_]
Whole = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Bundle:
    """What is placed at once: a slice, or whole tables that a rule keeps together."""

    slices: tuple[TableSlice, ...]

    @staticmethod
    def of(piece: "TableSlice | Bundle") -> "Bundle":
        """Of a single slice; a bundle is one already."""
        return piece if isinstance(piece, Bundle) else Bundle((piece,))

    @property
    def name(self) -> str:
        """Of its first table: different for bundles of different tables."""
        return self.slices[0].table.name

    @property
    def columns(self) -> int:
        """Of the output, that it brings to its device."""
        return sum(piece.output_width for piece in self.slices)

    @property
    def can_be_halved(self) -> bool:
        """True if it is one slice, and wide enough."""
        return len(self.slices) == 1 and can_be_halved(self.slices[0])

    def halves(self) -> tuple["Bundle", "Bundle"]:
        """Of a bundle of one slice that may be halved: two, of nearly equal width."""
        (piece,) = self.slices
        first, second = halves(piece)
        return Bundle((first,)), Bundle((second,))


Piece = TableSlice | Bundle


def bytes_of_bundles(
    operator: OperatorOptions, batch_size: int, bundles: Sequence[Bundle]
) -> Whole:
    """Bytes of each of these on its device, with those that a batch needs: [bundles]."""
    slices = [piece for bundle in bundles for piece in bundle.slices]
    sizes = operator.bytes_of_each(slices, batch_size)
    starts = np.cumsum([0, *(len(bundle.slices) for bundle in bundles)])[:-1]
    return np.add.reduceat(sizes, starts) if len(bundles) else sizes


class Terms:
    """What a task's rules admit.

    Args:
        task: whose rules they are.
    """

    def __init__(self, task: ShardingTask) -> None:
        self._task = task
        self._whole: set[str] = set()
        self._most_slices: dict[str, int] = {}
        self._least_width: dict[str, int] = {}
        self._barred: dict[str, Truths] = {}  # devices, by table
        self._apart = [rule for rule in task.rules if rule.kind == "apart"]
        for rule in task.rules:
            for table in rule.tables:
                if rule.kind in ("together", "whole"):
                    self._whole.add(table)
                elif rule.kind == "most_slices":
                    most = min(rule.numbers[0], self._most_slices.get(table, rule.numbers[0]))
                    self._most_slices[table] = most
                elif rule.kind == "least_width":
                    least = max(rule.numbers[0], self._least_width.get(table, 0))
                    self._least_width[table] = least
                elif rule.of_devices:
                    named = np.isin(np.arange(len(task.devices)), rule.numbers)
                    barred = named if rule.kind == "not_on" else ~named
                    self._barred[table] = self._barred.get(table, False) | barred

    def bundles(self) -> list[Bundle]:
        """All tables of the task, whole, in its order; those that go together are one."""
        leader = {table.name: table.name for table in self._task.tables}

        def led_by(name: str) -> str:
            while leader[name] != name:
                name = leader[name]
            return name

        for rule in self._task.rules:
            if rule.kind == "together":
                for other in rule.tables[1:]:
                    leader[led_by(other)] = led_by(rule.tables[0])
        joined: dict[str, list[TableSlice]] = {}
        for table in self._task.tables:
            joined.setdefault(led_by(table.name), []).append(table.whole())
        return [Bundle(tuple(slices)) for slices in joined.values()]

    def gathered(self, placed: Sequence[tuple[TableSlice, int]]) -> list[tuple[Bundle, int]]:
        """The slices of a plan in bundles, each with its device."""
        if not any(rule.kind == "together" for rule in self._task.rules):
            return [(Bundle.of(piece), device) for piece, device in placed]
        homes = {piece.table.name: device for piece, device in placed}
        joined = [bundle for bundle in self.bundles() if len(bundle.slices) > 1]
        names = {piece.table.name for bundle in joined for piece in bundle.slices}
        alone = [(Bundle.of(p), device) for p, device in placed if p.table.name not in names]
        return [(bundle, homes[bundle.name]) for bundle in joined] + alone

    def lawful(self, bundles: Sequence[Bundle]) -> Truths:
        """Whether each may lie on each device, as far as it alone goes: [bundles, devices]."""
        found = np.ones((len(bundles), len(self._task.devices)), bool)
        if not self._task.rules:
            return found
        for number, bundle in enumerate(bundles):
            for piece in bundle.slices:
                found[number] &= ~self._barred.get(piece.table.name, np.False_)
            if self._contradicts_itself(bundle):
                found[number] = False
        return found

    def _contradicts_itself(self, bundle: Bundle) -> bool:
        names = {piece.table.name for piece in bundle.slices}
        return any(len(names.intersection(rule.tables)) > 1 for rule in self._apart)

    def groups(self, bundles: Sequence[Bundle]) -> Truths:
        """Which bundles are in which group of tables that are to lie apart: [bundles, groups]."""
        members = [frozenset(rule.tables) for rule in self._apart]
        return np.array(
            [
                [any(s.table.name in group for s in bundle.slices) for group in members]
                for bundle in bundles
            ],
            bool,
        ).reshape(len(bundles), len(members))

    def kin(self, bundles: Sequence[Bundle]) -> Whole:
        """Equal numbers for slices of the same table: those need not lie apart."""
        numbers = {table.name: number for number, table in enumerate(self._task.tables)}
        return np.array([numbers[bundle.name] for bundle in bundles], np.int64)

    def conflicts(
        self, bundles: Sequence[Bundle], others: Sequence[Bundle] | None = None
    ) -> Truths | None:
        """Which may not lie on one device with which, by default of the same: [bundles, others];
        None where no rule keeps tables apart.
        """
        if not self._apart:
            return None
        others = bundles if others is None else others
        ours, theirs = (self.groups(some).astype(np.float32) for some in (bundles, others))
        different = self.kin(bundles)[:, None] != self.kin(others)[None]
        return np.asarray((ours @ theirs.T > 0) & different)

    def freedom(self, bundles: Sequence[Bundle]) -> Whole:
        """On how many devices each may lie, and one less for each that it is to lie apart from.

        Those with little come first where tables are placed one by one.
        """
        counts = self.lawful(bundles).sum(1)
        conflicts = self.conflicts(bundles)
        if conflicts is not None:
            counts = counts - conflicts.sum(1)
        return np.asarray(counts, np.int64)

    def may_halve(self, bundle: Bundle, slices: int = 1) -> bool:
        """Whether a slice may become two, where there are so many of its table already."""
        name = bundle.name
        if name in self._whole or not bundle.can_be_halved:
            return False
        narrow = min(half.width for half in halves(bundle.slices[0]))
        enough = narrow >= self._least_width.get(name, 0)
        return enough and slices < self._most_slices.get(name, slices + 1)

    def too_many(self, bundles: Sequence[Bundle]) -> bool:
        """Whether these are more slices of a table than a rule allows."""
        counts = Counter(bundle.name for bundle in bundles) if self._most_slices else Counter[str]()
        return any(counts[table] > most for table, most in self._most_slices.items())

    def limits(self, table: str) -> tuple[int, int]:
        """The most slices of a table, and the least columns that one of several may have."""
        if table in self._whole:
            return 1, 0
        devices = len(self._task.devices)
        return self._most_slices.get(table, devices), self._least_width.get(table, 0)
