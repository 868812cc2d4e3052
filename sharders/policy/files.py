"""Loads and saves policies: folders with weights as safetensors and everything else as JSON.

Shipped policies lie in `pretrained/` and are loaded by name. Nothing is unpickled.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from autoshard.cost_model.networks.network import TERMS
from autoshard.envs.options import OPTION_KINDS
from autoshard.sharders.policy.network import PolicyNetwork, PolicyShape
from autoshard.workload import UserError, documents

POLICY_SCHEMA = documents.Schema("autoshard.policy", 4)
PRETRAINED = Path(__file__).parents[1] / "pretrained"
SHIPPED = Path("cpu")  # default policy and cost model
COST_MODEL = "cost_model"  # in the policy's folder, the folder of its cost model
_WEIGHTS, _DOCUMENT = "policy.safetensors", "policy.json"


class PolicyError(UserError):
    """A folder without a policy, or a policy that cannot be used."""


@dataclass(frozen=True)
class Policy:
    """A trained policy.

    Args:
        network: Policy network.
        max_devices: Maximum number of devices of a task.
        trained: Description of its training, for people.
    """

    network: PolicyNetwork
    max_devices: int
    trained: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def untrained(max_devices: int = 2**20) -> "Policy":
        """Returns the greedy policy from which training starts."""
        return Policy(PolicyNetwork(PolicyShape()).as_greedy(), max_devices)

    def check(self, devices: int) -> None:
        """Raises PolicyError if it does not serve so many devices."""
        if devices > self.max_devices:
            raise PolicyError(
                f"the policy serves up to {self.max_devices} devices, {devices} are requested: "
                f"train one with ppo_shard.py --max-devices {devices}, or use a sharder that needs "
                "none, such as cost_fused"
            )


def save_policy(policy: Policy, folder: Path | str) -> None:
    """Writes the policy into a folder, each file atomically."""
    where = Path(folder)
    weights = {name: w.detach().contiguous() for name, w in policy.network.state_dict().items()}
    body = {
        "shape": asdict(policy.network.shape),
        "max_devices": policy.max_devices,
        "terms": [*TERMS],
        "options": [*OPTION_KINDS],
        "trained": dict(policy.trained),
    }
    try:
        where.mkdir(parents=True, exist_ok=True)
        partial = where / f".{_WEIGHTS}.partial"
        partial.write_bytes(save(weights))
        partial.replace(where / _WEIGHTS)
    except OSError as error:
        raise PolicyError(f"{where}: cannot be written: {error.strerror}") from error
    documents.write(where / _DOCUMENT, POLICY_SCHEMA.stamp(body))


def load_policy(policy: Path | str) -> Policy:
    """Reads a policy from its folder, or a shipped one by its name, such as `cpu`."""
    where = find_policy(policy)
    with documents.naming(where / _DOCUMENT):
        document = documents.read(where / _DOCUMENT)
        POLICY_SCHEMA.check(document)
        with documents.fields_of("policy"):
            known = document["terms"], document["options"]
            if known != ([*TERMS], [*OPTION_KINDS]):
                raise PolicyError("its features differ from those of this version: train it again")
            with torch.random.fork_rng(devices=[]):  # its first weights are drawn, and replaced
                network = PolicyNetwork(PolicyShape.from_json(document["shape"]))
            try:
                network.load_state_dict(load((where / _WEIGHTS).read_bytes()))
            except (OSError, SafetensorError, RuntimeError) as error:
                reason = str(error).splitlines()[0][:120]
                raise PolicyError(
                    f"{_WEIGHTS} beside it is missing or damaged ({reason})"
                ) from error
            return Policy(network.eval(), int(document["max_devices"]), document["trained"])


def find_policy(policy: Path | str) -> Path:
    """Returns the folder of a policy, or of the shipped policy of that name.

    Raises:
        PolicyError: There is none.
    """
    where = Path(policy)
    shipped_one = PRETRAINED / where.name
    if not (where / _DOCUMENT).is_file() and where.name == str(policy) and shipped_one.is_dir():
        where = shipped_one
    if not (where / _DOCUMENT).is_file():
        shipped = ", ".join(sorted(path.name for path in PRETRAINED.glob("*") if path.is_dir()))
        raise PolicyError(
            f"{where}: holds no policy: ppo_shard.py --out makes one, and these are shipped: "
            f"{shipped}"
        )
    return where


def cost_model_beside(policy: Path | str) -> Path:
    """Returns the folder of the cost model that a policy was trained with; else the shipped one."""
    folder = find_policy(policy) / COST_MODEL
    return folder if folder.is_dir() else SHIPPED
