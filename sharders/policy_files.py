"""Policies in folders: weights as safetensors, everything else as JSON. Nothing is ever unpickled.

Policies that are shipped lie in `pretrained/`; they are loaded by name.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from autoshard.cost_model.network import TERMS
from autoshard.sharders.policy_network import PolicyNetwork, PolicyShape
from autoshard.workload import UserError, documents

# 1: of games without halvings; 2: parts of devices came in another order
POLICY_SCHEMA = documents.Schema("autoshard.policy", 3)
PRETRAINED = Path(__file__).parent / "pretrained"
SHIPPED = Path("cpu")  # the policy and the cost model that are used unless others are named
COST_MODEL = "cost_model"  # the folder, in the policy's own, of the cost model that it goes with
_WEIGHTS, _DOCUMENT = "policy.safetensors", "policy.json"


class PolicyError(UserError):
    """A folder that holds no policy, or a policy that cannot serve."""


@dataclass(frozen=True)
class Policy:
    """A trained network, the most devices it serves, and how it was trained (for people)."""

    network: PolicyNetwork
    max_devices: int
    trained: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def untrained(max_devices: int = 2**20) -> "Policy":
        """The greedy from which training starts."""
        return Policy(PolicyNetwork(PolicyShape()).as_greedy(), max_devices)

    def check(self, devices: int) -> None:
        """PolicyError unless it serves so many devices."""
        if devices > self.max_devices:
            raise PolicyError(
                f"the policy serves up to {self.max_devices} devices, {devices} are asked for: "
                f"train one with ppo_shard.py --max-devices {devices}, or use a sharder that needs "
                "none, such as cost_fused"
            )


def save_policy(policy: Policy, folder: Path | str) -> None:
    """Write the policy into a folder, each file whole or not at all."""
    where = Path(folder)
    weights = {name: w.detach().contiguous() for name, w in policy.network.state_dict().items()}
    body = {
        "shape": asdict(policy.network.shape),
        "max_devices": policy.max_devices,
        "terms": [*TERMS],
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
    """Read a policy from its folder, or a shipped one by its name, such as `cpu`."""
    where = find_policy(policy)
    with documents.naming(where / _DOCUMENT):
        document = documents.read(where / _DOCUMENT)
        POLICY_SCHEMA.check(document)
        with documents.fields_of("policy"):
            if document["terms"] != [*TERMS]:
                raise PolicyError("it looks at other features than this autoshard: train it again")
            network = PolicyNetwork(PolicyShape(**document["shape"]))
            _fill(network, where / _WEIGHTS)
            return Policy(network.eval(), int(document["max_devices"]), document["trained"])


def find_policy(policy: Path | str) -> Path:
    """The folder of a policy, or of a shipped one of that name; PolicyError if there is none."""
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


def _fill(network: PolicyNetwork, path: Path) -> None:
    try:
        network.load_state_dict(load(path.read_bytes()))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:120]
        raise PolicyError(f"{_WEIGHTS} beside it is missing or damaged ({reason})") from error
