"""The chaos run: faults at random moments while commands run, and what must hold after each."""

import random
import re
import signal
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from autoshard.benchmark.store.file import KEY
from autoshard.experiments.console import cli
from chaos.faults import Fault, SkippedError
from chaos.workloads import WORKLOADS, Workload
from chaos.world import PATIENCE, World, wait_until, world

FAULTS_OF_A_WORLD = 8
_MOST_WAIT = 4.0  # seconds from a sign of life to a fault


@dataclass(frozen=True)
class Outcome:
    """What came of a fault.

    Args:
        fault: Its name.
        workload: What was disturbed.
        ended: Exit code of the command that it ended; None if the command went on.
        said: Its last message.
        skipped: Why it was not made; empty if it was.
        problems: What did not hold afterwards.
        lost: Number of confirmed measurements that were lost or changed.
    """

    fault: str
    workload: str
    ended: int | None = None
    said: str = ""
    skipped: str = ""
    problems: tuple[str, ...] = ()
    lost: int = 0

    @property
    def recovered(self) -> bool:
        """Whether all held afterwards."""
        return not self.problems and not self.lost


def chaos(
    faults: Sequence[Fault],
    kills: int,
    seed: int,
    seconds: float,
    workloads: Sequence[Workload] = WORKLOADS,
) -> Iterator[Outcome]:
    """Makes so many faults, or as many as the seconds suffice for; yields what came of each."""
    rng, deadline = random.Random(seed), time.monotonic() + seconds
    left, made = list[Fault](), 0
    while made < kills and time.monotonic() < deadline:
        turns = _turns(workloads, faults, left, rng)
        apart = any(fault.apart for _, chosen in turns for fault in chosen)
        with world(apart=apart or rng.random() < 0.5) as place:
            run = _Run(place, turns[0][0], rng)
            for workload, chosen in turns:
                for number, fault in enumerate(chosen):
                    if made < kills and time.monotonic() < deadline:
                        before = run.workload.name
                        if number == 0 and (problems := run.turn_to(workload)):
                            yield Outcome("end of a turn", before, problems=problems)
                        outcome = run.disturb(fault)
                        made += not outcome.skipped
                        yield outcome
            if problems := run.finish():
                yield Outcome("end of the run", run.workload.name, problems=problems)


def _turns(
    workloads: Sequence[Workload], faults: Sequence[Fault], left: list[Fault], rng: random.Random
) -> list[tuple[Workload, list[Fault]]]:
    """Returns the workloads of a world in random order, each with its share of the faults.

    All workloads take turns in each world, so that a run that ends early has disturbed them all.
    Faults are taken from those `left`, to which all are added where too few concern a workload.
    """
    share, turns = FAULTS_OF_A_WORLD // len(workloads), []
    for workload in rng.sample(workloads, len(workloads)):
        while len(chosen := _concerning(workload, left)[:share]) < share:
            left += rng.sample(faults, len(faults))
        for fault in chosen:
            left.remove(fault)
        turns.append((workload, chosen))
    return turns


def _concerning(workload: Workload, faults: Sequence[Fault]) -> list[Fault]:
    """Returns the faults that concern a workload."""
    return [fault for fault in faults if not fault.only or workload.name in fault.only]


