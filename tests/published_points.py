"""Prices of what others have published of GPUs, by data sheets alone.

`cost_model/published_points.json` holds the points with their sources. A third of those
that have a price is aside: no figure of the price was chosen by these.

Steps of MLPerf Training by HugeCTR are not those of TorchRec: inputs are exchanged beforehand, CUDA
graphs leave no launches, exchanges have two bytes an element, and the dense part hides them. Their
price is that of a pipelined step without launches, with the longer one of the dense part and the
exchanges over links of twice the speed. Those of its plugin for TensorFlow (`sok`) are
plain loops; there no table is copied. Plans are autoshard's, as HugeCTR's planner is its own.
"""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any, get_args

from scipy.stats import kendalltau, spearmanr

from autoshard.cost_model import EstimatedCosts, StepPredictor
from autoshard.cost_model.roofline import roofline_model
from autoshard.cost_model.step.dense_part import dense_ms, read_layers
from autoshard.cost_model.step.overhead import StepOverhead
from autoshard.sharders import SharderContext, load_policy, make_sharder
from autoshard.workload import (
    Device,
    EmbeddingTable,
    Objective,
    OperatorOptions,
    PlanError,
    Shard,
    ShardingTask,
    load_tables,
)
from autoshard.workload.data_sheets import DATA_SHEETS, DataSheet
from autoshard.workload.tables.operators import Optimizer
from autoshard.workload.tasks.links import AnyLink, Link, Network, all_reduce_ms
from autoshard.workload.tasks.rules import Rule

POINTS = Path(__file__).parent / "cost_model" / "published_points.json"
_CROSS = "3456-512-3456,3456-512-3456,3456-512-3456"
# Dense parts of MLPerf's DLRM-DCNv2, and of DLRM with 26 features by their products.
_DLRM = "13-512-256-128,479-1024-1024-512-256-1"
_DCN = f"13-512-256-128,{_CROSS},3456-1024-1024-512-256-1"
_LAYERS = {
    **dict.fromkeys(("mlperf0", "mlperf2", "sok", "torchrec-dlrm"), _DLRM),
    **dict.fromkeys(("mlperf3", "mlperf4", "mlperf5"), _DCN),
}
_RANKED = 4  # points of a source, at least, whose order is held against that of prices
_HALF = 0.5  # bytes of an exchange where precision is mixed


@dataclass(frozen=True)
class Held:
    """A published point with its price.

    Args:
        point: The point.
        price: In the point's unit.
        interval: 90 % interval of the price, where it has one.
    """

    point: Mapping[str, Any]
    price: float
    interval: tuple[float, float] | None = None

    @property
    def ratio(self) -> float:
        """Price over what was published."""
        return float(self.price / self.point["value"])

    @property
    def is_inside(self) -> bool:
        """Whether what was published lies inside the interval of the price."""
        low, high = self.interval or (math.nan, math.nan)
        return bool(low <= self.point["value"] <= high)

    @property
    def source(self) -> str:
        """The part of the point's name that says who published it."""
        return str(self.point["id"]).split("-")[0].rstrip("0123456789")


def points(aside: bool | None = None) -> list[Mapping[str, Any]]:
    """Returns the points of GPUs with a data sheet that have a price, all or those (not) aside."""
    document = json.loads(POINTS.read_text())
    lists = document["tables"]
    found = (
        {**point, "tables": lists.get(point.get("tables"), point.get("tables"))}
        for point in document["points"]
    )
    return [
        point
        for point in found
        if point["gpu"] in DATA_SHEETS
        and point["what"] in _PRICES
        and _is_priced(point)
        and aside in (None, point["aside"])
    ]


def held(point: Mapping[str, Any]) -> Held | None:
    """Returns a point with its price; None where tables are in host memory."""
    try:
        price, interval = _PRICES[point["what"]](point)
    except PlanError:
        return None
    return Held(point, price, interval)


def _is_priced(point: Mapping[str, Any]) -> bool:
    known = isinstance(point.get("tables"), list) or point.get("tables") == "mlperf:dlrm-v2"
    if point["what"] == "step":
        return known and _dense_layers(point) is not None
    if point["what"] in ("forward", "backward", "both"):
        in_memory = "uvm" not in point["id"] and "cache" not in point["id"]
        pooled = point.get("pooling") != "none"
        return in_memory and pooled and point.get("optimizer") in (None, *get_args(Optimizer))
    return True


def _dense_layers(point: Mapping[str, Any]) -> str | None:
    return next((layers for name, layers in _LAYERS.items() if point["id"].startswith(name)), None)


