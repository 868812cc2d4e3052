"""Trains ensembles: full-batch steps for all members at once, with early stopping."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from autoshard.cost_model.networks.ensemble import Ensemble, State
from autoshard.cost_model.networks.network import NetworkShape
from autoshard.cost_model.threads import one_thread
from autoshard.workload.bounds import check_bounds

Progress = Callable[[], None]


@dataclass(frozen=True)
class TrainOptions:
    """Hyperparameters.

    Args:
        members: Networks in the ensemble.
        steps: Maximum number of steps.
        learning_rate: Maximum, after a short warm-up; it falls along a cosine.
        weight_decay: Of AdamW.
        check_every: Steps between two evaluations on validation data.
        patience: Evaluations without improvement after which training stops.
        shape: Sizes of the networks.
    """

    members: int = 5
    steps: int = 600
    learning_rate: float = 5e-3
    weight_decay: float = 1e-2
    check_every: int = 25
    patience: int = 12
    shape: NetworkShape = field(default_factory=NetworkShape)

    def check(self) -> None:
        """Raises UserError if a value is out of bounds."""
        counts = ("members", "steps", "check_every", "patience", "shape.hidden", "shape.fusion")
        check_bounds(
            self,
            "hyper.",
            at_least={**dict.fromkeys(counts, 1), "shape.learned": 0, "weight_decay": 0},
            more_than={"learning_rate": 0},
        )


@dataclass(frozen=True)
class Curves:
    """Step, training loss and validation error (mean, relative) at each evaluation."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    errors: tuple[float, ...]
    seconds: float


@one_thread()
def fit(
    ensemble: Ensemble,
    loss_of: Callable[[Ensemble], Tensor],
    error_of: Callable[[Ensemble], float],
    options: TrainOptions,
    progress: Progress = lambda: None,
    only: tuple[str, ...] = ("",),
) -> tuple[Ensemble, Curves]:
    """Trains the ensemble; returns it with the weights of least error, and the learning curves.

    Args:
        ensemble: Initial ensemble.
        loss_of: Returns the loss of an ensemble.
        error_of: Returns the validation error of an ensemble.
        options: Hyperparameters.
        progress: Called `options.steps` times, also for steps that early stopping saves.
        only: Prefixes of the names of weights that are trained.
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
        progress()
    steps, losses, errors = zip(*checks, strict=True)
    return best, Curves(steps, losses, errors, time.monotonic() - started)


def member_shares(count: int, members: int, seed: int) -> Tensor:
    """Returns weights of examples for each member (Bayesian bootstrap), [members, count]."""
    rng = torch.Generator().manual_seed(seed)
    shares = torch.empty(members, count).exponential_(generator=rng).clamp_max(4.0)
    return shares / shares.mean(1, keepdim=True)


def relative_loss(predicted: Tensor, known: Tensor, shares: Tensor) -> Tensor:
    """Returns the loss of log costs [members, n, 2] against [n, 2], weighted by `shares`.

    Relative errors of forward, backward and, with double weight, of their sum enter a Huber loss,
    because some measurements are outliers. `shares` has shape [members, n].
    """
    parts = predicted - known
    total = predicted.logsumexp(-1) - known.logsumexp(-1)
    errors = torch.cat([parts, 2 * total[..., None]], dim=-1)
    nothing = torch.zeros_like(errors)
    losses = functional.huber_loss(errors, nothing, reduction="none", delta=0.1).sum(-1)
    return (losses * shares).mean(1).sum()


def relative_error(predicted: Tensor, known: Tensor) -> float:
    """Returns the mean relative error of the ensemble's total; a median would hide outliers."""
    total = predicted.mean(0).logsumexp(-1)
    return float((total - known.logsumexp(-1)).abs().mean())


def _pace(done: float) -> float:
    """Returns the factor of the learning rate: a short warm-up, then a cosine."""
    return min(done / 0.03 + 0.01, 1.0) * 0.5 * (1 + math.cos(math.pi * done))