class _Run:
    """A workload in a world. It runs while it is disturbed, and is resumed when it ended."""

    def __init__(self, place: World, workload: Workload, rng: random.Random) -> None:
        self._world, self.workload, self._rng = place, workload, rng
        self._numbers = count(1)
        self._number = 0

    def turn_to(self, workload: Workload) -> tuple[str, ...]:
        """Kills the command, with -9, and goes on with another workload in the same store.

        Returns what is wrong with how it had ended, if it had.
        """
        command, problems = self._world.command, list[str]()
        if command is not None and command.poll() is not None:
            self._ended(problems)
        self._world.end_command()
        self._world.command = None
        self.workload = workload
        return tuple(problems)

    def disturb(self, fault: Fault) -> Outcome:
        """Waits for a random moment, makes the fault, undoes it and looks what came of it."""
        name, place = fault.name, self._world
        problems = self._begin()
        self._wait_for_progress()
        time.sleep(self._rng.random() * _MOST_WAIT)
        problems += self._begin()  # if it has just ended
        before = confirmed(place.store)
        try:
            undo = fault.make(place, self._rng)
        except SkippedError as reason:
            return Outcome(name, self.workload.name, skipped=str(reason), problems=tuple(problems))
        time.sleep(fault.seconds * (0.5 + self._rng.random() / 2))
        undo()
        ended: int | None = None
        said = ""
        try:
            if self._wait_for_progress() is not None:
                code, last = self._ended(problems)
                if code:
                    ended, said = code, last
                    self._resume()
                    if self._wait_for_progress():
                        again, last = self._ended(problems)
                        problems.append(f"does not resume: exit code {again}: {last}")
        except TimeoutError as error:
            problems.append(f"{error}: {self._last_words()}")
            place.end_command()
        lost = differing(before, confirmed(place.store))
        return Outcome(name, self.workload.name, ended, said, "", tuple(problems), lost)

    def finish(self) -> tuple[str, ...]:
        """Runs the command to its end, and returns what did not hold."""
        before = confirmed(self._world.store)
        problems = self._begin()
        try:
            for _ in range(2):
                self._wait_for_end()
                code, said = self._ended(problems)
                if code == 0:
                    break
                self._resume()
            else:
                problems.append(f"does not end: exit code {code}: {said}")
        except TimeoutError as error:
            problems.append(f"{error}: {self._last_words()}")
        if lost := differing(before, confirmed(self._world.store)):
            problems.append(f"{lost} measurements lost or changed")
        return tuple(problems)

    # --- the command ----------------------------------------------------------------------------

    def _begin(self) -> list[str]:
        """Starts the next run if none runs; the last one is resumed if it failed.

        Returns what is wrong with how the last one ended.
        """
        command, problems = self._world.command, list[str]()
        if command is not None and command.poll() is None:
            return problems
        if command is None or self._ended(problems)[0] == 0:
            self._number = next(self._numbers)
            self._world.start_command(*self.workload.begin(self._number))
        else:
            self._resume()
        return problems

    def _resume(self) -> None:
        self._world.start_command(*self.workload.resume(self._number, self._world.work))

    def _wait_for_end(self) -> None:
        command = self._world.command
        assert command is not None
        wait_until("the command's end", lambda: command.poll() is not None)

    def _wait_for_progress(self) -> int | None:
        """Waits until the command has measured or said something more, or has ended: its code."""
        command, before = self._world.command, self._progress()
        assert command is not None
        wait_until(
            "progress", lambda: command.poll() is not None or self._progress() > before, PATIENCE
        )
        return command.poll()

    def _progress(self) -> int:
        return len(confirmed(self._world.store)) + self._world.output.stat().st_size

    def _ended(self, problems: list[str]) -> tuple[int, str]:
        """Returns code and message of a command that ended; adds what is wrong with them."""
        assert self._world.command is not None
        code = int(self._world.command.wait())
        output, errors = self._world.output.read_text(), self._world.errors.read_text()
        if problem := problem_of(code, output, errors):
            problems.append(problem)
        return code, " ".join(_messages(errors))

    def _last_words(self) -> str:
        return (
            self._world.output.read_text()[-600:] + self._world.errors.read_text()[-600:]
        ).strip()


Row = tuple[Any, ...]
# Notes, and lines of Ray's log.
_OTHERS = re.compile(r"note: |\[?\d{4}-\d\d-\d\d [\d:,]+\s([EWC] |ERROR|WARNING)")
# Ray ends a driver itself if it sees a head that was restarted, and says where it was.
_RAY_ENDS = re.compile(r"^\[\d{4}-[^\]]* C \d+ \d+\] .*^\*\*\* StackTrace.*", re.M | re.S)
_KEYS = {
    "measurements": (*KEY, "device", "measured_at"),
    "exchanges": ("dims", "batch_size", "devices", "hardware", "versions"),
}


def problem_of(code: int, output: str, errors: str) -> str:
    """Returns what is wrong with how a command ended; empty if nothing is."""
    if "Traceback (most recent call last)" in output + errors:
        return f"a traceback, exit code {code}: {(output + errors)[-4000:]}"
    if _RAY_ENDS.search(errors):
        return ""
    if len(_messages(errors)) > 1:
        return f"a message of several lines, exit code {code}: {errors[-4000:]}"
    if code not in (0, cli.BAD_INPUT, -signal.SIGKILL):
        return f"exit code {code}: {(output + errors)[-1200:]}"
    return ""


def _messages(errors: str) -> list[str]:
    """Returns the lines of standard error beside notes and Ray's log."""
    lines = _RAY_ENDS.sub("", errors).splitlines()
    return [line for line in lines if not _OTHERS.match(line)]


def confirmed(store: Path) -> Mapping[Row, Row]:
    """Returns all stored costs by shard, settings, device and time, and all all-to-alls."""
    if not store.exists():
        return {}
    db = sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=PATIENCE)
    db.row_factory = sqlite3.Row
    try:
        found: dict[Row, Row] = {}
        for table, where in (("measurements", "WHERE status = 'ok'"), ("exchanges", "")):
            for row in db.execute(f"SELECT * FROM {table} {where}"):
                values = {name: row[name] for name in row.keys() if name != "id"}  # noqa: SIM118
                key = (table, *(values[name] for name in _KEYS[table]))
                assert key not in found, f"{key} is there twice"
                found[key] = tuple(values.values())
        return found
    finally:
        db.close()


def differing(before: Mapping[Row, Row], after: Mapping[Row, Row]) -> int:
    """Returns how many rows of `before` are not in `after` unchanged."""
    return sum(after.get(key) != row for key, row in before.items())
