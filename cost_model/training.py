"""Learning: the whole dataset at each step, all members at once, until validation stops it."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from autoshard.cost_model.ensemble import Ensemble, State
from autoshard.cost_model.network import NetworkShape
from autoshard.workload.bounds import check_bounds

Progress = Callable[[], None]


@dataclass(frozen=True)
class TrainOptions:
    """How to learn.

    Args:
        members: networks in the ensemble.
        steps: at most so many.
        learning_rate: at its highest, after a short warm-up; it falls along a cosine.
        weight_decay: pulls weights to zero.
        check_every: steps between two looks at the validation data.
        patience: looks without a better error before learning ends.
        shape: of the networks that tell what shards cost; those for all-to-alls have one size.
    """

    members: int = 5
    steps: int = 600
    learning_rate: float = 5e-3
    weight_decay: float = 1e-2
    check_every: int = 25
    patience: int = 12
    shape: NetworkShape = field(default_factory=NetworkShape)

    def check(self) -> None:
        """UserError unless the numbers make sense."""
        counts = ("members", "steps", "check_every", "patience", "shape.hidden", "shape.fusion")
        check_bounds(
            self,
            "hyper.",
            at_least={**dict.fromkeys(counts, 1), "shape.learned": 0, "weight_decay": 0},
            more_than={"learning_rate": 0},
        )


@dataclass(frozen=True)
class Curves:
    """Step, training loss and validation error (mean, relative) at each check."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    errors: tuple[float, ...]
    seconds: float


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core: networks this small gain little from more, wait for busy ones, and
    add up in another order on machines with more of them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def fit(
    ensemble: Ensemble,
    loss_of: Callable[[Ensemble], Tensor],
    error_of: Callable[[Ensemble], float],
    options: TrainOptions,
    progress: Progress | None = None,
    only: tuple[str, ...] = ("",),
) -> tuple[Ensemble, Curves]:
    """The ensemble with the weights that had the least error on the way; and the way.

    `progress` is called at each of `options.steps`, also for those that were not needed. Weights
    whose names begin otherwise than `only` stay as they are.
    """
    weights: State = {
        name: weight.detach().clone().requires_grad_(name.startswith(only))
        for name, weight in ensemble.weights.items()
    }
    learner = ensemble.with_weights(weights)
    optimizer = torch.optim.AdamW(
        [weight for weight in weights.values() if weight.requires_grad],
        lr=options.learning_rate,
        weight_decay=options.weight_decay,
    )
    best, best_error, since_best = ensemble, math.inf, 0
    checks: list[tuple[int, float, float]] = []
    started = time.monotonic()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * _pace(step / options.steps)
        optimizer.zero_grad()
        loss = loss_of(learner)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if progress is not None:
            progress()
        if (step + 1) % options.check_every and step + 1 < options.steps:
            continue
        with torch.no_grad():
            error = error_of(learner)
        checks.append((step + 1, loss.item(), error))
        since_best += 1
        if error < best_error:
            best_error, since_best = error, 0
            best = ensemble.with_weights({n: w.detach().clone() for n, w in weights.items()})
        if since_best >= options.patience:
            break
    for _ in range(step + 1, options.steps):
        if progress is not None:
            progress()
    steps, losses, errors = zip(*checks, strict=True)
    return best, Curves(steps, losses, errors, time.monotonic() - started)


def member_shares(count: int, members: int, seed: int) -> Tensor:
    """How much each example counts for each member [members, count], on average 1.

    Another mixture for each (a Bayesian bootstrap), so that they differ where data are few.
    """
    rng = torch.Generator().manual_seed(seed)
    shares = torch.empty(members, count).exponential_(generator=rng).clamp_max(4.0)
    return shares / shares.mean(1, keepdim=True)


def relative_loss(predicted: Tensor, known: Tensor, shares: Tensor) -> Tensor:
    """Loss of log costs [members, n, 2] against [n, 2], each counted `shares` [members, n] times.

    Relative errors of forward, backward and, twice as much, of their sum; large ones count
    linearly, for some measurements are off.
    """
    parts = predicted - known
    total = predicted.logsumexp(-1) - known.logsumexp(-1)
    errors = torch.cat([parts, 2 * total[..., None]], dim=-1)
    nothing = torch.zeros_like(errors)
    losses = functional.huber_loss(errors, nothing, reduction="none", delta=0.1).sum(-1)
    return (losses * shares).mean(1).sum()


def relative_error(predicted: Tensor, known: Tensor) -> float:
    """Mean relative error of the ensemble's total; the mean, for a median feels no outlier."""
    total = predicted.mean(0).logsumexp(-1)
    return float((total - known.logsumexp(-1)).abs().mean())


def _pace(done: float) -> float:
    """Of the learning rate: a short warm-up, then down along a cosine."""
    return min(done / 0.03 + 0.01, 1.0) * 0.5 * (1 + math.cos(math.pi * done))
