"""Families of tasks: distributions that differ in tables, devices, links and memory.

Each family defines its tables and the numbers of tables and devices; memory is loose or tight.
Tables are divided by `workload.tables.parts`, so that no family is tested on tables of any
training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autoshard.envs.task_sampling import MixedTaskSampler, RandomTaskSampler
from autoshard.workload import EmbeddingTable, UserError, load_tables

Memory = Literal["loose", "tight"]

# Share of all memory that the tables need. Where first fit decreasing does not pack a task (with
# tables split, if one is larger than any device), memory grows until it does: that is tight too.
FILLS: dict[Memory, tuple[float, float]] = {"loose": (0.1, 0.6), "tight": (0.9, 0.95)}
ALL = "all"


@dataclass(frozen=True)
class TaskFamily:
    """Distribution of tasks of one kind.

    Args:
        text: Description in one line.
        source: Source of the tables, for `load_tables`.
        num_tables: Minimum and maximum number of tables.
        num_devices: Minimum and maximum number of devices.
        unevenness: Unevenness of device memory (see `RandomTaskSampler`).
        exchange_share: Share of all-to-alls in the step time (see `RandomTaskSampler`).
        mixed: Whether devices are of two kinds of hardware (see `RandomTaskSampler`).
        trained: Whether `all` includes the family. Others are of sizes that are only tested.
    """

    text: str
    source: str
    num_tables: tuple[int, int]
    num_devices: tuple[int, int]
    unevenness: float = 0.0
    exchange_share: tuple[float, float] | None = None
    mixed: bool = False
    trained: bool = True

    @property
    def prefix(self) -> str:
        """Prefix of the names of its tables, for catalogs of several sources."""
        return f"{self.source}/"

    def tables(self) -> tuple[EmbeddingTable, ...]:
        """Returns the tables of all parts, with prefixed names; equal for families of a source."""
        tables = load_tables(self.source)
        return tuple(replace(table, name=f"{self.prefix}{table.name}") for table in tables)

    def task_sampler(self, memory: Memory) -> RandomTaskSampler:
        """Returns the sampler of its tasks, for a catalog that has some of its tables."""
        return RandomTaskSampler(
            self.num_tables,
            self.num_devices,
            FILLS[memory],
            self.unevenness,
            self.prefix,
            True,
            self.exchange_share,
            mixed=self.mixed,
        )


_POOL = "synthetic:1200:11:small"
FAMILIES: dict[str, TaskFamily] = {
    "small": TaskFamily("60 tables on 4 devices", _POOL, (60, 60), (4, 4)),
    "large": TaskFamily("100 tables on 8 devices", _POOL, (100, 100), (8, 8)),
    "giants": TaskFamily(
        "a few very large tables among many small ones on 4 to 8 devices, as in MLPerf and Criteo",
        "giants:1040:11", (26, 60), (4, 8),
    ),
    "slow_link": TaskFamily(
        "wide tables on 8 devices, all-to-alls over a link so slow that they take 30 to 70 % of "
        "a step",
        "wide:900:11", (60, 60), (8, 8), exchange_share=(0.3, 0.7),
    ),
    "directions": TaskFamily(
        "40 tables on 8 devices, half of them costly forward, half of them backward",
        "directions:600:11", (40, 40), (8, 8),
    ),
    "uneven": TaskFamily(
        "60 tables on 8 devices, of which one may have four times the memory of another",
        _POOL, (60, 60), (8, 8), unevenness=0.75,
    ),
    "skewed": TaskFamily(
        "tables as those of giants with skewed lookups, on 8 devices with a slow link",
        "skewed:1040:11", (26, 60), (8, 8), exchange_share=(0.3, 0.7),
    ),
    "tiny": TaskFamily(
        "100 tiny tables on 4 devices",
        "tiny:1000:11", (100, 100), (4, 4),
    ),
    "mixed": TaskFamily(
        "60 tables on 4 to 8 devices of two kinds of hardware",
        _POOL, (60, 60), (4, 8), mixed=True,
    ),
    "thousand": TaskFamily(
        "1,000 tables on 32 devices", "synthetic:5500:11:small", (1000, 1000), (32, 32),
        trained=False,
    ),
    "thousand_tiny": TaskFamily(
        "1,000 tiny tables on 32 devices", "tiny:5500:11", (1000, 1000), (32, 32), trained=False,
    ),
    "thousands": TaskFamily(
        "5,000 tables on 256 devices", "synthetic:26000:11:small", (5000, 5000), (256, 256),
        trained=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """A family and its memory; None stands for both kinds with equal probabilities."""

    name: str
    memory: Memory | None = None

    @property
    def family(self) -> TaskFamily:
        """The family of that name."""
        return FAMILIES[self.name]

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The kinds of memory."""
        return tuple(FILLS) if self.memory is None else (self.memory,)

    @property
    def task_sampler(self) -> RandomTaskSampler | MixedTaskSampler:
        """The sampler of its tasks."""
        samplers = tuple(self.family.task_sampler(memory) for memory in self.memories)
        return samplers[0] if len(samplers) == 1 else MixedTaskSampler(samplers)

    @staticmethod
    def read(text: str, option: str) -> "Choice":
        """Returns the choice that `NAME[:loose|:tight]` stands for.

        Raises:
            UserError: There is no such family or memory. It names the option and all families.
        """
        name, colon, memory = text.strip().partition(":")
        known = next((each for each in FILLS if each == memory), None)
        if name not in FAMILIES or (colon and known is None):
            raise UserError(
                f"{option}: {text.strip()!r} is not one of {', '.join(FAMILIES)}, "
                f"each with :loose, :tight or neither"
            )
        return Choice(name, known)


def read_choices(text: str, option: str) -> tuple[Choice, ...]:
    """Returns the choices of a comma-separated list; of `all`, the families with `trained`."""
    if text.strip() == ALL:
        return tuple(Choice(name) for name, family in FAMILIES.items() if family.trained)
    return tuple(dict.fromkeys(Choice.read(part, option) for part in text.split(",")))


def tables_of(choices: Sequence[Choice]) -> tuple[EmbeddingTable, ...]:
    """Returns the tables of these families for one catalog, without duplicates."""
    sources = {choice.family.source: choice.family for choice in choices}
    return tuple(table for family in sources.values() for table in family.tables())


def task_sampler_of(choices: Sequence[Choice]) -> MixedTaskSampler:
    """Returns a sampler that mixes these families with equal probabilities."""
    return MixedTaskSampler(tuple(choice.task_sampler for choice in choices))
