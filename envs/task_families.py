"""Families of tasks: each tells something else of who shards. All are here, and nowhere else.

Each has its tables, its counts of tables and devices, and what plans are judged by; memory is loose
or tight. Tables are split by `workload.parts` like any others: what is trained on in one family
is tested on in none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autoshard.envs.task_sampling import MixedTaskSampler, RandomTaskSampler
from autoshard.workload import EmbeddingTable, UserError, load_tables

Memory = Literal["loose", "tight"]

# Shares of all memory that the tables take. Where first fit decreasing packs no such task (with
# tables halved, if one is larger than any device), it gets more memory until it does, and is tight.
FILLS: dict[Memory, tuple[float, float]] = {"loose": (0.1, 0.6), "tight": (0.9, 0.95)}
ALL = "all"


@dataclass(frozen=True)
class TaskFamily:
    """Tasks of a kind.

    Args:
        told: what they are, in a line.
        source: of their tables, as `load_tables` takes it.
        num_tables: fewest and most.
        num_devices: fewest and most.
        unevenness: as `RandomTaskSampler` takes it, and so are the others.
        exchange_share: of a step.
        trained: whether they are dealt in training where all families are; the others are of sizes
            that nobody trains on.
    """

    told: str
    source: str
    num_tables: tuple[int, int]
    num_devices: tuple[int, int]
    unevenness: float = 0.0
    exchange_share: tuple[float, float] | None = None
    trained: bool = True

    @property
    def among(self) -> str:
        """What names of its tables begin with, in a deck that has those of several sources."""
        return f"{self.source}/"

    def tables(self) -> tuple[EmbeddingTable, ...]:
        """Of all parts, by names of their own; families of one source have the same."""
        named = load_tables(self.source)
        return tuple(replace(table, name=f"{self.among}{table.name}") for table in named)

    def task_sampler(self, memory: Memory) -> RandomTaskSampler:
        """Who deals its tasks, from a deck that has some of its tables."""
        return RandomTaskSampler(
            self.num_tables,
            self.num_devices,
            FILLS[memory],
            self.unevenness,
            self.among,
            True,
            self.exchange_share,
        )


_POOL = "synthetic:1200:11:small"
FAMILIES: dict[str, TaskFamily] = {
    "small": TaskFamily("60 tables on 4 devices", _POOL, (60, 60), (4, 4)),
    "large": TaskFamily("100 tables on 8 devices", _POOL, (100, 100), (8, 8)),
    "giants": TaskFamily(
        "a few giants among many dwarfs on 4 to 8 devices: MLPerf's and Criteo's models, varied",
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
    "thousand": TaskFamily(
        "1,000 tables on 32 devices", "synthetic:5500:11:small", (1000, 1000), (32, 32),
        trained=False,
    ),
    "thousands": TaskFamily(
        "5,000 tables on 256 devices", "synthetic:26000:11:small", (5000, 5000), (256, 256),
        trained=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """A family, and which memory; of None both, with equal odds."""

    name: str
    memory: Memory | None = None

    @property
    def family(self) -> TaskFamily:
        """Of that name."""
        return FAMILIES[self.name]

    @property
    def memories(self) -> tuple[Memory, ...]:
        """That which is asked for, or both."""
        return tuple(FILLS) if self.memory is None else (self.memory,)

    @property
    def task_sampler(self) -> RandomTaskSampler | MixedTaskSampler:
        """Who deals."""
        each = tuple(self.family.task_sampler(memory) for memory in self.memories)
        return each[0] if len(each) == 1 else MixedTaskSampler(each)

    @staticmethod
    def read(text: str, option: str) -> "Choice":
        """Of `NAME[:loose|:tight]`; UserError names the option, and all families that there are."""
        name, colon, memory = text.strip().partition(":")
        known = next((each for each in FILLS if each == memory), None)
        if name not in FAMILIES or (colon and known is None):
            raise UserError(
                f"{option}: {text.strip()!r} is not one of {', '.join(FAMILIES)}, "
                f"each with :loose, :tight or neither"
            )
        return Choice(name, known)


def read_choices(text: str, option: str) -> tuple[Choice, ...]:
    """Of names with commas between them, or `all` that are trained on."""
    if text.strip() == ALL:
        return tuple(Choice(name) for name, family in FAMILIES.items() if family.trained)
    return tuple(dict.fromkeys(Choice.read(part, option) for part in text.split(",")))


def tables_of(choices: Sequence[Choice]) -> tuple[EmbeddingTable, ...]:
    """The tables of these families for one deck, each once."""
    sources = {choice.family.source: choice.family for choice in choices}
    return tuple(table for family in sources.values() for table in family.tables())


def task_sampler_of(choices: Sequence[Choice]) -> MixedTaskSampler:
    """Who deals tasks of these families, with equal odds."""
    return MixedTaskSampler(tuple(choice.task_sampler for choice in choices))
