import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
import torch
from commands import actors, backlog, kill_actors, process_id, wait_until, whole

from autoshard.benchmark import (
    BenchmarkPool,
    MeasuredCosts,
    Measurement,
    MeasurementError,
    MeasurementStore,
    MeasureSettings,
    PoolError,
    StoreError,
    TimingOptions,
)
from autoshard.benchmark.backends import cpu
from autoshard.benchmark.machine.device_lock import claimed
from autoshard.benchmark.machine.hardware import physical_cores, with_threads
from autoshard.benchmark.pool.pool import end_pool, pool_names
from autoshard.workload import CostOracle, EmbeddingTable, Shard, Trace, load_tables, random_shards

SETTINGS = MeasureSettings(256)
QUICK = TimingOptions(precision=0.2, max_iterations=9)
MakePool = Callable[..., BenchmarkPool]


def processes() -> list[psutil.Process]:
    """The processes of the pool's devices."""
    return actors("DeviceProcess")


def test_every_shard_is_answered_and_the_second_time_from_the_store(
    make_pool: MakePool, tables: tuple[EmbeddingTable, ...], tmp_path: Path
) -> None:
    pool = make_pool()
    shards = random_shards(tables, 30, 6)
    heard: list[Measurement] = []
    first = pool.measure([*shards, shards[0]], SETTINGS, QUICK, progress=heard.append)
    assert [answer.shard for answer in first] == [*shards, shards[0]]
    assert all(answer.ok for answer in first)
    assert len(heard) == 31
    assert {answer.device for answer in first} == {device.name for device in pool.devices()}
    second = pool.measure(shards, SETTINGS, QUICK)
    assert all(answer.reused for answer in second)
    assert [answer.measured_at for answer in second] == [a.measured_at for a in first[:-1]]
    # Both are told at the level that the store came to with the last of them.
    told = [answer.total_ms for answer in first[:-1]]
    assert [answer.total_ms for answer in second] == pytest.approx(told)
    pool.close()
    with MeasurementStore(tmp_path / "costs.db") as store:
        assert len(store) == 30
    assert not (tmp_path / "costs.db-wal").exists()


def test_a_cost_is_the_mean_of_as_many_repeats_as_requested(
    make_pool: MakePool, tables: tuple[EmbeddingTable, ...], tmp_path: Path
) -> None:
    """Those in the store count; each of two requests that want more gets them."""
    pool = make_pool()
    shards = random_shards(tables, 6, 4, seed=3)
    once = pool.measure(shards, SETTINGS, QUICK)
    assert [answer.timing.repeats for answer in once if answer.timing] == [1] * 6
    thrice = pool.measure(shards[:3], SETTINGS, QUICK, repeats=3)
    assert [answer.timing.repeats for answer in thrice if answer.timing] == [3] * 3
    assert not any(answer.reused for answer in thrice)
    again = pool.measure(shards, SETTINGS, QUICK)
    assert [answer.timing.repeats for answer in again if answer.timing] == [3] * 3 + [1] * 3
    assert all(answer.reused for answer in again)
    # Repeats that disagree by chance may have the larger error (test_repeats.py).
    assert all(answer.timing.error.both > 0 for answer in again if answer.timing)
    pool.close()
    with MeasurementStore(tmp_path / "costs.db") as store:
        repeats = store.measurements()
        assert len(repeats) == 3 * 3 + 3
        for shard, answer in zip(shards, again, strict=True):
            totals = [v.total_ms for v in repeats if v.shard.digest == shard.digest]
            assert answer.total_ms == pytest.approx(sum(totals) / len(totals))


def test_cores_are_found_pinned_and_never_shared(make_pool: MakePool) -> None:
    pool = make_pool(kind="auto")
    devices = pool.devices()
    if devices[0].kind == "cuda":
        pytest.skip("this machine's devices are GPUs")
    assert len(devices) == len(physical_cores())
    assert len({device.name for device in devices}) == len(devices)
    pinned = [process.cpu_affinity() for process in processes()]  # of their main threads
    assert sorted(pinned, key=str) == [[core] for core in physical_cores()]


def test_rllib_and_tune_keep_all_cpus(make_pool: MakePool) -> None:
    make_pool().devices()
    total = int(ray.cluster_resources()["CPU"])
    assert ray.available_resources()["CPU"] == total
    everything = ray.remote(num_cpus=total)(lambda: "done")
    assert ray.get(everything.remote(), timeout=240) == "done"


