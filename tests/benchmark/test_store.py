import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.benchmark import (
    Exchange,
    Measurement,
    MeasurementError,
    MeasurementStore,
    MeasureSettings,
    ReferenceLevel,
    StoreError,
    Timing,
    export_parquet,
    import_parquet,
    read_parquet,
    read_parquet_exchanges,
)
from autoshard.benchmark.measurement import Directions, ExchangeKey
from autoshard.benchmark.store.file import pack_ids, unpack_ids
from autoshard.workload import (
    EmbeddingTable,
    OperatorOptions,
    Piece,
    Shard,
    Trace,
    UserError,
    random_shards,
)

TIMING = Timing(1.5, 2.5, Directions(0.03, 0.02, 0.01), 12, 1, 0.02, 0.06)
SETTINGS = MeasureSettings(1024, OperatorOptions("fp16", "sgd"), seed=3)
EXCHANGE = Exchange(ExchangeKey((64, 0, 32), 512, 2), "hw", "v", (1, 2, 3), (4, 5, 6), 0.1, 40, 9.0)


def measurement(shard: Shard, **changes: object) -> Measurement:
    plain = Measurement(shard, SETTINGS, "hw", "v", "ok", "cpu0@here", "here", 7.0, TIMING)
    return replace(plain, **({"device_state": "1755 MHz, 412 W"} | changes))  # type: ignore[arg-type]


def some(tables: Sequence[EmbeddingTable], count: int = 20) -> list[Measurement]:
    return [measurement(shard) for shard in random_shards(tables, count, 6, augment=True)]


def as_put(item: Measurement | None) -> Measurement:
    """Without what a store adds: that it was kept, and what it is worth."""
    assert item is not None
    timing = item.timing and replace(item.timing, error=TIMING.error)
    assert item.timing is None or 0 < item.timing.error.both < 0.1
    return replace(item, timing=timing, reused=False)


def fresh(measurements: Sequence[Measurement]) -> list[Measurement]:
    return [as_put(item) for item in measurements]


def test_what_is_put_comes_back(tmp_path: Path, tables: tuple[EmbeddingTable, ...]) -> None:
    kept = some(tables)
    trace = Trace("/data/x.pt", 3, 512, "abc")
    odd = EmbeddingTable("odd", 5, 8, 0.5, reuse_batch_size=9, trace=trace)
    kept.append(measurement(Shard((Piece(odd, 4, 4),))))
    failed = measurement(
        Shard.of_tables([odd]), status="failed", timing=None, reason="RuntimeError: no"
    )
    with MeasurementStore(tmp_path / "new" / "costs.db") as store:
        store.put([*kept, failed])
        assert as_put(store.find(kept[0].shard, SETTINGS, "hw", "v")) == kept[0]
    with MeasurementStore(tmp_path / "new" / "costs.db", must_exist=True) as store:
        assert fresh(store.measurements()) == [*kept, failed]
        assert len(store) == len(kept) + 1
    assert failed.total_ms != failed.total_ms
    with pytest.raises(MeasurementError, match="no"):
        failed.cost()
    assert kept[0].cost().total_ms == 4.0


def test_every_part_of_the_key_counts(tmp_path: Path, tables: tuple[EmbeddingTable, ...]) -> None:
    first = some(tables, 1)[0]
    other = {
        "batch_size": replace(SETTINGS, batch_size=8),
        "operator": replace(SETTINGS, operator=OperatorOptions()),
        "seed": replace(SETTINGS, seed=0),
    }
    with MeasurementStore(tmp_path / "s.db") as store:
        store.put([first])
        for settings in other.values():
            assert store.find(first.shard, settings, "hw", "v") is None
        assert store.find(first.shard, SETTINGS, "other", "v") is None
        assert store.find(first.shard, SETTINGS, "hw", "other") is None
        renamed = Shard(
            tuple(
                replace(s, table=replace(s.table, name="x" + s.table.name))
                for s in first.shard.pieces
            )
        )
        assert store.find(renamed, SETTINGS, "hw", "v") is not None
        again = replace(first, timing=replace(TIMING, forward_ms=9.0))
        store.put([again])
        assert fresh(store.measurements()) == [again]


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_ids_are_packed(ids: list[int]) -> None:
    assert list(unpack_ids(pack_ids(ids))) == ids


