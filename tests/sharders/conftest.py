"""What tests of sharders share."""

from dataclasses import replace

import pytest
import torch

from autoshard.sharders import Policy
from autoshard.sharders.policy.network import PolicyNetwork, PolicyShape


@pytest.fixture(scope="session")
def policy() -> Policy:
    """One that is not only the greedy: its scores are as after much training."""
    network = PolicyNetwork(replace(PolicyShape(), sharpness=30.0))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for weight in network.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return Policy(network, max_devices=16, trained={"tables": "made up"})
