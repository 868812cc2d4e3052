"""Options that tables of episodes have taken, and what devices hold and bear by them."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from autoshard.cost_model.step.common_price import NODES, CommonRates, loads_of_whole, num_sharded
from autoshard.envs.catalog import TableCatalog, TaskInstance
from autoshard.envs.devices import EpisodeDevices
from autoshard.envs.options import NO_OPTIONS, NO_UNIT, OPTION_KINDS
from autoshard.workload import Piece
from autoshard.workload.arrays import Floats, Ints
from autoshard.workload.plans.step_price import StepPrice
from autoshard.workload.ways.option import Options

COLUMNS = list(StepPrice.__annotations__).index("columns")
_RATES = 7  # numbers of `CommonRates.row`


class Taken(NamedTuple):
    """An option that was taken.

    Args:
        unit: The catalog's number of the unit.
        kind: Number of the kind.
        first: First device of its blocks.
    """

    unit: int
    kind: int
    first: int


class EpisodeOptions(EpisodeDevices):
    """Devices of parallel episodes whose tables may take options.

    Args:
        catalog: Units of all tasks.
        num_envs: Number of parallel episodes.
        max_devices: Maximum number of devices of a task.
        kinds: Kinds of options that may be taken.

    Attributes:
        taken: The options that were taken in each episode, in their order.
        splits: Slices of outputs that are more than one for a feature, [envs].
        even_split_ms: Step time if all work were spread evenly over devices, [envs].
        common_ms: What options and splits add to a step on all devices alike, [envs].
    """

    def __init__(
        self, catalog: TableCatalog, num_envs: int, max_devices: int, kinds: Collection[str]
    ) -> None:
        super().__init__(catalog, num_envs, max_devices)
        self.kinds_taken = torch.tensor([kind in kinds for kind in OPTION_KINDS])
        self.first = torch.zeros(num_envs, len(OPTION_KINDS), dtype=torch.int64)
        self.taken: list[list[Taken]] = [[] for _ in range(num_envs)]
        self.tasks = torch.full((num_envs,), NO_OPTIONS)  # numbers of `OptionCatalog`
        self.splits = torch.zeros(num_envs, dtype=torch.int64)
        self.common_ms = torch.zeros(num_envs)
        self.any_options = self._any_common = False
        self.loads = np.zeros((num_envs, NODES + max_devices))
        self._rates = np.zeros((num_envs, _RATES))
        self._base_ms = np.zeros(num_envs)
        self.numbers = torch.arange(max_devices)
        self.even_split_ms = torch.ones(num_envs)

    @property
    def plan_ms(self) -> Tensor:
        """Step time of each episode's partial plan, by the task's objective: [envs]."""
        return super().plan_ms + self.common_ms

    def begin_options(self, new: Tensor, instances: Sequence[TaskInstance]) -> None:
        """Begins episodes in which all tables are whole."""
        catalog, overhead = self.catalog, self.catalog.overhead
        allowed = bool(self.kinds_taken[1:].any())
        numbers = [catalog.options_of(each) if allowed else NO_OPTIONS for each in instances]
        self.tasks[new] = torch.tensor(numbers)
        self.any_options = bool(self.tasks.any())
        self._any_common = self.any_options or overhead is not None
        self.splits[new], self.common_ms[new] = 0, 0.0
        for env_id in new.tolist():
            self.taken[env_id] = []
        if not self._any_common:
            return
        rows = zip(new.tolist(), instances, numbers, self.prices[new].tolist(), strict=True)
        for env_id, instance, number, price in rows:
            known, columns = catalog.options.known[number], price[COLUMNS]
            if known is not None and known.base_loads is not None:
                columns = float(known.options.task.columns_in_order)
            ranks = round(StepPrice(*price).ranks)
            rates = CommonRates.of(overhead, instance.objective, catalog.batch_size, ranks, columns)
            self._rates[env_id] = rates.row

    def count_loads(self, env_ids: Tensor, instances: Sequence[TaskInstance]) -> None:
        """Adds up loads of the options that were taken, and prices them."""
        if not self._any_common:
            return
        self.loads[env_ids] = 0.0
        for env_id, instance in zip(env_ids.tolist(), instances, strict=True):
            known = self.catalog.options.known[int(self.tasks[env_id])]
            base = None if known is None else known.base_loads
            base = loads_of_whole(len(instance.units)) if base is None else base
            self.loads[env_id, : len(base)] = base
        numbers = env_ids.numpy()
        rates = CommonRates.rows(self.catalog.overhead, self._rates[numbers])
        self._base_ms[numbers] = rates.ms(self.loads[numbers])
        if taken := [(n, *each) for n in env_ids.tolist() for each in self.taken[n]]:
            rows, *options = torch.tensor(taken).unbind(1)
            np.add.at(self.loads, rows.numpy(), self.added_loads(rows, *options))
        self.price_common(env_ids)

    def price_common(self, env_ids: Tensor) -> None:
        """Prices what all devices of these episodes bear."""
        if self._any_common:
            numbers = env_ids.numpy()
            found = self.common_ms_of(numbers, self.loads[numbers], self.splits.numpy()[numbers])
            self.common_ms[env_ids] = torch.from_numpy(found).float()

    def common_ms_of(self, env_ids: Ints, loads: Floats, splits: Ints) -> Floats:
        """Returns what all devices bear with these sums of loads, beside whole tables: [envs]."""
        rates = CommonRates.rows(self.catalog.overhead, self._rates[env_ids])
        found = rates.ms(loads, splits) - self._base_ms[env_ids]
        nothing = num_sharded(loads) < 0.5  # then no exchange starts, as prices of devices have it
        if nothing.any():
            price = StepPrice.rows(self.prices[torch.from_numpy(env_ids)])
            idle_ms = (price.exchanges * price.latency_ms)[:, 0].double().numpy()
            found = found - idle_ms * nothing
        return np.asarray(found)

    def added_loads(self, env_ids: Tensor, units: Tensor, kinds: Tensor, first: Tensor) -> Floats:
        """Returns what options add to the loads of their episodes: [options, loads]."""
        known, found = self.catalog.options, np.zeros((len(env_ids), self.loads.shape[1]))
        key = self.tasks[env_ids].numpy(), units.numpy(), kinds.numpy()
        found[:, :NODES] = known.loads[key]
        on_node = np.flatnonzero(known.node_columns[key])
        if len(on_node):
            spans = known.blocks[key].numpy()[on_node]
            node = first.numpy()[on_node] // spans
            found[on_node, NODES + node] = known.node_columns[key][on_node]
        return found

    def parts_of(
        self, key: tuple[Tensor, Tensor, Tensor], rows: Tensor, devices: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns amounts, bytes and columns of what options put on devices: [rows, devices, ...].

        Args:
            key: Numbers of tasks, units and kinds, each [options].
            rows: Options that are asked for.
            devices: Numbers of devices: of blocks, or any for another unit.
        """
        catalog, known = self.catalog, self.catalog.options
        own = key[0][rows], key[1][rows], key[2][rows]
        count, replaced = known.blocks[own], known.replaced[own]
        first = known.first_blocks(*own, catalog.oracle)
        shape = len(rows), len(devices)
        amounts = torch.zeros(*shape, *catalog.amounts.shape[1:])
        sizes, columns = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for chosen, numbers, source in (
            (count > 0, first[:, None] + devices % count.clamp_min(1)[:, None], known),
            (replaced != NO_UNIT, replaced[:, None].expand(shape), catalog),
        ):
            if bool(chosen.any()):
                those = numbers[chosen]
                amounts[chosen], sizes[chosen] = source.amounts[those], source.sizes[those]
                columns[chosen] = source.columns[those]
        return amounts, sizes, columns

    def column_changes(self, env_ids: Tensor, units: Tensor, kinds: Tensor) -> Tensor:
        """Returns by how much options change the output columns of all devices, [options]."""
        catalog, known = self.catalog, self.catalog.options
        key = self.tasks[env_ids], units, kinds
        count, replaced = known.blocks[key], known.replaced[key]
        found = -catalog.columns[units]
        found = found + torch.where(
            replaced != NO_UNIT, catalog.columns[replaced.clamp_min(0)], 0.0
        )
        rows = (count > 0).nonzero()[:, 0]
        if len(rows):
            tasks = self.tasks[env_ids]
            first = known.first_blocks(tasks[rows], units[rows], kinds[rows], catalog.oracle)
            found[rows] += count[rows] * known.columns[first]  # all blocks have as many
        return found

    def take(self, env_ids: Tensor, units: Tensor, kinds: Tensor) -> Tensor:
        """Puts parts of options onto their devices, with all that they add.

        Returns:
            Number of the unit that takes the place of each, or `NO_UNIT`: [options].
        """
        known = self.catalog.options
        key, first = (self.tasks[env_ids], units, kinds), self.first[env_ids, kinds]
        self.prices[env_ids, COLUMNS] += self.column_changes(env_ids, units, kinds)
        added = self.added_loads(env_ids, units, kinds, first)
        self.loads[env_ids.numpy()] += added
        for env_id, *option in zip(*(n.tolist() for n in (env_ids, units, kinds, first)),
                                   strict=True):  # fmt: skip
            self.taken[env_id].append(Taken(*option))
        common_bytes = known.common_bytes[key]
        self.free_bytes[env_ids] -= common_bytes[:, None] * self.exists[env_ids]
        rows = (known.blocks[key] > 0).nonzero()[:, 0]
        if len(rows):
            own = env_ids[rows], first[rows], known.blocks[key][rows]
            amounts, sizes, columns = self.parts_of(key, rows, self.numbers)
            numbers = self.numbers
            inside = numbers // own[2][:, None] == (own[1] // own[2])[:, None]
            places = (own[0][:, None] * self.max_devices + numbers)[inside]
            self.add_each(places, amounts[inside], columns[inside], sizes[inside])
            described = self.catalog.model.compute.described(amounts[inside])
            self.described.flatten(0, 1).index_add_(0, places, described)
        self.reprice(env_ids)
        self.price_common(env_ids)
        return known.replaced[key]

    def add_taken(self, env_ids: Tensor) -> None:
        """Adds amounts of blocks that were taken to the sums of devices."""
        for env_id in env_ids.tolist():
            for piece, device in self.blocks_placed(env_id):
                amounts = self.catalog.oracle.amounts([piece])[0]
                self._sums[env_id * self.max_devices + device] += amounts
                self.held_columns[env_id, device] += piece.exchanged_columns

    def blocks_placed(self, env_id: int) -> list[tuple[Piece, int]]:
        """Returns the blocks of rows of an episode, and their devices."""
        known = self.catalog.options.known[int(self.tasks[env_id])]
        if known is None:
            return []
        return [
            block
            for unit, kind, first in self.taken[env_id]
            for block in known.pinned_parts(unit, kind, first)
        ]

    def tables_of_blocks(self, env_id: int) -> dict[str, str]:
        """Returns the access digest of the table of each block of rows, by that of the block."""
        known, found = self.catalog.options.known[int(self.tasks[env_id])], dict[str, str]()
        for unit, kind, _ in self.taken[env_id] if known is not None else ():
            assert known is not None
            table, _ = known.taken[unit, kind]
            blocks = known.pinned_parts(unit, kind)
            found.update((block.table.access_digest, table.access_digest) for block, _ in blocks)
        return found

    def options_of(self, env_id: int) -> Options:
        """Returns the options of an episode's tables that are not in columns."""
        known = self.catalog.options.known[int(self.tasks[env_id])]
        if known is None:
            return {}
        found = dict(known.base)
        for unit, kind, first in self.taken[env_id]:
            table, option = known.taken[unit, kind]
            found[table.name] = option.at(first)
        return found