def _sheet(point: Mapping[str, Any]) -> DataSheet:
    sheet = DATA_SHEETS[point["gpu"]]
    network = point.get("network_gb_s")
    return sheet if network is None else replace(sheet, network_gb_s=network)


def _link(point: Mapping[str, Any]) -> AnyLink:
    sheet = _sheet(point)
    ranks, per_node = point["ranks"], point["ranks_per_node"]
    if per_node <= sheet.gpus_per_node:
        sheet = replace(sheet, gpus_per_node=per_node)
    return sheet.link(ranks)


def _collective(point: Mapping[str, Any]) -> tuple[float, None]:
    link, ranks, size = _link(point), point["ranks"], point["bytes_per_rank"]
    if point["what"] == "all_to_all":
        over = link.all_to_all(ranks)
        return 1e3 * (over.latency_s + size * (ranks - 1) / ranks / over.bytes_s), None
    whole = all_reduce_ms(link, ranks, size, starts=1)
    if point["what"] == "all_reduce":
        return whole, None
    over = link.ring(ranks)
    return (whole + 1e3 * over.latency_s) / 2, None  # one way of two


def _operator(point: Mapping[str, Any]) -> tuple[float, None]:
    shard = Shard.of_tables(_tables(point["tables"], point.get("ids")))
    model = roofline_model(_sheet(point), _operator_of(point))
    found = model.compute.predict([shard], [point["batch_size"]])
    passes = {
        "forward": found.forward_ms,
        "backward": found.backward_ms,
        "both": found.forward_ms + found.backward_ms,
    }
    return passes[point["what"]].item(), None


def _step(point: Mapping[str, Any]) -> tuple[float, tuple[float, float]]:
    mixed = "fp32" not in point["id"]
    return _of_plan(
        tables=_tables(point["tables"], point.get("ids")),
        sheet=_sheet(point),
        ranks=point["ranks"],
        batch_size=point["batch_size"],
        link=_faster(_link(point), _HALF) if mixed else _link(point),
        operator=_operator_of(point),
        layers=_dense_layers(point) or "",
        tensor_share=1.0 if mixed else 0.5,
        plain=not point["id"].startswith("mlperf"),
    )


@cache
def _of_plan(
    tables: tuple[EmbeddingTable, ...],
    sheet: DataSheet,
    ranks: int,
    batch_size: int,
    link: AnyLink,
    operator: OperatorOptions,
    layers: str,
    tensor_share: float,
    plain: bool,
) -> tuple[float, tuple[float, float]]:
    """Returns milliseconds of a step by autoshard's plan, and their 90 % interval.

    Args:
        tables: The tables.
        sheet: Data sheet of the GPUs.
        ranks: Number of GPUs.
        batch_size: Samples of all ranks.
        link: Their network.
        operator: Of the tables.
        layers: Of the dense part.
        tensor_share: Speed of its products, over that of bfloat16.
        plain: Whether a plain loop trains.
    """
    objective = Objective("step" if plain else "pipelined", link)
    devices = Device.uniform(ranks, int(0.9e9 * sheet.memory_gb))
    rules = (Rule("not_copied", tuple(t.name for t in tables)),) if plain else ()
    task = ShardingTask(tables, devices, batch_size, operator, rules, objective)
    known = roofline_model(sheet, operator)
    assert known.overhead is not None
    if not plain:
        known = replace(known, overhead=_without_launches(known.overhead))
    model = known.for_objective(objective, ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = EstimatedCosts(model, batch_size)
        plan = make_sharder("autoshard", SharderContext(oracle, load_policy("cpu"))).shard(task)
        found = StepPredictor(oracle, task).of(plan)
        sent_ms = oracle.exchange(plan.exchanged_columns(task), objective)
        exchanges_ms = oracle.common(task).exchanges_ms(plan) + 2 * max(sent_ms or (0.0,))
    dense = dense_ms(read_layers(layers), batch_size / ranks, sheet) / tensor_share
    if not plain:
        dense = max(dense - exchanges_ms, 0.0)
    low, high = found.interval_ms
    return found.expected_ms + dense, (low + dense, high + dense)


def _without_launches(overhead: StepOverhead) -> StepOverhead:
    """Returns what a step takes in CUDA graphs."""
    assert overhead.copies is not None
    assert overhead.rows is not None
    return replace(
        overhead,
        forward=replace(overhead.forward, start_ms=0.0),
        backward=replace(overhead.backward, start_ms=0.0),
        shared_ms=0.0,
        copies=replace(overhead.copies, start_ms=0.0),
        rows=replace(overhead.rows, start_ms=0.0),
        members=tuple(map(_without_launches, overhead.members)),
    )


def _faster(link: AnyLink, share: float) -> AnyLink:
    """Returns the link over which so small a share of the bytes is sent."""
    if isinstance(link, Network):
        inside, between = _faster(link.inside, share), _faster(link.between, share)
        assert isinstance(inside, Link)
        assert isinstance(between, Link)
        return replace(link, inside=inside, between=between)
    ring = link.ring_bytes_s
    ring = None if ring is None else ring / share
    return replace(link, bytes_s=link.bytes_s / share, ring_bytes_s=ring)


def _operator_of(point: Mapping[str, Any]) -> OperatorOptions:
    return OperatorOptions(point.get("weights") or "fp32", point.get("optimizer") or "sgd")


def _tables(named: Any, ids: Any) -> tuple[EmbeddingTable, ...]:
    if isinstance(named, str):
        return tuple(load_tables(named))
    alpha = ids["zipf"] if isinstance(ids, dict) else 0.0
    return tuple(
        EmbeddingTable(
            f"t{group}_{n}",
            each["rows"],
            each["dim"],
            each["pooling_factor"],
            zipf_alpha=alpha,
            weighted=each.get("weighted", False),
        )
        for group, each in enumerate(named)
        for n in range(each["count"])
    )


_PRICES = {
    "forward": _operator,
    "backward": _operator,
    "both": _operator,
    "all_to_all": _collective,
    "all_reduce": _collective,
    "reduce_scatter": _collective,
    "all_gather": _collective,
    "step": _step,
}


_GROUPS = {
    "step": "training steps",
    "all_to_all": "all-to-alls",
    **dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), "all-reduces and their parts"),
    **dict.fromkeys(("forward", "backward", "both"), "operators"),
}


