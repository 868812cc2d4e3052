"""What the chaos run would notice."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from autoshard.benchmark import Measurement, MeasurementStore, MeasureSettings, Timing
from autoshard.benchmark.measurement import Directions
from autoshard.workload import EmbeddingTable, Shard
from chaos.faults import FAULTS, SkippedError
from chaos.metrics import counts, line
from chaos.run import Outcome, confirmed, differing, problem_of


def test_measurements_that_are_lost_or_changed_are_noticed(
    tmp_path: Path, tables: Sequence[EmbeddingTable]
) -> None:
    path, timing = (
        tmp_path / "costs.db",
        Timing(1.5, 2.5, Directions(0.03, 0.02, 0.01), 12, 1, 0.0, 0.1),
    )
    assert confirmed(path) == {}
    with MeasurementStore(path) as store:
        for table in tables[:3]:
            shard = Shard.of_tables([table])
            settings = MeasureSettings(64)
            store.put([Measurement(shard, settings, "hw", "v", "ok", "cpu0", "n", 7.0, timing)])
    before = confirmed(path)
    assert len(before) == 3
    with sqlite3.connect(path) as db:
        db.execute("UPDATE measurements SET forward_ms = 9 WHERE id = 1")
        db.execute("DELETE FROM measurements WHERE id = 2")
    db.close()
    assert differing(before, before) == 0
    assert differing(before, confirmed(path)) == 2


@pytest.mark.parametrize(
    ("code", "errors", "said"),
    [
        (0, "", ""),
        (2, "note: something\ncosts.db: cannot be written\n", ""),
        (-9, "[2026-01-02 03:04:05,678 E 1 1] core.cc:1: x\n", ""),
        (1, "[2026-01-02 03:04:05,678 C 1 1] x.h:1: Check failed\n*** StackTrace\n/x.so\n", ""),
        (2, "costs.db: cannot\nbe written\n", "several lines"),
        (1, "Traceback (most recent call last):\n  File\nOSError: full\n", "a traceback"),
        (1, "", "exit code 1"),
        (-11, "", "exit code -11"),
    ],
)
def test_messages_of_more_than_a_line_are_noticed(code: int, errors: str, said: str) -> None:
    problem = problem_of(code, "", errors)
    assert said in problem
    assert bool(problem) == bool(said)


def test_what_needs_rights_is_skipped_and_counted(tmp_path: Path) -> None:
    here = SimpleNamespace(on_small_disk=False, machines=None, store=tmp_path / "none.db")
    reasons = []
    for fault in FAULTS:
        if fault.name in ("disk full", "network cut", "store locked"):
            with pytest.raises(SkippedError) as caught:
                fault.make(here, None)  # type: ignore[arg-type]
            reasons.append(str(caught.value))
    assert len(reasons) == 3
    outcomes = [Outcome("disk full", "training", skipped=reason) for reason in reasons]
    bad = Outcome("head killed", "training", 1, problems=("a traceback",), lost=2)
    outcomes += [Outcome("head killed", "training", 2, "no cluster"), bad]
    found = {metric.name: (metric.target, metric.value) for metric in counts(outcomes)}
    assert found["recoveries, head killed"] == ("2 of 2", 1)
    assert found["faults that could not be made here"][1] == 3
    assert found["confirmed measurements lost or changed"] == ("0", 2)
    assert line(outcomes[3]) == "training, head killed: resumed after exit code 2 no cluster"
    assert line(bad).endswith("a traceback; 2 measurements lost or changed")
