"""`PolicySharder`: a trained policy as a sharder, alone or with all that improves its plans."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from autoshard.cost_model import EstimatedCosts
from autoshard.cost_model.outlook import Placed, TaskOutlook
from autoshard.cost_model.training import one_thread
from autoshard.sharders.cost_greedy import FusedGreedySharder
from autoshard.sharders.local_search import LocalSearch
from autoshard.sharders.player import Played, Player
from autoshard.sharders.policy_files import Policy
from autoshard.workload import PlanError, Shard, ShardingPlan, ShardingTask
from autoshard.workload.packing import pack
from autoshard.workload.terms import Bundle, Terms

_BUDGET = 24_000  # tables times devices times games that are drawn: what takes about 50 ms
_MOST_SPLITS = 8  # rounds of splitting
_SPLIT_CHOICES = 3  # tables of the slowest device that are tried
_SPLIT_TOGETHER = (2, 4, 8)  # of the costliest tables of all devices
_SPLITS_TRIED = _SPLIT_CHOICES + len(_SPLIT_TOGETHER)
_BALANCED = 0.97  # devices that are so even are not held up by single tables
_SPLIT_GAIN = 0.99  # of the slowest device: a split that gains less is not worth its lookups
_BEST = 8  # plans drawn that are held against each other in scenarios
_SEARCHED = 3  # of them: the start of the search


class PolicySharder:
    """Places tables by a policy; if asked, draws more plans, splits tables, searches.

    Args:
        policy: what was trained.
        oracle: prices plans.
        samples: plans to be drawn from the policy beside the greedy one, fewer if the task is
            large; the one whose slowest device is expected to be the fastest counts.
        search: split tables that hold up a device, and improve the best plan by a local search.
        seed: of what is drawn.
    """

    def __init__(
        self,
        policy: Policy,
        oracle: EstimatedCosts,
        samples: int = 0,
        search: bool = False,
        seed: int = 0,
    ) -> None:
        self._policy = policy
        self._oracle = oracle
        self._samples = samples
        self._search = LocalSearch(oracle, seed=seed) if search else None
        self._player = Player(policy.network, oracle)
        self._seed = seed

    @one_thread()
    def shard(self, task: ShardingTask) -> ShardingPlan:
        """A valid plan; PlanError says what is missing where none is found."""
        self._oracle.check(task)
        self._policy.check(len(task.devices))
        played = self._draw(task, Terms(task).bundles())
        greedy, played = played[:1], sorted(played, key=lambda game: game.worst_ms)
        best = played[:_BEST]
        best += [game for game in greedy if not any(game is other for other in best)]
        found: list[Placed] = [game.placed() for game in best]
        if not found:  # so tight that no game ended well
            found = [pack(task, split=self._search is not None)]
        if self._search is not None:
            found += self._improved(task, played, found)
        if len(found) == 1:
            return ShardingPlan.of_slices(task, found[0])
        return TaskOutlook(self._oracle, task).best_plan(found)

    def _improved(
        self, task: ShardingTask, played: Sequence[Played], found: Sequence[Placed]
    ) -> list[Placed]:
        """What the greedy by cost, splitting and the search add to what was found."""
        assert self._search is not None
        more: list[Placed] = []
        with suppress(PlanError):  # without a plan it adds none
            more.append(FusedGreedySharder(self._oracle).shard(task).placed(task))
        split = self._split(task, played[0]) if played else None
        if split is not None:
            more.append(split.placed())
        starts = more[-1:] if split is not None else [*more, *found[:_SEARCHED]]
        return more + self._search.improve(task, starts)

    def _draw(self, task: ShardingTask, whole: list[Bundle]) -> list[Played]:
        """Plans of the whole tables: as the policy thinks best, then others drawn from it."""
        rng = torch.Generator().manual_seed(self._seed)
        affordable = max(1, _BUDGET // (len(whole) * len(task.devices)))
        games = 1 + min(self._samples, affordable)
        played = self._player.play([whole] * games, task, rng)
        if len(played) == games:
            return played
        # Where some came to a dead end, the policy's own plan may be one of them.
        greedy = self._player.play([whole], task)
        if not greedy and not task.rules:
            greedy = self._player.play([whole], task, shielded=True)
        return greedy + played

    def _split(self, task: ShardingTask, start: Played) -> Played | None:
        """Halve tables that hold up the slowest device and play again, as long as it helps.

        In tasks so large that this would take seconds splitting is left to the search.
        """
        best, improved = start, None
        if len(start.pieces) * len(task.devices) * _SPLITS_TRIED > _BUDGET:
            return None
        terms = Terms(task)
        for _ in range(_MOST_SPLITS):
            candidates = [] if best.balance > _BALANCED else self._candidates(best, terms)
            played = self._player.play(candidates, task) if candidates else []
            found = min(played, key=lambda game: game.worst_ms, default=best)
            if found.worst_ms > _SPLIT_GAIN * best.worst_ms:
                break
            best = improved = found
        return improved

    def _candidates(self, played: Played, terms: Terms) -> list[list[Bundle]]:
        """The pieces with other ones split: of the slowest device one, of all the costliest few."""
        alone = self._oracle.prices([Shard(piece.slices) for piece in played.pieces])
        slices = Counter(piece.name for piece in played.pieces)
        order = [
            number
            for number in np.argsort(-alone.total_ms.numpy()).tolist()
            if terms.may_halve(piece := played.pieces[number], slices[piece.name])
        ]
        slowest = played.costs_ms.index(played.worst_ms)
        choices = [(n,) for n in order if played.homes[n] == slowest][:_SPLIT_CHOICES]
        choices += [tuple(order[:count]) for count in _SPLIT_TOGETHER if count <= len(order)]
        found = [_with_halves(played.pieces, set(choice)) for choice in choices]
        return [pieces for pieces in found if not terms.too_many(pieces)]


def _with_halves(pieces: Sequence[Bundle], chosen: set[int]) -> list[Bundle]:
    kept = [piece for number, piece in enumerate(pieces) if number not in chosen]
    return kept + [half for number in chosen for half in pieces[number].halves()]
