"""Sets of options that a search begins with, on GPUs by data sheet."""

import pytest

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.roofline import roofline_model
from autoshard.sharders.heuristics.split_greedy import cut_greedy
from autoshard.sharders.search.option_sets import OptionSets
from autoshard.workload import Device, EmbeddingTable, Objective, ShardingTask, load_tables
from autoshard.workload.data_sheets import DATA_SHEETS
from autoshard.workload.packing.gpu_memory import on_gpus
from autoshard.workload.tasks.rules import Rule

SHEET = DATA_SHEETS["h100-80gb"]


def sets_of(tables: tuple[EmbeddingTable, ...], gpus: int, *rules: Rule) -> OptionSets:
    objective = Objective("step", SHEET.link(gpus))
    devices = Device.uniform(gpus, 72 * 2**30)
    task = on_gpus(ShardingTask(tables, devices, 65_536, objective=objective, rules=rules))
    model = roofline_model(SHEET).for_objective(objective, gpus)
    return OptionSets(EstimatedCosts(model, task.batch_size), task)


def test_all_tables_by_rows_are_planned_on_nodes_not_on_all_gpus() -> None:
    """Outputs of 100 tables in blocks on all of 64 GPUs take longer to exchange than other steps
    take, and such sets take as long to plan as all others together.
    """
    starts = sets_of(load_tables("synthetic:100:13:full"), 64).starts()
    counts = ([option.row_blocks for option in start.options.values()] for start in starts)
    blocks = [[count for count in some if count > 1] for some in counts]
    assert any(len(some) > 90 and set(some) == {8} for some in blocks)
    assert not any(len(some) > 90 and 64 in some for some in blocks)


HEAVY = tuple(EmbeddingTable(f"heavy{n}", 400_000, 256, 200.0) for n in range(3))
LIGHT = tuple(EmbeddingTable(f"light{n}", 200_000 + n, 64, 2.0) for n in range(30))


@pytest.mark.parametrize("gpus", [8, 16])
def test_a_set_of_columns_also_begins_with_costly_tables_in_pieces(gpus: int) -> None:
    sets = sets_of((*HEAVY, *LIGHT), gpus)
    task, even_ms = sets.task, sets.even_ms({})
    found = cut_greedy(sets.oracle, task, even_ms, sets.alone_ms)
    assert found
    for placed in found:
        assert sum(piece.width for piece, _ in placed) == sum(table.dim for table in task.tables)
    last = [piece for piece, _ in found[-1]]
    assert {piece.table.name for piece in last if piece.width < piece.table.dim} == {
        table.name for table in HEAVY
    }
    (columns,) = (start for start in sets.starts() if not start.options)
    whole, *cut = (sets.oracle.step_ms(plan.plan(task), task) for plan in columns.greedy)
    assert min(cut) < whole
    assert not columns.is_split  # whole tables fit


def test_tables_that_have_to_be_whole_are_not_cut() -> None:
    sets = sets_of((*HEAVY, *LIGHT), 8, Rule("whole", tuple(table.name for table in HEAVY)))
    assert cut_greedy(sets.oracle, sets.task, sets.even_ms({}), sets.alone_ms) == []
