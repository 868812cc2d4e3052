"""Replica groups: groups of ranks that each hold one copy of all tables (2D parallelism).

Every group trains its own copy by the same plan, on its share of each batch. All-to-alls stay in a
group. The copies are averaged every few steps by an all-reduce among the ranks that hold the same
shards. In TorchRec, this is `DMPCollection`, whose two layouts of groups are those here.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from autoshard.workload.errors import FieldError, UserError
from autoshard.workload.tasks.links import AnyLink, Link, Network, all_reduce_ms
from autoshard.workload.tasks.task import ShardingTask

if TYPE_CHECKING:
    from autoshard.workload.plans.plan import ShardingPlan


@dataclass(frozen=True)
class ReplicaGroups:
    """A layout of ranks in groups of equal size, each with one copy of all tables.

    Args:
        num_devices: Ranks of all groups together.
        group_size: Ranks of a group.
        consecutive: Whether the ranks of a group have consecutive numbers, so that copies are
            averaged between nodes (`use_inter_host_allreduce` of DMPCollection). By default, the
            ranks that hold the same shards have.
        sync_interval: Steps from one average of the copies to the next.
        node_size: Ranks of a group on each node (`node_group_size`). Default: all of the group.
    """

    num_devices: int
    group_size: int
    consecutive: bool = False
    sync_interval: int = 1
    node_size: int = 0

    def __post_init__(self) -> None:
        for name in ("num_devices", "group_size", "sync_interval"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise FieldError(name, f"must be a whole number of at least 1, got {value!r}")
        if self.num_devices % self.group_size:
            raise FieldError(
                "group_size",
                f"{self.num_devices} devices are no groups of {self.group_size}: take one of "
                f"{', '.join(map(str, group_sizes(self.num_devices)))}",
            )
        if type(self.consecutive) is not bool:
            raise FieldError("consecutive", f"must be true or false, got {self.consecutive!r}")
        object.__setattr__(self, "node_size", self.node_size or self.group_size)
        if type(self.node_size) is not int or self.group_size % self.node_size:
            problem = f"must divide the group size {self.group_size}, got {self.node_size!r}"
            raise FieldError("node_size", problem)

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.num_devices // self.group_size

    def ranks(self, group: int) -> range:
        """Returns the ranks of a group; device i of the plan is the i-th of them."""
        return self._groups[group]

    def holders(self, device: int) -> range:
        """Returns the ranks that hold the shard of a device of the plan, one of each group."""
        return self._holders[device]

    def device(self, rank: int) -> int:
        """Returns the device of the plan that a rank is in its group."""
        return rank % self.group_size if self.consecutive else rank // self.count

    @property
    def _groups(self) -> list[range]:
        return _lines(self.num_devices, self.group_size, self.consecutive)

    @property
    def _holders(self) -> list[range]:
        return _lines(self.num_devices, self.count, not self.consecutive)

    def of_groups(self, link: AnyLink) -> AnyLink:
        """Returns the network of the ranks of a group; UserError if groups differ in theirs."""
        return _part(link, self._groups, self)

    def of_holders(self, link: AnyLink) -> AnyLink:
        """Returns the network of the ranks that hold the same shard; UserError as above."""
        return _part(link, self._holders, self)

    def task(self, task: ShardingTask) -> ShardingTask:
        """Returns the task of one group, whose device i has the memory of the least of its holders.

        Args:
            task: Task of all devices.

        Raises:
            FieldError: A rule names a device that a group has not.
            UserError: Groups differ in their devices on nodes.
        """
        if len(task.devices) != self.num_devices:
            raise UserError(
                f"replica groups of {self.num_devices} devices do not fit the task's "
                f"{len(task.devices)}: take a plan for as many"
            )
        devices = []
        for own, ranks in zip(task.devices, self._holders, strict=False):
            least = min((task.devices[rank] for rank in ranks), key=lambda d: d.usable_bytes)
            devices.append(replace(least, name=own.name))
        objective, batch_size = task.objective, round(task.batch_size / self.count)
        if objective.link is not None and self.count > 1:
            objective = replace(
                objective,
                link=self.of_groups(objective.link),
                copies_over=(objective.link, self.num_devices),
            )
        batch_size = max(1, batch_size)
        return replace(task, devices=tuple(devices), batch_size=batch_size, objective=objective)

    def sync_ms(self, plan: "ShardingPlan", task: ShardingTask, link: AnyLink) -> float:
        """Returns the milliseconds of one average of the copies.

        DMPCollection averages weights, then the state of Adagrad. The rank that holds most takes
        longest. Tables that the plan copies to all ranks are equal on all of them already.

        Args:
            plan: Plan of a group.
            task: Task of a group.
            link: Network of all devices.
        """
        if self.count == 1:
            return 0.0
        held = [(parts.weights, parts.optimizer) for parts in _held(plan, task)]
        over = self.of_holders(link)
        kinds = sum(any(sizes) for sizes in zip(*held, strict=True))
        return all_reduce_ms(over, self.count, max(map(sum, held)), kinds)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON object."""
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any] | None) -> "ReplicaGroups | None":
        """Returns what `to_json` wrote; None without it."""
        if document is None:
            return None
        if not isinstance(document, Mapping) or set(document) - set(
            ReplicaGroups.__dataclass_fields__
        ):
            known = ", ".join(ReplicaGroups.__dataclass_fields__)
            raise FieldError("replicas", f"must be an object of {known}")
        return ReplicaGroups(**document)