def test_exchanges_come_back(tmp_path: Path) -> None:
    with MeasurementStore(tmp_path / "s.db") as store:
        store.put_exchange(EXCHANGE)
        assert store.find_exchange(EXCHANGE.key, "hw", "v") == EXCHANGE
        for key in (
            replace(EXCHANGE.key, dims=(64, 32, 0)),
            replace(EXCHANGE.key, batch_size=1),
            replace(EXCHANGE.key, devices=3),
        ):
            assert store.find_exchange(key, "hw", "v") is None
        assert store.exchanges() == [EXCHANGE]


def test_exchanges_among_nodes_are_not_those_inside_one(tmp_path: Path) -> None:
    among = replace(EXCHANGE, key=replace(EXCHANGE.key, nodes=(0, 0, 1)), measured_at=10.0)
    reduced_key = replace(among.key, dims=(64, 64, 64), collective="all_reduce")
    reduced = replace(among, key=reduced_key, measured_at=11.0)
    with MeasurementStore(tmp_path / "s.db") as store:
        for each in (EXCHANGE, among):
            store.put_exchange(each)
        assert store.find_exchange(EXCHANGE.key, "hw", "v") == EXCHANGE
        assert store.find_exchange(among.key, "hw", "v") == among
        export_parquet(store, tmp_path / "s.parquet")
        store.put_exchange(reduced)
        assert store.find_exchange(reduced.key, "hw", "v") == reduced
        export_parquet(store, tmp_path / "all.parquet")
    assert read_parquet_exchanges(tmp_path / "s.parquet") == [EXCHANGE, among]
    assert read_parquet_exchanges(tmp_path / "all.parquet") == [EXCHANGE, among, reduced]


def test_parquet_carries_everything(tmp_path: Path, tables: tuple[EmbeddingTable, ...]) -> None:
    shared = [replace(tables[n], features=n + 1, weighted=n > 1) for n in range(4)]
    kept = [*some(tables), measurement(Shard.of_tables(shared))]
    with MeasurementStore(tmp_path / "a.db") as store:
        store.put(kept)
        store.put_exchange(EXCHANGE)
        assert export_parquet(store, tmp_path / "a.parquet") == len(kept)
    assert fresh(read_parquet(tmp_path / "a.parquet")) == kept
    with MeasurementStore(tmp_path / "b.db") as store:
        newer = replace(kept[0], timing=replace(TIMING, forward_ms=9.0))
        store.put([newer, replace(kept[1], status="failed", timing=None)])
        assert import_parquet(store, tmp_path / "a.parquet") == len(kept) - 1
        assert sorted(map(repr, fresh(store.measurements()))) == sorted(
            map(repr, [newer, *kept[1:]])
        )
        assert import_parquet(store, tmp_path / "a.parquet") == 0
        assert store.exchanges() == [EXCHANGE]


def test_costs_of_one_hardware_are_normalized_to_one_level(
    tmp_path: Path, tables: tuple[EmbeddingTable, ...]
) -> None:
    """Each measurement has its own level. The store settles on one and normalises all to it."""
    first, second, third, last = some(tables, 4)
    reference_level, slow = ReferenceLevel(2.0, 6.0), ReferenceLevel(4.0, 9.0)
    with MeasurementStore(tmp_path / "a.db") as store:
        assert store.level("hw", "v") is None
        store.put([replace(first, timing=replace(TIMING, reference_level=reference_level)), third])
        assert store.level("hw", "v") == reference_level
        store.put([replace(second, timing=replace(TIMING, reference_level=slow))])
        assert store.level("hw", "v") == ReferenceLevel(
            3.0, 7.5
        )  # and earlier costs are reported at the new level
        assert store.level("other", "v") is None
        costs = [m.timing for m in store.measurements()]
        up, down = (ReferenceLevel(3.0, 7.5).over(*ms) for ms in ((2.0, 6.0), (4.0, 9.0)))
        assert [(t.forward_ms, t.backward_ms) for t in costs if t] == [
            pytest.approx((1.5 * up[0], 2.5 * up[1])),
            (1.5, 2.5),  # without a reference: as it was read
            pytest.approx((1.5 * down[0], 2.5 * down[1])),
        ]
        assert [t.reference_level for t in costs if t] == [
            ReferenceLevel(3.0, 7.5),
            None,
            ReferenceLevel(3.0, 7.5),
        ]
        export_parquet(store, tmp_path / "a.parquet")
        told = store.measurements()
        found = store.find(second.shard, SETTINGS, "hw", "v")
        assert found is not None
        assert found.total_ms == told[2].total_ms
        # Once there are enough repeats it stays: costs that were published stay what they were.
        timing = replace(TIMING, reference_level=reference_level)
        store.put([replace(last, measured_at=float(n), timing=timing) for n in range(62)])
        settled = store.level("hw", "v")
        assert settled == reference_level
        store.put([replace(last, measured_at=99.0 + n, timing=replace(TIMING, reference_level=slow))
                   for n in range(200)])  # fmt: skip
        assert store.level("hw", "v") == settled
    assert [m.total_ms for m in read_parquet(tmp_path / "a.parquet")] == [m.total_ms for m in told]


