"""fbgemm's TBEDataConfig: the tables of one fused operator and how their rows are looked up.

fbgemm's benchmarks read it, and its `TBEBenchmarkParamsReporter` writes it while a model trains. It
numbers a table's rows by use: each of the first is a *heavy hitter* with a share of its own, and
the others, of number k from 0, share all other lookups in proportion to (k + q)**-s.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from autoshard.workload import documents
from autoshard.workload.access.hot_rows import row_classes
from autoshard.workload.access.reuse import lookups_of, popularity, shares_of_bins
from autoshard.workload.arrays import Floats
from autoshard.workload.errors import UserError
from autoshard.workload.tables.row_access import RowAccess, block_rows, curve_ranks
from autoshard.workload.tables.table import EmbeddingTable

_NAME = "TBEDataConfig"
_MAX_READ, _MAX_HITTERS = 100, 20  # heavy hitters that fbgemm may have, and those that it finds
_ALMOST_ALL = 1 - 1e-6
# Of fits. fbgemm draws from a law by rejection, which takes a time that grows with q**(s - 1): it
# does not end in hours with 1e4 and 4.
_Q_RANGE, _S_RANGE = (1.0, 1e5), (0.01, 1.5)


class _Law(NamedTuple):
    """How the rows of one feature are used.

    Args:
        hitters: Share of the lookups of each heavy hitter, [heavy hitters].
        q: Added to the number of any other row.
        s: Exponent.
    """

    hitters: Floats
    q: float
    s: float

    def shares(self, rows: int) -> tuple[Floats, Floats]:
        """Returns the rows in each class of rows used alike, and the share of one, [classes]."""
        members, found = popularity(rows, self.s, self.q - 1)
        count = len(self.hitters)
        found[:count] = 0.0
        found *= max(0.0, 1 - self.hitters.sum()) / max(members @ found, np.finfo(float).tiny)
        found[:count] = self.hitters
        return members, found / (members @ found)


class _Feature(NamedTuple):
    table: int
    rows: int
    dim: int
    batch_size: int
    pooling: float
    law: Mapping[str, Any]


def tables_of(document: Mapping[str, Any]) -> list[EmbeddingTable]:
    """Returns the tables of a TBEDataConfig, with reuse and statistics of one batch.

    Where in a table its hot rows lie is not known: blocks of rows are taken to be used alike.
    UserError says what is invalid.
    """
    with documents.fields_of(_NAME):
        batch, pooling = document["batch_params"], document["pooling_params"]
        columns = {
            "feature_table_map": range(int(document["T"])),
            "Es": document["E"],
            "Ds": document["D"],
            "Bs": batch["B"],
            "Ls": pooling["L"],
            "indices_params_list": document["indices_params"],
        }
        lists = {**document, **batch, **pooling}
        found = [_each(int(document["T"]), lists.get(n), n, one) for n, one in columns.items()]
        features = [_Feature(*fields) for fields in zip(*found, strict=True)]
        if batch["B"] < 1:
            raise UserError(f"{_NAME}: B must be at least 1, got {batch['B']}")
        names = dict(enumerate(document.get("names") or []))
        places = sorted({feature.table for feature in features})
        return [
            _table(
                str(names.get(place, f"t{place}")),
                [feature for feature in features if feature.table == place],
                int(batch["B"]),
                bool(document["weighted"]),
            )
            for place in places
        ]


def tbe_data_config(tables: Sequence[EmbeddingTable], batch_size: int) -> dict[str, Any]:
    """Returns the TBEDataConfig of tables, a JSON object for fbgemm's `TBEDataConfig.from_json`.

    Its heavy hitters are the most used rows, and q and s are fitted to the table's curve: that of a
    profile (`EmbeddingTable.access`), or what follows from Zipf exponent or reuse. fbgemm draws
    whole numbers of lookups for a sample, rounded down. UserError says what has no place in it.

    Args:
        tables: At least one; with weights either all or none.
        batch_size: Samples of a batch, of all ranks together.
    """
    if len({table.weighted for table in tables}) != 1:
        raise UserError(f"a {_NAME} needs tables, with weights either all or none: write two")
    of = [number for number, table in enumerate(tables) for _ in range(tables[number].features)]
    laws = [_fitted(table, batch_size) for table in tables]
    indices = [
        {"heavy_hitters": law.hitters.tolist(), "zipf_q": law.q, "zipf_s": law.s}
        | dict.fromkeys(("index_dtype", "offset_dtype"), "torch.int64")
        for law in laws
    ]
    rows, dims = [tables[n].rows for n in of], [tables[n].dim for n in of]
    pooling = [tables[n].pooling_factor / tables[n].features for n in of]
    return {
        "T": len(of),
        "E": math.ceil(np.mean(rows)),
        "D": math.ceil(np.mean(dims)),
        "mixed_dim": len(set(dims)) > 1,
        "weighted": tables[0].weighted,
        "batch_params": {"B": batch_size, "Bs": [batch_size] * len(of)},
        "indices_params": indices[0],
        "pooling_params": {"L": max(1, round(np.mean(pooling))), "Ls": pooling},
        "use_cpu": False,
        "Es": rows,
        "Ds": dims,
        "max_indices": sum(rows) - 1,
        "embedding_specs": [[table.rows, table.dim] for table in tables],
        "feature_table_map": of,
        "indices_params_list": [indices[n] for n in of],
        "names": [table.name for table in tables],  # which fbgemm ignores
    }


def _each(count: int, values: Any, name: str, one: Any) -> list[Any]:
    """Returns a value for each feature: `one` where there is no list."""
    if values is None:
        return list(one) if isinstance(one, range) else [one] * count
    if not isinstance(values, list) or len(values) != count:
        raise UserError(f"{_NAME}: {name} must be a list of T = {count} values")
    return values


def _law(record: Mapping[str, Any], rows: int) -> _Law:
    law = _Law(np.array(record["heavy_hitters"], float), record["zipf_q"], record["zipf_s"])
    hitters = law.hitters
    if hitters.ndim != 1 or len(hitters) > min(rows, _MAX_READ):
        raise UserError(f"heavy_hitters must be a list, at most {min(rows, _MAX_READ)}")
    if not (hitters >= 0).all() or hitters.sum() > 1.001:
        raise UserError("heavy_hitters must be shares of the lookups, at most 1 together")
    if not (0 < law.q < math.inf and 0 < law.s <= 10):
        raise UserError(f"zipf_q and zipf_s must be over 0, zipf_s at most 10, got {law[1:]}")
    return law


def _table(
    name: str, features: Sequence[_Feature], batch_size: int, weighted: bool
) -> EmbeddingTable:
    """Returns a table by its features, which all use the same rows most."""
    rows, dim = int(features[0].rows), int(features[0].dim)
    means = np.array([feature.pooling * feature.batch_size / batch_size for feature in features])
    with documents.naming(f"{_NAME}, table {name}"):
        plain = EmbeddingTable(
            name, rows, dim, float(means.sum()), features=len(features), weighted=weighted
        )
        laws = [_law(feature.law, rows) for feature in features]
    lookups = lookups_of(plain, batch_size)
    if not lookups:
        return plain
    members = laws[0].shares(rows)[0]
    shares = means @ np.array([law.shares(rows)[1] for law in laws]) / means.sum()
    order = np.argsort(-shares, kind="stable")
    ranks, curve = np.cumsum(members[order]), np.cumsum((members * shares)[order])
    blocks = -(-rows // block_rows(rows))
    edges = np.minimum(np.arange(blocks + 1) * block_rows(rows), rows)
    bins = members @ shares_of_bins(lookups * shares)
    access = RowAccess(
        curve=tuple(np.interp(curve_ranks(rows), [0.0, *ranks], [0.0, *curve]).tolist()),
        blocks=tuple((np.diff(edges) / rows).tolist()),
        coverage=float(bins.sum() / rows),
        lookups=lookups,
        distinct_rows=float(bins.sum()),
    )
    reuse = tuple((bins / bins.sum()).tolist())
    return EmbeddingTable(
        **{**plain.to_json(), "reuse": reuse, "reuse_batch_size": batch_size, "access": access}
    )


def _fitted(table: EmbeddingTable, batch_size: int) -> _Law:
    """Returns the law whose curve is the least from that of the table."""
    if not lookups_of(table, batch_size):
        return _Law(np.zeros(0), 1.0, 1.0)
    members, shares = row_classes(table, batch_size)
    ranks, curve = np.cumsum([0.0, *members]), np.cumsum([0.0, *(members * shares)])
    count = min(_MAX_HITTERS, table.rows - 1)  # one row is left for fbgemm's law
    hitters = np.diff(np.interp(np.arange(count + 1), ranks, curve / curve[-1]))
    hitters *= min(1.0, _ALMOST_ALL / max(hitters.sum(), _ALMOST_ALL))
    others = ranks > count

    def gap(parameters: Floats) -> Floats:
        members, shares = _Law(hitters, *np.exp(parameters)).shares(table.rows)
        known = np.interp(ranks[others], np.cumsum(members), np.cumsum(members * shares))
        return np.asarray(known - curve[others] / curve[-1])

    from scipy.optimize import least_squares

    bounds = np.log([_Q_RANGE, _S_RANGE]).T
    starts = np.log([(2.0, 1.0), (1000.0, 1.0)])
    found = min(
        (least_squares(gap, start, bounds=bounds) for start in starts), key=lambda f: f.cost
    )
    return _Law(hitters, *np.exp(found.x).tolist())