def test_two_clients_at_once_measure_a_shard_once(
    make_pool: MakePool, tables: tuple[EmbeddingTable, ...], tmp_path: Path
) -> None:
    """They keep stores of their own, so it is the pool that must notice."""
    shards = random_shards(tables, 24, 10, seed=1)
    pools = [make_pool(name) for name in ("one.db", "two.db")]
    pools[0].devices()
    with ThreadPoolExecutor() as threads:
        first, second = threads.map(lambda pool: pool.measure(shards, SETTINGS, QUICK), pools)
    assert [a.measured_at for a in first] == [a.measured_at for a in second]
    for pool in pools:
        with MeasurementStore(pool.store) as store:
            assert len(store) == len(shards)


def test_the_oracle_of_measured_costs(
    make_pool: MakePool, tables: tuple[EmbeddingTable, ...]
) -> None:
    oracle = MeasuredCosts(make_pool(), SETTINGS)
    assert isinstance(oracle, CostOracle)
    small, large = oracle.costs([Shard.of_tables(tables[:1]), Shard.of_tables(tables[:20])])
    assert 0 < small.total_ms < large.total_ms
    assert large.spread > 0


def test_a_shard_that_does_not_fit_is_refused_and_the_pool_goes_on(
    make_pool: MakePool, tables: tuple[EmbeddingTable, ...]
) -> None:
    pool = make_pool()
    pool.devices()
    before = {process.pid for process in processes()}
    huge = EmbeddingTable("huge", 2**36, 128, 4.0)
    shards = [Shard.of_tables([huge]), Shard.of_tables(tables[:2])]
    refused, fine = pool.measure(shards, SETTINGS, QUICK)
    assert (refused.status, refused.ok, fine.ok) == ("refused", False, True)
    assert "needs" in refused.reason
    with pytest.raises(MeasurementError, match="needs"):
        MeasuredCosts(pool, SETTINGS).costs(shards)
    assert {process.pid for process in processes()} == before
    assert pool.measure(shards[:1], SETTINGS, QUICK)[0].reused
    assert not pool.measure(shards[:1], SETTINGS, QUICK, retry_failed=True)[0].reused


def test_a_shard_whose_recording_is_not_here_fails_with_its_reason(make_pool: MakePool) -> None:
    trace = Trace("/nowhere/recording.pt", 0, 4096, "0" * 24)
    table = EmbeddingTable("recorded", 100, 8, 2.0, trace=trace)
    (answer,) = make_pool().measure([Shard.of_tables([table])], SETTINGS, QUICK)
    assert answer.status == "failed"
    assert "/nowhere/recording.pt" in answer.reason


def test_an_operator_that_hangs_is_recorded_and_its_actor_replaced(
    fresh_pool: MakePool, tables: tuple[EmbeddingTable, ...], tmp_path: Path
) -> None:
    pool = fresh_pool(time_limit_s=6.0, max_devices=1)
    count = len(pool.devices())
    before = {process.pid for process in processes()}
    with Endless(tmp_path) as endless:
        (hung,) = pool.measure([endless.shard], SETTINGS, QUICK)
    assert (hung.status, hung.reason) == ("failed", "no answer within 6 s")
    fine = pool.measure(random_shards(tables, 8, 3), SETTINGS, QUICK)
    assert all(answer.ok for answer in fine)
    wait_until("another actor", lambda: len(pool.devices()) == count)
    assert len({process.pid for process in processes()} - before) == 1
    assert any("no answer" in notice for notice in pool.notices())
    state = ray.get(pool._actor.state.remote())
    assert (state.shards_measured, state.shards_failed, state.devices_lost) == (8, 1, 1)
    assert (state.devices, state.devices_busy, state.shards_waiting) == (count, 0, 0)


def test_an_operator_that_fails_is_recorded_and_its_actor_replaced(
    make_pool: MakePool, tables: tuple[EmbeddingTable, ...], tmp_path: Path
) -> None:
    """fbgemm raises when a recording looks up rows beyond its table."""
    rows = torch.full((512,), 2**38)
    torch.save((rows, torch.arange(513), torch.ones(1, 512, dtype=torch.int64)), tmp_path / "t.pt")
    wild = replace(load_tables(str(tmp_path / "t.pt"))[0], rows=10)
    pool = whole(make_pool())
    count = len(pool.devices())
    before = {process.pid for process in processes()}
    shards = [Shard.of_tables([wild]), *random_shards(tables, 10, 3)]
    failed, *others = pool.measure(shards, SETTINGS, QUICK)
    assert failed.status == "failed"
    assert failed.reason.startswith("RuntimeError: ")
    assert all(answer.ok for answer in others)
    wait_until("another actor", lambda: len(pool.devices()) == count)
    assert len({process.pid for process in processes()} - before) == 1


