"""Networks of two levels, against bytes that are counted one by one."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.workload import (
    Device,
    EmbeddingTable,
    FieldError,
    Link,
    Network,
    Objective,
    ShardingPlan,
    ShardingTask,
    UserError,
)
from autoshard.workload.plans.placements import Placement
from autoshard.workload.plans.step_price import StepPrice, further_ways_ms
from autoshard.workload.tasks.links import link_from_json, slowest_of

RANKS, NODE, BATCH = 8, 4, 1024
NETWORKS = [
    Network(Link(4e9, 5e-6), Link(1e9, 2e-5), NODE),  # the slower link counts
    Network(Link(4e9, 5e-6), Link(1e11, 1e-6), NODE),  # what stays in nodes counts
]
SAMPLE_BYTES = 4 * BATCH / RANKS  # one column of a rank's samples


def counted_ms(columns: np.ndarray, network: Network) -> float:
    """The slowest device of an all-to-all, over the link that takes longer."""
    took = []
    for one in range(RANKS):
        others = [other for other in range(RANKS) if other != one]
        for link, near in ((network.inside, True), (network.between, False)):
            reached = [o for o in others if (o // NODE == one // NODE) is near]
            sent, received = len(reached) * columns[one], columns[reached].sum()
            took.append(1e3 * SAMPLE_BYTES * max(sent, received) / link.bytes_s)
    return max(took) + 1e3 * max(network.inside.latency_s, network.between.latency_s)


@pytest.mark.parametrize("network", NETWORKS)
def test_all_to_alls_take_as_long_as_the_busiest_link(network: Network) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        columns = rng.integers(0, 64, RANKS) * 4.0
        price = StepPrice.of(Objective("step", network), BATCH, RANKS, float(columns.sum()))
        assert price.exchange_ms(columns).max() == pytest.approx(counted_ms(columns, network))


@pytest.mark.parametrize("network", NETWORKS)
def test_partial_sums_take_what_rings_and_nodes_move(network: Network) -> None:
    """Blocks on all devices, and on those of one node, at the price of whole tables."""
    whole = network.all_to_all(RANKS)
    partial = SAMPLE_BYTES * RANKS  # of one column, for all samples
    # Each device passes on all but its own part. A node has one ring for each device.
    passed = partial * (RANKS - 1) / RANKS
    rings_s = max(passed / network.inside.bytes_s, passed / NODE / network.between.bytes_s)
    column_s = SAMPLE_BYTES * (RANKS - 1) / whole.bytes_s
    assert network.block_share(RANKS, RANKS) * column_s == pytest.approx(rings_s)
    # Reduced in the node, each device has a part of the samples, some of which others need.
    inside_s = partial * (NODE - 1) / NODE / network.inside.bytes_s
    between_s = partial / NODE * (RANKS - NODE) / RANKS / network.between.bytes_s
    assert network.block_share(RANKS, NODE) == 0  # they are exchanged by themselves
    assert partial * network.node_rows_s(RANKS) == pytest.approx(inside_s + between_s)


def test_blocks_of_rows_are_exchanged_by_their_share() -> None:
    network = NETWORKS[0]
    table = EmbeddingTable("a", 8_000, 32, 4.0)
    task = ShardingTask(
        (table,), Device.uniform(RANKS, 2**30), BATCH, objective=Objective("step", network)
    )
    for blocks in (RANKS, NODE):
        plan = ShardingPlan((Placement("a", 0, 32, 0, blocks),), RANKS)
        share = network.block_share(RANKS, blocks)
        expected = [32 * share] * blocks + [0.0] * (RANKS - blocks)
        assert plan.exchanged_columns(task) == pytest.approx(expected)
        assert plan.columns(task) == tuple(32 if number < blocks else 0 for number in range(8))
    # Over one link there is no shorter way.
    assert Link(1e9).block_share(RANKS, NODE) == Link(1e9).block_share(RANKS, RANKS) == 1.0


def test_further_ways_start_anew_and_rows_of_nodes_come_after_others() -> None:
    network = NETWORKS[0]
    tables = tuple(EmbeddingTable(name, 8_000, 32, 4.0, features=2) for name in "abc")
    task = ShardingTask(
        tables, Device.uniform(RANKS, 2**30), BATCH, objective=Objective("step", network)
    )
    whole, rows = Placement("a", 0, 32, 0), Placement("b", 0, 32, 0, RANKS)
    node = Placement("c", 0, 32, NODE, NODE)
    latency_ms = 1e3 * network.all_to_all(RANKS).latency_s
    inside_ms = 1e3 * network.inside.latency_s
    moved_ms = 2 * 1e3 * SAMPLE_BYTES * RANKS * 32 * 2 * network.node_rows_s(RANKS)
    for placements, expected in (
        ((whole,), 0.0),
        ((rows,), 0.0),
        ((whole, rows), 4 * latency_ms),
        ((node,), 2 * inside_ms + moved_ms),
        ((whole, rows, node), 8 * latency_ms + 2 * inside_ms + moved_ms),
    ):
        plan = ShardingPlan(placements, RANKS)
        assert further_ways_ms(plan, task) == pytest.approx(expected)
    # Outputs of unpooled tables by rows are exchanged with those of columns.
    unpooled = replace(task, tables=tuple(replace(table, pooled=False) for table in tables))
    assert further_ways_ms(ShardingPlan((whole, rows), RANKS), unpooled) == 0
    inside = replace(network.inside, ring_latency_s=9e-3)
    late = replace(task, objective=Objective("step", replace(network, inside=inside)))
    for placements, expected in (
        ((whole,), 0.0),
        ((rows,), 2 * (9 - latency_ms)),
        ((whole, rows), 2 * (9 - latency_ms)),
        ((node,), 2 * (9 - inside_ms)),
    ):
        plan = ShardingPlan(placements, RANKS)
        more_ms = further_ways_ms(plan, late) - further_ways_ms(plan, task)
        assert more_ms == pytest.approx(expected)


def test_options_are_read_as_they_are_written() -> None:
    for bytes_s in (2.5e13, 4.5e11, 7.68e8, 8.4e7, 1.5e5, 12.0):
        assert Link.parse(Link(bytes_s, 7.3e-4).option) == Link(bytes_s, 7.3e-4)


def test_rings_may_have_another_bandwidth_and_latency() -> None:
    link = Link.parse("4GB/s,1ms,3GB/s")
    assert link == Link(4e9, 1e-3, 3e9)
    assert link.option == "4GB/s,1000us,3GB/s,1000us"
    assert link_from_json(link.to_json()) == link
    assert link.all_to_all(RANKS) == link
    assert link.ring(RANKS) == link.of("ring", RANKS) == Link(3e9, 1e-3)
    later = Link.parse("4GB/s,1ms,3GB/s,2ms")
    assert later == link.with_rings(Link(3e9, 2e-3), RANKS)
    assert Link.parse(later.option) == link_from_json(later.to_json()) == later
    assert later.options == {"link": "4GB/s,1000us,3GB/s,2000us"}
    both = {"link": "4GB/s,0us", "inter_node_link": "1GB/s,0us", "devices_per_node": 2}
    assert Network(Link(4e9), Link(1e9), 2).options == both
    assert later.ring(RANKS) == Link(3e9, 2e-3)
    assert str(later) == "4 GB/s, 1000 us, rings 3 GB/s, 2000 us"
    assert Link(4e9, ring_latency_s=0.0).ring(RANKS) == Link(4e9)
    assert link.block_share(RANKS, RANKS) == pytest.approx(4 / 3)
    assert link.block_share(RANKS, 1) == 1
    network = Network(Link(4e9, 5e-6, 3e9), Link(1e9, 2e-5, 0.6e9), NODE)
    assert link_from_json(network.to_json()) == network
    assert network.ring(RANKS).bytes_s == pytest.approx(min(3e9, NODE * 0.6e9))
    assert network.all_to_all(RANKS) == NETWORKS[0].all_to_all(RANKS)
    started = replace(network, inside=network.inside.with_rings(Link(3e9, 4e-3), RANKS))
    assert started.ring(RANKS).latency_s == 4e-3
    assert started.all_to_all(RANKS) == network.all_to_all(RANKS)
    slower = network.node_rows_s(RANKS) - NETWORKS[0].node_rows_s(RANKS)
    assert slower == pytest.approx((NODE - 1) / NODE * (1 / 3e9 - 1 / 4e9))
    with pytest.raises(FieldError, match="ring_bytes_s: must be at least 1"):
        Link(1e9, 0.0, 0.0)
    with pytest.raises(FieldError, match="ring_latency_s: must be at least 0"):
        Link(1e9, 0.0, None, -1.0)
    for text in (
        "4GB/s,1ms,", "4GB/s,,3GB/s", "4GB/s,1ms,0GB/s", "4GB/s,1ms,3GB/s,2GB/s",
        "4GB/s,1ms,3GB/s,1ms,3GB/s",
    ):  # fmt: skip
        with pytest.raises(UserError, match="a link is given by bandwidth, latency and, if"):
            Link.parse(text)


def test_groups_of_ranks_have_all_to_alls_and_rings_of_their_own() -> None:
    network = Network(Link(4e9, 1e-6, 3e9), Link(1e9, 2e-6, 6e8), NODE)
    for collective, bytes_s in (
        ("inside", 4e9), ("inside_ring", 3e9), ("between", 1e9), ("between_ring", 6e8)
    ):  # fmt: skip
        assert network.of(collective, 2).bytes_s == bytes_s  # type: ignore[arg-type]
    assert Link(4e9, 1e-6, 3e9).of("between", 2).bytes_s == 4e9
    assert Link(4e9, 1e-6, 3e9).of("between_ring", 2).bytes_s == 3e9


def test_the_slowest_link_has_the_slowest_rings_of_any() -> None:
    first, second = Link(10e9, 0.0, 9e9), Link(12e9, 0.0, 3e9)
    assert slowest_of([first, second], RANKS) == first.with_rings(Link(3e9), RANKS)
    assert slowest_of([first], RANKS) == first
    links = [Link(12e9, 1e-6, 3e9), Link(10e9, 1e-3, 3e9)]
    for some in (links, links[::-1]):
        assert slowest_of(some, RANKS).ring(RANKS) == Link(3e9, 1e-3)
    networks = [Network(link, link, NODE) for link in (first, second)]
    found = slowest_of(networks, RANKS)
    assert found.all_to_all(RANKS) == networks[0].all_to_all(RANKS)
    assert found.ring(RANKS).bytes_s == 3e9
    assert slowest_of(networks, NODE).ring(NODE).bytes_s == 3e9  # all in one node


def test_one_node_is_its_inner_link() -> None:
    network = NETWORKS[0]
    assert network.nodes(3) == network.nodes(4) == 1
    assert network.nodes(8) == 2
    assert network.all_to_all(3) == network.ring(4) == network.inside


def test_nodes_have_the_same_number_of_devices() -> None:
    with pytest.raises(UserError, match=r"6 devices do not fill nodes of 4.* take 4 or 8"):
        NETWORKS[0].nodes(6)
    with pytest.raises(FieldError, match="devices_per_node: must be a number of at least 1, got 0"):
        Network(Link(1e9), Link(1e9), 0)


def test_objectives_are_written_with_their_networks() -> None:
    objective = Objective("step", NETWORKS[0], 2.0)
    assert Objective.from_json(objective.to_json()) == objective
    assert link_from_json(Link(5e8).to_json()) == Link(5e8)
    assert str(objective.link) == (
        "4 GB/s, 5 us inside nodes of 4 devices, 1 GB/s, 20 us between them"
    )
