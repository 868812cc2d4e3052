"""Finalists that meet in rounds, measured by something as noisy as it is told to be."""

from collections.abc import Sequence

import numpy as np

from autoshard.sharders import best_by_rounds


class Noisy:
    """Plans of known costs, each visit of one with noise; a visit takes a second."""

    def __init__(self, costs: Sequence[float], noise: float, seed: int = 0) -> None:
        self.costs, self.noise, self.rng = costs, noise, np.random.default_rng(seed)
        self.visits: list[list[float]] = [[] for _ in costs]
        self.rounds: list[tuple[int, int]] = []  # finalists, and visits of each so far

    def clock(self) -> float:
        return float(sum(len(some) for some in self.visits))

    def measure(self, numbers: Sequence[int], visits: int) -> list[float]:
        self.rounds.append((len(numbers), visits))
        for number in numbers:
            some = self.visits[number]
            while len(some) < visits:
                some.append(self.costs[number] * (1 + self.noise * self.rng.standard_normal()))
        return [float(np.mean(self.visits[number])) for number in numbers]


def test_the_better_half_goes_on_until_one_is_left() -> None:
    exact = Noisy([5.0, 3.0, 8.0, 4.0, 9.0, 7.0, 6.0, 2.0], 0.0)
    assert best_by_rounds(8, exact.measure, 1e6, exact.clock) == 7
    assert exact.rounds == [(8, 1), (4, 3), (2, 7)]
    assert [len(some) for some in exact.visits] == [3, 7, 1, 3, 1, 1, 1, 7]
    three = Noisy([3.0, 1.0, 2.0], 0.0)
    assert best_by_rounds(3, three.measure, 1e6, three.clock) == 1
    assert three.rounds == [(3, 1), (2, 3)]
    alone = Noisy([1.0], 0.0)
    assert best_by_rounds(1, alone.measure, 1e6, alone.clock) == 0
    assert alone.rounds == []  # there is nothing to choose


def test_the_seconds_end_it_between_rounds_and_never_the_first() -> None:
    costs = [5.0, 3.0, 8.0, 4.0, 9.0, 7.0, 6.0, 2.0]
    for seconds, rounds in ((0.001, 1), (15, 1), (16, 2), (23, 2), (24, 3), (1e6, 3)):
        noisy = Noisy(costs, 0.0)
        assert best_by_rounds(8, noisy.measure, seconds, noisy.clock) == 7
        assert len(noisy.rounds) == rounds
        assert noisy.clock() <= max(8, seconds)


def test_what_cannot_be_measured_is_never_chosen() -> None:
    noisy = Noisy([np.inf, 3.0, np.inf, 4.0], 0.0)
    assert best_by_rounds(4, noisy.measure, 1e6, noisy.clock) == 1


def test_rounds_find_the_best_more_often_than_measuring_all_equally() -> None:
    """Eight plans within 4 %, 24 visits of 2 % noise in either way."""
    costs = [1 + 0.005 * number for number in range(8)]
    found = {"rounds": 0.0, "equally": 0.0}
    lost = {"rounds": 0.0, "equally": 0.0}
    trials = 1500
    for seed in range(trials):
        order = np.random.default_rng(seed).permutation(8)
        mixed = [costs[number] for number in order]
        rounds = Noisy(mixed, 0.02, seed)
        chosen = {"rounds": best_by_rounds(8, rounds.measure, 1e6, rounds.clock)}
        equally = Noisy(mixed, 0.02, seed)
        chosen["equally"] = int(np.argmin(equally.measure(range(8), 3)))
        assert rounds.clock() <= equally.clock() == 24
        for way, number in chosen.items():
            found[way] += (mixed[number] == 1) / trials
            lost[way] += (mixed[number] - 1) / trials
    assert found["rounds"] > found["equally"] + 0.04  # of 1500: three standard errors
    assert lost["rounds"] < lost["equally"]