def grouped(prices: Sequence[Held]) -> dict[str, list[Held]]:
    """Returns prices by what they are of."""
    found: dict[str, list[Held]] = {name: [] for name in _GROUPS.values()}
    for each in prices:
        found[_GROUPS[each.point["what"]]].append(each)
    return found


def by_source(prices: Sequence[Held]) -> dict[tuple[str, str, str], list[Held]]:
    """Returns prices by source, what they are of, and GPU, where there are enough to rank."""
    found: dict[tuple[str, str, str], list[Held]] = {}
    for each in prices:
        key = each.source, _GROUPS[each.point["what"]], each.point["gpu"]
        found.setdefault(key, []).append(each)
    return {key: some for key, some in sorted(found.items()) if len(some) >= _RANKED}


def page() -> str:
    """Returns a table of each kind of points, in Markdown, and one of each source."""
    every = [each for point in points() if (each := held(point)) is not None]
    lines = [
        "## Order within a source",
        "",
        "| source | GPU | of | points | price over it | Spearman | Kendall | inside 90 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (source, name, gpu), some in by_source(every).items():
        prices, values = zip(*((one.price, one.point["value"]) for one in some), strict=True)
        spearman, kendall = spearmanr(prices, values)[0], kendalltau(prices, values)[0]
        ratio = geometric_mean(one.ratio for one in some)
        inside = [one.is_inside for one in some if one.interval]
        share = f"{sum(inside)} of {len(inside)}" if inside else ""
        lines.append(
            f"| {source} | {gpu} | {name} | {len(some)} | {ratio:.2f} | {spearman:.2f} | "
            f"{kendall:.2f} | {share} |"
        )
    lines.append("")
    for name, some in grouped(every).items():
        lines += [f"## {name[0].upper()}{name[1:]}", ""]
        lines += [
            "| published | GPUs | of | ms | price over it | aside |",
            "|---|---|---|---|---|---|",
        ]
        for each in sorted(some, key=lambda one: str(one.point["id"])):
            lines.append(_row(each))
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _row(each: Held) -> str:
    point = each.point
    size = point.get("bytes_per_rank")
    of = f"batch {point['batch_size']:,}" if size is None else _bytes(size)
    gpus = f"{point['ranks']} {point['gpu'].partition('-')[0].upper()}"
    aside = "yes" if point["aside"] else ""
    return (
        f"| [{point['id']}]({point['source']}) | {gpus} | {of} | {point['value']:.4g} | "
        f"{each.ratio:.2f} | {aside} |"
    )


def _bytes(size: float) -> str:
    unit = next(u for u in (2**30, 2**20, 2**10, 1) if size >= u)
    names = {2**30: "GiB", 2**20: "MiB", 2**10: "KiB", 1: "B"}
    return f"{size / unit:.4g} {names[unit]}"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201
