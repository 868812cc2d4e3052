"""Kinds of devices: each is a `DeviceBackend` in its own module, loaded when it is used."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, get_args

from autoshard.benchmark.machine.hardware import cpu_fingerprint, threads_of
from autoshard.workload import UserError

if TYPE_CHECKING:
    from autoshard.benchmark.backends.base import DeviceBackend, Node

# auto: the first of _ACCELERATORS that the cluster has, else cpu
RequestedKind = Literal["auto", "cpu", "cuda"]
KINDS: tuple[str, ...] = get_args(RequestedKind)
_ACCELERATORS = ("cuda",)


def backend_of(kind: str) -> "DeviceBackend":
    """Returns a new backend of this kind."""
    from autoshard.benchmark.backends.cpu import CpuBackend
    from autoshard.benchmark.backends.cuda import CudaBackend

    backends: dict[str, type[DeviceBackend]] = {"cpu": CpuBackend, "cuda": CudaBackend}
    return backends[kind]()


def backend_of_hardware(hardware: str) -> "DeviceBackend":
    """Returns a new backend of devices with this fingerprint."""
    from autoshard.benchmark.backends.cpu import CpuBackend

    kind = hardware.partition(":")[0]
    if kind not in KINDS:
        raise UserError(f"hardware {hardware!r} is no fingerprint, as a probe or doctor.py prints")
    return CpuBackend(threads_of(hardware)) if kind == CpuBackend.kind else backend_of(kind)


def requested_backend(kind: str) -> "DeviceBackend | None":
    """Returns the backend of one of `KINDS`; None for "auto"."""
    return backend_of(kind) if kind != "auto" else None


def best_backend(nodes: "Iterable[Node]") -> "DeviceBackend":
    """Returns the backend that "auto" means on these nodes."""
    nodes = list(nodes)
    accelerators = map(backend_of, _ACCELERATORS)
    return next((each for each in accelerators if each.is_on(nodes)), backend_of("cpu"))


def fingerprint_here(like: str) -> str:
    """Returns the fingerprint of this machine's device of the kind of `like`, else of its CPU."""
    kind = like.partition(":")[0]
    if kind in _ACCELERATORS and (found := backend_of(kind)).is_here():
        return found.fingerprint()
    return cpu_fingerprint()
