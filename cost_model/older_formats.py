"""Brings cost models that earlier versions wrote to the present format, when they are loaded."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autoshard.benchmark import ReferenceLevel
from autoshard.benchmark.measurement import method_of
from autoshard.cost_model import network
from autoshard.cost_model.link_fit import fit_terms, flow_ms, links_of_fits
from autoshard.workload import Link, UserError

_INPUT_WEIGHTS, _PRICES = "compute.table.curved.0.weight", "compute.table.log_prices"
_COMMUNICATION = "communication."  # prefix of the weights of the network for all-to-alls
_IMBALANCES = (1.0, 1.5, 2.0, 3.0)  # columns of the first rank over those of each other


def updated(
    document: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the description and the tensors of a model in the present format.

    Inputs that no version had are left as they are.

    Args:
        document: Description of the model, as in `model.json`.
        tensors: Weights and scale of the model, as in `model.safetensors`.
    """
    inputs = document["inputs"]
    if inputs == [n for n in network.INPUTS if n in inputs or n not in network.LATER_INPUTS]:
        tensors, inputs = _with_later_inputs(inputs, tensors), [*network.INPUTS]
    return {
        **document,
        "inputs": inputs,
        "factors": document.get("factors", {}),  # by default those of `ResidualPrior`
        "trained_on": _with_level(document["trained_on"]),
        "machines": document.get("machines"),
        "links": document["links"] if "links" in document else _links(document, tensors),
    }, dict(tensors)


def _with_later_inputs(seen: list[str], tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns the tensors of a model that may lack some of `LATER_INPUTS`, extended by them.

    All its tables had 0 there, so predictions do not depend on them; the uncertainty does.
    """
    if seen == [*network.INPUTS]:
        return tensors
    places = [network.INPUTS.index(name) for name in seen]
    found = dict(tensors)
    for name, tensor in tensors.items():
        by_input = name.startswith("scale.") or name == _INPUT_WEIGHTS
        if by_input and tensor.shape[-1:] == (len(seen),):  # damaged ones are reported later
            usual = tensor.new_zeros(len(network.INPUTS))
            if name == "scale.deviation":
                usual = network.MIN_DEVIATIONS
            found[name] = usual.repeat(*tensor.shape[:-1], 1)
            found[name][..., places] = tensor
    prices = tensors.get(_PRICES)
    if prices is not None:
        unpriced = torch.full_like(prices, network.MIN_LOG_PRICE)
        found[_PRICES] = torch.cat([prices, prices, unpriced], dim=-1)  # by network.KINDS
    return found


def _with_level(trained_on: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the provenance with its reference level.

    Early models had one number, in ms, for both parts of the level: only ratios to it matter.
    """
    found = {"quiet": None, **trained_on}
    level_ms = found.pop("quiet_ms", None)
    if level_ms is not None:
        level = ReferenceLevel(level_ms, level_ms, method_of(found["versions"]))
        found["quiet"] = asdict(level)
    return found


def _links(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns links by number of ranks; before 0.2.0, models had a network for all-to-alls."""
    devices = document["devices_that_communicate"]
    if devices is None:
        return {}
    layers = {
        name.removeprefix(_COMMUNICATION): weight
        for name, weight in tensors.items()
        if name.startswith(_COMMUNICATION)
    }
    try:
        links = _links_of_network(layers, tensors["communication_scale"], devices)
    except (KeyError, RuntimeError, ValueError) as error:
        raise UserError("its network for all-to-alls is damaged: train it again") from error
    return {str(ranks): link.to_json() for ranks, link in links.items()}


def _links_of_network(layers: Mapping[str, Tensor], scale: Tensor, devices: int) -> dict[int, Link]:
    """Returns links that approximate the all-to-all network of a model from before 0.2.0.

    The network predicted log milliseconds of a rank, forward and backward, from logarithms of what
    the rank and the busiest rank send and receive. Links are fitted to the slowest rank of even and
    uneven all-to-alls of as many columns as in the network's training data.

    Args:
        layers: Weights and biases of its two layers, each stacked by members.
        scale: Mean and deviation of each input, shape [2, inputs].
        devices: The largest number of ranks that had a device each.
    """
    found = {}
    # Input 4 is the logarithm of the columns of all ranks times the batch size.
    centre, width = (float(row[4]) for row in scale)
    for ranks in range(2, devices + 1):
        shares = np.array([[first] + [1.0] * (ranks - 1) for first in _IMBALANCES])
        shares /= shares.sum(1, keepdims=True)
        totals = np.exp([centre - width, centre, centre + width])
        own = (totals[:, None, None] * shares).reshape(-1, ranks)
        total, same = own.sum(1, keepdims=True), np.ones_like(own)
        sent, received = own * (ranks - 1) / ranks, (total - own) / ranks
        max_sent, max_received = (each.max(1, keepdims=True) * same for each in (sent, received))
        seen = (sent, received, max_sent, max_received, total * same, same * ranks, same)
        inputs = (torch.from_numpy(np.log1p(np.stack(seen, -1))).float() - scale[0]) / scale[1]
        hidden = torch.einsum("eri,mhi->merh", inputs, layers["layers.0.weight"])
        hidden = torch.nn.functional.silu(hidden + layers["layers.0.bias"][:, None, None])
        logs = torch.einsum("merh,moh->mero", hidden, layers["layers.2.weight"])
        times = (logs + layers["layers.2.bias"][:, None, None]).mean(0).exp().double().numpy()
        terms = np.stack([np.ones(len(own)), [flow_ms(each, 1) for each in own]], -1)
        latency_ms, slope = fit_terms(terms, times.max(1).mean(-1))
        found[ranks] = (latency_ms, slope)
    return links_of_fits(found)
