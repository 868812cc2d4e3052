"""Links between devices, and what collectives take over them.

Devices of a node are connected by one link, and nodes by another (`Network`), or all devices by one
(`Link`). Each collective of equal devices takes as long over a network as over some single link, so
everything that prices a collective asks for that link, `all_to_all` or `ring`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from autoshard.workload.errors import FieldError, UserError

_SPEED = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?)(B|bit)/s\s*")
_LATENCY = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(us|ms|s)\s*")
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_MS = 1e3
_UNITS = sorted(_PREFIXES.items(), key=lambda unit: -unit[1])
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
# All-to-alls, and what passes data around rings (reduce-scatters, all-gathers and all-reduces): of
# all devices, of the devices of a node, and of those with the same place in each node.
Collective = Literal["all_to_all", "ring", "inside", "inside_ring", "between", "between_ring"]


@dataclass(frozen=True)
class Link:
    """A network in which each device sends and receives at the same speed, whatever the other end.

    Args:
        bytes_s: Bandwidth of each device, in bytes per second and direction.
        latency_s: Start-up time of a collective, in seconds.
        ring_bytes_s: Bandwidth of what passes data around rings (all-reduce, reduce-scatter and
            all-gather; NCCL's bus bandwidth); None: as of all-to-alls.
        ring_latency_s: Start-up time of these, in seconds; None: as of all-to-alls.
    """

    bytes_s: float
    latency_s: float = 0.0
    ring_bytes_s: float | None = None
    ring_latency_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("bytes_s", "ring_bytes_s"):
            speed = getattr(self, name)
            if speed is not None and not 1 <= speed < float("inf"):
                raise FieldError(name, f"must be at least 1, got {speed}")
        for name in ("latency_s", "ring_latency_s"):
            latency = getattr(self, name)
            if latency is not None and not 0 <= latency < float("inf"):
                raise FieldError(name, f"must be at least 0, got {latency}")

    @staticmethod
    def parse(text: str) -> "Link":
        """Parses `25GB/s,30us,20GB/s,50us`: bytes or bits per second and latency, and the same of
        rings. All but the first may be missing.
        """
        parts = text.split(",")
        read = [(_seconds if n % 2 else _bytes_s)(part) for n, part in enumerate(parts)]
        if len(parts) > 4 or None in read:
            raise UserError(
                "a link is given by bandwidth, latency and, if they are other ones, those of "
                "all-reduces and reduce-scatters, such as 100Gbit/s or 25GB/s,30us or "
                f"25GB/s,30us,20GB/s,50us, got {text!r}"
            )
        return Link(*read)  # type: ignore[arg-type] # none of them is None

    @property
    def option(self) -> str:
        """The link as `parse` reads it."""
        return ",".join(
            f"{_speed(part.bytes_s)},{1e6 * part.latency_s:.0f}us" for part in self._parts
        )

    @property
    def options(self) -> dict[str, Any]:
        """The options of commands that name this link."""
        return {"link": self.option}

    def all_to_all(self, ranks: int) -> "Link":  # noqa: ARG002 - as of a network
        """Returns the link over which all-to-alls take as long: this one."""
        return self

    def ring(self, ranks: int) -> "Link":  # noqa: ARG002 - as of a network
        """Returns the link over which reduce-scatters and the like take as long."""
        bytes_s, latency_s = self.ring_bytes_s, self.ring_latency_s
        return Link(
            self.bytes_s if bytes_s is None else bytes_s,
            self.latency_s if latency_s is None else latency_s,
        )

    def with_rings(self, ring: "Link", ranks: int) -> "Link":  # noqa: ARG002 - as of a network
        """Returns the link with rings that take as long as all-to-alls over another one."""
        return replace(self, ring_bytes_s=ring.bytes_s, ring_latency_s=ring.latency_s)

    def of(self, collective: Collective, ranks: int) -> "Link":
        """Returns the link that a collective of so many devices is priced by."""
        return self.ring(ranks) if collective.endswith("ring") else self

    def block_share(self, ranks: int, blocks: int) -> float:
        """Returns what outputs of blocks of rows take, over those of whole tables as wide."""
        return self.bytes_s / self.ring(ranks).bytes_s if blocks == ranks else 1.0

    def nodes(self, ranks: int) -> int:  # noqa: ARG002 - as of a network
        """Returns the number of nodes of so many devices, as far as is known: 1."""
        return 1

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON object."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        return ", rings ".join(
            f"{part.bytes_s / 1e9:g} GB/s, {1e6 * part.latency_s:g} us" for part in self._parts
        )

    @property
    def _parts(self) -> "list[Link]":
        """The link of all-to-alls and, if it is another one, that of rings."""
        plain, rings = Link(self.bytes_s, self.latency_s), self.ring(2)
        return [plain] if rings == plain else [plain, rings]


@dataclass(frozen=True)
class Network:
    """Nodes with the same number of devices, a link inside each, and one between them.

    The devices of a node have consecutive numbers. Both links carry data at the same time, so a
    collective takes as long as the link that needs longer.

    Args:
        inside: Link between the devices of a node.
        between: Link between nodes, as a device's share: where devices of a node share a network
            card, its bandwidth divided by their number.
        devices_per_node: Devices of a node.
    """

    inside: Link
    between: Link
    devices_per_node: int

    def __post_init__(self) -> None:
        of_node = self.devices_per_node
        if not isinstance(of_node, int) or isinstance(of_node, bool) or of_node < 1:
            raise FieldError("devices_per_node", f"must be a number of at least 1, got {of_node}")

    @property
    def options(self) -> dict[str, Any]:
        """The options of commands that name both links."""
        return {
            "link": self.inside.option,
            "inter_node_link": self.between.option,
            "devices_per_node": self.devices_per_node,
        }

    def nodes(self, ranks: int) -> int:
        """Returns the number of nodes of so many devices.

        Raises:
            UserError: They do not fill whole nodes; one node may have fewer devices.
        """
        if ranks > self.devices_per_node and ranks % self.devices_per_node:
            raise UserError(
                f"{ranks} devices do not fill nodes of {self.devices_per_node}: nodes need the "
                f"same number of devices, so take {ranks - ranks % self.devices_per_node} or "
                f"{ranks + -ranks % self.devices_per_node}"
            )
        return max(1, ranks // self.devices_per_node)

    def all_to_all(self, ranks: int) -> Link:
        """Returns the link over which all-to-alls take as long, by the device that sends most.

        It sends each other device as much, of which `devices_per_node - 1` are in its node. No
        device receives for longer, over either link.
        """
        nodes = self.nodes(ranks)
        if nodes == 1:
            return self.inside
        near = self.devices_per_node - 1
        inside_s = near / self.inside.bytes_s
        between_s = (ranks - 1 - near) / self.between.bytes_s
        latency_s = self._latest(self.inside, self.between)
        return Link((ranks - 1) / max(inside_s, between_s), latency_s)

    def ring(self, ranks: int) -> Link:
        """Returns the link over which reduce-scatters, all-gathers and all-reduces take as long.

        They pass data around rings. A ring enters and leaves a node once, and there are as many
        rings as devices of a node, so that each device has its share of them between nodes.
        """
        inside, between = self.inside.ring(ranks), self.between.ring(ranks)
        if self.nodes(ranks) == 1:
            return inside
        entering = self.devices_per_node * between.bytes_s
        within = inside.bytes_s if self.devices_per_node > 1 else entering
        return Link(min(within, entering), self._latest(inside, between))

    def with_rings(self, ring: Link, ranks: int) -> "Network":
        """Returns the network in which rings of so many devices take as long as over a link.

        Of several nodes, at least as long: those inside a node stay as they are.
        """
        if self.nodes(ranks) == 1:
            return replace(self, inside=self.inside.with_rings(ring, ranks))
        share = replace(ring, bytes_s=ring.bytes_s / self.devices_per_node)
        return replace(self, between=self.between.with_rings(share, ranks))

    def of(self, collective: Collective, ranks: int) -> Link:
        """Returns the link that a collective of so many devices is priced by."""
        if collective == "all_to_all":
            return self.all_to_all(ranks)
        if collective == "ring":
            return self.ring(ranks)
        over = self.inside if collective.startswith("inside") else self.between
        return over.of(collective, ranks)

    def block_share(self, ranks: int, blocks: int) -> float:
        """Returns what outputs of blocks of rows take, over those of whole tables as wide.

        Blocks on all devices are reduced and scattered around rings. What blocks on the devices of
        one node take is no part of the exchanges of others (`node_rows_s`): 0.

        Args:
            ranks: Devices that take part.
            blocks: Blocks of the table, each on one device.
        """
        whole, node = self.all_to_all(ranks), self.devices_per_node
        if blocks == ranks:
            return whole.bytes_s / self.ring(ranks).bytes_s
        return 0.0 if blocks == node else 1.0

    def node_rows_s(self, ranks: int) -> float:
        """Returns the seconds of each byte of partial sums of blocks on the devices of a node.

        They are reduced and scattered inside, and then each device sends its share of samples to
        other nodes.
        """
        node = self.devices_per_node
        inside_s = (node - 1) / node / self.inside.ring(node).bytes_s
        return inside_s + (ranks - node) / node / ranks / self.between.bytes_s

    def _latest(self, inside: Link, between: Link) -> float:
        """Returns the start-up time of what flows over both."""
        alone = self.devices_per_node == 1
        return between.latency_s if alone else max(inside.latency_s, between.latency_s)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON object."""
        both = {"inside": self.inside.to_json(), "between": self.between.to_json()}
        return {**both, "devices_per_node": self.devices_per_node}

    def __str__(self) -> str:
        return (
            f"{self.inside} inside nodes of {self.devices_per_node} devices, "
            f"{self.between} between them"
        )


AnyLink: TypeAlias = Link | Network


def slowest_of(links: Sequence[AnyLink], ranks: int) -> AnyLink:
    """Returns the link with the slowest all-to-alls of so many devices, and the slowest rings."""
    slowest = min(links, key=lambda link: link.all_to_all(ranks).bytes_s)
    rings = min((link.ring(ranks) for link in links), key=lambda r: (r.bytes_s, -r.latency_s))
    return slowest if rings == slowest.ring(ranks) else slowest.with_rings(rings, ranks)


def _bytes_s(text: str) -> float | None:
    """Returns the bytes per second of a bandwidth such as 25GB/s; None if it is none."""
    if (found := _SPEED.fullmatch(text)) is None or not float(found[1]):
        return None
    number, prefix, unit = found.groups()
    return float(number) * _PREFIXES[prefix] / (8 if unit == "bit" else 1)


def _seconds(text: str) -> float | None:
    """Returns the seconds of a latency such as 30us; None if it is none."""
    found = _LATENCY.fullmatch(text)
    return None if found is None else float(found[1]) * _SECONDS[found[2]]


def _speed(bytes_s: float) -> str:
    """Returns a bandwidth as `_bytes_s` reads it, with three digits."""
    prefix, unit = next(u for u in _UNITS if bytes_s >= u[1] or u is _UNITS[-1])
    return f"{float(f'{bytes_s / unit:.3g}'):.10g}{prefix}B/s"


def all_reduce_ms(link: AnyLink, ranks: int, size_bytes: float, starts: int = 0) -> float:
    """Returns the milliseconds of all-reduces over a ring.

    Args:
        link: Network of the ranks.
        ranks: Number of ranks.
        size_bytes: Bytes that each rank has, all together.
        starts: Number of all-reduces whose latency counts.
    """
    over = link.ring(ranks)
    moved_s = 2 * (ranks - 1) / ranks * size_bytes / over.bytes_s
    return _MS * (moved_s + (starts * over.latency_s if ranks > 1 else 0.0))


def link_from_json(document: Mapping[str, Any]) -> AnyLink:
    """Returns the link or network that `to_json` wrote."""
    if "between" not in document:
        return Link(**document)
    inside, between = Link(**document["inside"]), Link(**document["between"])
    return Network(inside, between, document["devices_per_node"])