def _held(plan: "ShardingPlan", task: ShardingTask) -> Sequence[Any]:
    """Returns the memory of what each device holds alone."""
    return [task.operator.memory(pieces, task.batch_size) for pieces in plan.pieces(task)]


def rank_bytes(plan: "ShardingPlan", task: ShardingTask) -> tuple[int, ...]:
    """Returns the bytes that each rank needs, of all replica groups if the plan has some.

    Args:
        plan: Plan, of a group or of all devices.
        task: Task of all devices.
    """
    groups = plan.replicas
    if groups is None:
        return plan.device_bytes(task)
    sizes = plan.device_bytes(groups.task(task))
    return tuple(sizes[groups.device(rank)] for rank in range(groups.num_devices))


def group_sizes(num_devices: int) -> list[int]:
    """Returns the sizes of equal groups of so many devices, in ascending order."""
    return [size for size in range(1, num_devices + 1) if num_devices % size == 0]


def layouts(task: ShardingTask, group_size: int, sync_interval: int = 1) -> list[ReplicaGroups]:
    """Returns the layouts of a group size on the task's nodes, one of each price.

    Raises:
        FieldError: The devices cannot be divided into such groups.
        UserError: On these nodes, groups would differ in either layout.
    """
    number, link = len(task.devices), task.objective.link
    found, problems = dict[Any, ReplicaGroups](), list[UserError]()
    for consecutive in (False, True):
        groups = ReplicaGroups(number, group_size, consecutive, sync_interval)
        if link is None:
            return [groups]
        try:
            inside, between = groups.of_groups(link), groups.of_holders(link)
        except UserError as problem:
            problems.append(problem)
            continue
        of_node = group_size // inside.nodes(group_size)
        found.setdefault((inside, between), replace(groups, node_size=of_node))
    if not found:
        raise problems[-1]
    return list(found.values())


def _lines(total: int, size: int, consecutive: bool) -> list[range]:
    """Returns all ranks in lines of a size: consecutive ones, or as far apart as possible."""
    if consecutive:
        return [range(first, first + size) for first in range(0, total, size)]
    return [range(first, total, total // size) for first in range(total // size)]


def _part(link: AnyLink, lines: Sequence[range], groups: ReplicaGroups) -> AnyLink:
    """Returns the network of some of the devices, alike for each of these lines of them."""
    if isinstance(link, Link):
        return link
    size = link.devices_per_node
    shares = {n for line in lines for n in Counter(rank // size for rank in line).values()}
    if len(shares) > 1:
        raise UserError(
            f"groups of {groups.group_size} of {groups.num_devices} devices are spread unevenly "
            f"over nodes of {size}: take a group size, or number of groups, that divides {size} or "
            "is a multiple of it"
        )
    (share,) = shares
    if share == len(lines[0]):
        return link.inside
    return Network(link.inside, link.between, share)