def test_a_shard_that_actors_die_on_is_blamed_in_the_end(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool()
    pool.devices()
    with Endless(tmp_path) as endless, ThreadPoolExecutor() as threads:
        asked = threads.submit(pool.measure, [endless.shard], SETTINGS, QUICK)
        for _ in range(3):
            process = endless.measuring()
            process.send_signal(signal.SIGKILL)
            process.wait()
    (blamed,) = asked.result()
    assert (blamed.status, blamed.reason) == (
        "failed",
        "3 benchmark actors died while measuring it",
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take back what Ray has given away")
def test_the_pool_and_its_actors_run_at_usual_priority(make_pool: MakePool) -> None:
    """Beside a busy loop Ray's low one would leave them 3 % of a core."""
    pool = make_pool()
    pool.devices()
    pids = [process_id(pool), *(process.pid for process in processes())]
    for pid in pids:
        threads = [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {0}


def test_killed_actors_lose_nothing(
    make_pool: MakePool, tables: tuple[EmbeddingTable, ...]
) -> None:
    pool = whole(make_pool())
    count = len(pool.devices())
    shards = random_shards(tables, 60, 8, seed=11)
    answers = []
    for place, (_, answer) in enumerate(pool.stream(shards, SETTINGS, QUICK)):
        answers.append(answer)
        if place == 5:
            assert kill_actors("DeviceProcess") == count
            assert backlog(pool) > 0
    assert len(answers) == 60
    assert all(answer.ok for answer in answers)


def test_an_all_to_all_waits_for_a_core_that_another_pool_holds(make_pool: MakePool) -> None:
    devices = whole(make_pool()).devices()
    if len(devices) < 2 or devices[0].kind != "cpu":
        pytest.skip("an all-to-all needs two devices, and only cores are shared")
    pool, told = make_pool(), list[str]()
    with ThreadPoolExecutor() as threads:
        with claimed(f"core {physical_cores()[-1]}", "another pool", 2.0):
            asked = threads.submit(pool.exchange, [8] * len(devices), 512)
            wait_until(
                "a notice",
                lambda: told.extend(pool.notices()) or any("had to wait" in n for n in told),
            )
            assert not asked.done()
        assert max(asked.result().forward_ms) > 0
    assert any("is held by another pool" in notice for notice in told)


def test_a_killed_coordinator_loses_nothing(
    make_pool: MakePool, tables: tuple[EmbeddingTable, ...], tmp_path: Path
) -> None:
    pool = make_pool()
    shards = random_shards(tables, 60, 8, seed=12)
    answers = {}
    for place, (index, answer) in enumerate(pool.stream(shards, SETTINGS, QUICK)):
        answers[index] = answer
        if place == 5:
            assert backlog(pool) > 0
            os.kill(process_id(pool), signal.SIGKILL)
    assert sorted(answers) == list(range(60))
    pool.close()
    with MeasurementStore(tmp_path / "costs.db") as store:
        assert len(store) == 60


def test_a_coordinator_that_is_killed_again_and_again_ends_the_request(
    fresh_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ray's memory monitor does it when shards are too large for the machine."""
    monkeypatch.setattr("autoshard.benchmark.pool.pool._MAX_LOSSES", 2)
    pool = fresh_pool(max_devices=1)
    with Endless(tmp_path) as endless, ThreadPoolExecutor() as threads:
        asked = threads.submit(pool.measure, [endless.shard], SETTINGS, QUICK)
        for _ in range(2):
            process = endless.measuring()
            os.kill(process_id(pool), signal.SIGKILL)
            process.wait()  # devices end with the pool
        with pytest.raises(PoolError, match=r"was killed 2 times while it measured 1 shards, most"):
            asked.result()


def test_a_request_that_is_dropped_is_forgotten(
    make_pool: MakePool, tables: tuple[EmbeddingTable, ...], tmp_path: Path
) -> None:
    pool = make_pool()
    stream = pool.stream(random_shards(tables, 200, 8, seed=9), SETTINGS, QUICK)
    next(stream)
    stream.close()
    # What was being measured is kept.
    wait_until("an empty backlog", lambda: backlog(pool) == 0)
    pool.close()
    with MeasurementStore(tmp_path / "costs.db") as store:
        assert 0 < len(store) < 100


def test_a_store_that_cannot_be_used_is_reported(
    make_pool: MakePool, tables: tuple[EmbeddingTable, ...], tmp_path: Path
) -> None:
    (tmp_path / "bad.db").write_text("not a store, but a text that somebody may need")
    with pytest.raises(StoreError, match=r"bad\.db"):
        make_pool("bad.db").measure([Shard.of_tables(tables[:1])], SETTINGS)
    assert (tmp_path / "bad.db").read_text().startswith("not a store")
    with pytest.raises(PoolError, match="is not one"):
        make_pool(kind="tpu")


def test_an_actor_needs_little_more_than_its_shard(
    fresh_pool: MakePool,
) -> None:
    """At most the shard's own bytes, what it may keep, and 1 GiB, also after a larger shard."""
    pool = fresh_pool(max_devices=1)
    (device,) = pool.devices()
    (process,) = processes()
    kept = device.memory_bytes // cpu.KEPT_SHARE
    large = kept // (8 * 64 * 4) * 5 // 4  # rows: more in all than the process may keep
    shards = [
        Shard.of_tables([EmbeddingTable(f"t{n}", rows, 64, 8.0) for n in range(8)])
        for rows in (100, large, 100, 20_000)
    ]
    for shard in shards:
        pool.measure([shard], SETTINGS, QUICK)
    (peak,) = pool.peak_bytes().values()
    assert peak < SETTINGS.needed_bytes(shards[1]) + 2**30
    assert process.memory_info().rss < min(kept, SETTINGS.needed_bytes(shards[3])) + 2**30


class Endless:
    """A shard that is measured for ever: its recording is a pipe that nothing comes out of."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "recording.pt"
        os.mkfifo(self._path)
        trace = Trace(str(self._path), 0, 4096, "0" * 24)
        self.shard = Shard.of_tables([EmbeddingTable("endless", 100, 8, 2.0, trace=trace)])

    def __enter__(self) -> "Endless":
        self._end = os.open(self._path, os.O_RDWR)  # or readers would wait for it to be opened
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._end)

    def measuring(self) -> psutil.Process:
        """The process that measures it, as soon as there is one."""
        found: list[psutil.Process] = []
        wait_until(
            "a device that reads it",
            lambda: bool(found.extend(filter(self._reads, processes())) or found),
        )
        return found[0]

    def _reads(self, process: psutil.Process) -> bool:
        with suppress(OSError):  # it may just have ended, or a file been closed
            files = Path(f"/proc/{process.pid}/fd").iterdir()
            return any(file.readlink() == self._path for file in files)
        return False


def test_each_hardware_is_measured_on_its_own_devices(
    fresh_pool: MakePool, tables: tuple[EmbeddingTable, ...]
) -> None:
    """A device of all cores is of other hardware than one of a core, and none is of a third."""
    cores = len(physical_cores())
    if cores < 2:
        pytest.skip("a device of several cores needs as many")
    pool = fresh_pool()
    one, _ = pool.make()
    several = with_threads(one, cores)
    shards = random_shards(tables, 4, 3)
    try:
        costs = MeasuredCosts(pool, SETTINGS).costs(shards, [one, several, one, several])
        assert all(cost.total_ms > 0 for cost in costs)
        of_several = pool.of_hardware(several)
        assert [device.hardware for device in of_several.devices()] == [several]
        # Each answer is kept under its hardware, in one store.
        for measured, numbers in ((pool, [0, 2]), (of_several, [1, 3])):
            again = measured.measure([shards[number] for number in numbers], SETTINGS)
            assert all(answer.reused for answer in again)
            assert {answer.hardware for answer in again} == {measured.make()[0]}
        assert not pool.measure([shards[1]], SETTINGS)[0].reused
        assert len(pool_names()) == 2
        with pytest.raises(PoolError, match=r"none of its devices is cpu: a third, threads: 1"):
            pool.of_hardware("cpu: a third, threads: 1").devices()
    finally:
        for name in pool_names():
            end_pool(name)