def test_all_repeats_of_a_shard_are_kept_and_their_mean_is_its_cost(
    tmp_path: Path, tables: tuple[EmbeddingTable, ...]
) -> None:
    one, other = some(tables, 2)
    with MeasurementStore(tmp_path / "a.db") as store:
        store.put([one, replace(one, measured_at=8.0, timing=replace(TIMING, forward_ms=1.7))])
        store.put([other, one])  # the same measurement again is no repeat
        assert len(store) == 3
        twice, once = (store.find(m.shard, SETTINGS, "hw", "v") for m in (one, other))
        assert twice is not None
        assert twice.timing is not None
        assert once is not None
        assert once.timing is not None
        assert twice.timing.forward_ms == pytest.approx(1.6)
        assert (twice.timing.repeats, twice.timing.iterations) == (2, 24)
        assert (once.timing.repeats, once.timing.forward_ms) == (1, 1.5)
        assert all(a < b for a, b in zip(twice.timing.error, once.timing.error, strict=True))
        assert once.timing.error.forward > once.timing.error.backward  # only forward differs
        export_parquet(store, tmp_path / "a.parquet")
        assert import_parquet(store, tmp_path / "a.parquet") == 0
    assert [m.timing and m.timing.error for m in read_parquet(tmp_path / "a.parquet")] == [
        pytest.approx(once.timing.error)
    ] * 3


def test_repeats_that_differ_increase_all_errors(
    tmp_path: Path, tables: tuple[EmbeddingTable, ...]
) -> None:
    kept = some(tables, 40)
    with MeasurementStore(tmp_path / "a.db") as store:
        store.put(kept)
        before = store.deviation("hw", "v")
        for number, item in enumerate(kept):
            shift = 1.05 if number % 2 else 0.95
            timing = replace(TIMING, forward_ms=1.5 * shift, backward_ms=2.5 * shift)
            store.put([replace(item, measured_at=9.0, timing=timing)])
    with MeasurementStore(tmp_path / "a.db") as store:
        after = store.deviation("hw", "v")
        assert after == pytest.approx([0.05 / 2**0.5] * 3, rel=0.2)
        assert after.both > 2 * before.both
        assert store.deviation("other", "v") == before


def test_an_empty_store_is_exported_too(tmp_path: Path) -> None:
    with MeasurementStore(tmp_path / "a.db") as store:
        assert export_parquet(store, tmp_path / "a.parquet") == 0
    assert read_parquet(tmp_path / "a.parquet") == []


def test_parquet_files_of_others_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa

    path = tmp_path / "x.parquet"
    with pytest.raises(UserError, match="does not exist"):
        read_parquet(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(UserError, match="not a Parquet file"):
        read_parquet(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(UserError, match="autoshard"):
        read_parquet(path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda path: path.write_bytes(b"not a database, but long enough to look at" * 9),
            "not a store",
        ),
        (
            lambda path: _pragma(path, "user_version = 99"),
            "has schema 99 of stores.* reads 3: name",
        ),
        (lambda path: _pragma(path, "application_id = 7"), "another program"),
        (lambda path: _overwrite(path, 4096 + 300), "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), "is damaged"),
    ],
)
def test_a_file_that_cannot_be_used_is_left_as_it_is(
    tmp_path: Path, tables: tuple[EmbeddingTable, ...], damage: object, says: str
) -> None:
    path = tmp_path / "costs.db"
    with MeasurementStore(path) as store:
        store.put(some(tables))
    damage(path)  # type: ignore[operator]
    before = path.read_bytes()
    with pytest.raises(StoreError, match=says) as caught:
        MeasurementStore(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["costs.db"]


def _pragma(path: Path, text: str) -> None:
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA {text}")
    db.close()


def _overwrite(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place : place + 6000] = b"\x5a" * 6000
    path.write_bytes(content)


def test_a_store_must_be_a_file_and_may_have_to_exist(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="folder"):
        MeasurementStore(tmp_path)
    with pytest.raises(StoreError, match="does not exist"):
        MeasurementStore(tmp_path / "none.db", must_exist=True)
    (tmp_path / "empty.db").touch()
    with MeasurementStore(tmp_path / "empty.db") as store:
        assert len(store) == 0


def test_a_full_disk_loses_nothing_and_mixes_nothing_up(
    tmp_path: Path, tables: tuple[EmbeddingTable, ...]
) -> None:
    first, lost, *_ = some(tables, 2)
    others = [measurement(Shard.of_tables([table])) for table in tables]
    with MeasurementStore(tmp_path / "costs.db") as store:
        store.put([first])
        disk = _FullDisk(store._db)
        store._db = disk  # type: ignore[assignment]
        with pytest.raises(StoreError, match=r"costs.db: .* the disk is full: free some space"):
            store.put([lost])
        store._db = disk.db
        store.put(others)  # pieces that get the ids that those of the lost one had
        store.put([lost])
    with MeasurementStore(tmp_path / "costs.db") as store:
        assert fresh(store.measurements()) == [first, *others, lost]


class _FullDisk:
    """A connection to a database on a disk that gets full at COMMIT, as SQLite tells of it."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def __getattr__(self, name: str) -> object:
        return getattr(self.db, name)

    def execute(self, *words: object) -> object:
        if words == ("COMMIT",):
            self.db.execute("ROLLBACK")
            full = sqlite3.OperationalError("database or disk is full")
            full.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise full
        return self.db.execute(*words)  # type: ignore[arg-type]


def test_a_locked_store_is_one_line(
    tmp_path: Path, tables: tuple[EmbeddingTable, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoshard.benchmark.store.file.BUSY_SECONDS", 0.1)
    with MeasurementStore(tmp_path / "costs.db") as store:
        with sqlite3.connect(tmp_path / "costs.db", isolation_level=None) as other:
            other.execute("BEGIN EXCLUSIVE")
            with pytest.raises(StoreError, match=r"costs.db: has been locked .* end it and run"):
                store.put(some(tables, 1))
        other.close()
        store.put(some(tables, 1))
        assert len(store) == 1


def test_kill_9_loses_nothing_that_was_put(tmp_path: Path) -> None:
    path = tmp_path / "costs.db"
    script = (
        "import sys\n"
        "from autoshard.benchmark import Measurement, MeasurementStore, MeasureSettings, Timing\n"
        "from autoshard.benchmark.measurement import Directions\n"
        "from autoshard.workload import random_shards, synthetic_tables\n"
        "store = MeasurementStore(sys.argv[1])\n"
        "timing = Timing(1, 2, Directions.of(0.01), 9, 0, 0, 0.1)\n"
        "for n, shard in enumerate(random_shards(synthetic_tables(60, 7, 'small'), 3000, 6)):\n"
        "    made = (shard, MeasureSettings(64), 'h', 'v', 'ok', 'd', 'n', n, timing)\n"
        "    store.put([Measurement(*made)])\n"
        "    print(n, flush=True)\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) == 40:
            os.kill(writer.pid, signal.SIGKILL)
            break
    told = 40 + len(writer.stdout.read().split())
    writer.wait()
    with MeasurementStore(path) as store:
        found = [item.measured_at for item in store.measurements()]
        assert found == list(range(len(found)))
        assert len(found) >= told + 1
        assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_readers_read_while_it_is_written(
    tmp_path: Path, tables: tuple[EmbeddingTable, ...]
) -> None:
    path = tmp_path / "costs.db"
    kept = some(tables, 200)
    MeasurementStore(path).close()

    def write() -> None:
        with MeasurementStore(path) as store:
            for item in kept:
                store.put([item])

    thread = threading.Thread(target=write)
    thread.start()
    seen = [0]
    with MeasurementStore(path) as reader:
        while thread.is_alive() or seen[-1] < len(kept):
            found = reader.measurements()
            assert fresh(found) == kept[: len(found)]
            seen.append(len(found))
    thread.join()
    assert seen == sorted(seen)


def test_two_writers_share_a_store(tmp_path: Path, tables: tuple[EmbeddingTable, ...]) -> None:
    kept = some(tables, 100)
    with (
        MeasurementStore(tmp_path / "s.db") as first,
        MeasurementStore(tmp_path / "s.db") as second,
    ):
        for number, item in enumerate(kept):
            (first, second)[number % 2].put([item])
        assert fresh(first.measurements()) == fresh(second.measurements()) == kept
        first.copy_to(tmp_path / "copy.db")
    with MeasurementStore(tmp_path / "copy.db") as copy:
        assert fresh(copy.measurements()) == kept
