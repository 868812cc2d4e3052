"""Readings of a GPU by NVML."""

from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")

_NS = 1e-9
# Reasons for a lower clock that are no setting and no idling, by pynvml's names.
_LIMITS = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "heat",
    "HwThermalSlowdown": "heat (hardware)",
    "HwPowerBrakeSlowdown": "power brake",
}


class NvmlReadings:
    """Readings of the GPU with a UUID; empty where NVML is missing or not permitted."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid

    def processes(self) -> set[int]:
        """Returns the processes on the GPU, by their numbers outside of containers."""

        def ask(nvml: Any, gpu: Any) -> set[int]:
            return {each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)}

        return self._ask(ask, set())

    def state(self) -> str:
        """Returns clock, power and what limits them now: `1755 MHz, 412 W, power cap`."""

        def ask(nvml: Any, gpu: Any) -> str:
            clock_mhz = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
            watts = nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3
            ask_reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
            try:
                reasons = ask_reasons(gpu) if ask_reasons is not None else 0
            except nvml.NVMLError:  # drivers before 535 do not know the call
                reasons = 0
            limits = [
                limit
                for name, limit in _LIMITS.items()
                if reasons & getattr(nvml, f"nvmlClocksEventReason{name}")
            ]
            return ", ".join([f"{clock_mhz} MHz", f"{watts:.0f} W", *limits])

        return self._ask(ask, "")

    def limited_seconds(self) -> float:
        """Returns for how long limits of power and heat have lowered the clock since the driver
        came. Drivers of some GPUs do not count that.
        """

        def ask(nvml: Any, gpu: Any) -> float:
            policies = nvml.NVML_PERF_POLICY_POWER, nvml.NVML_PERF_POLICY_THERMAL
            found = [nvml.nvmlDeviceGetViolationStatus(gpu, policy) for policy in policies]
            return float(_NS * sum(each.violationTime for each in found))

        return self._ask(ask, 0.0)

    def is_lost(self) -> bool:
        """Returns whether the driver had the GPU and has it no longer: it fell off the bus, or
        failed.
        """
        nvml = _ready()
        if nvml is None:
            return False
        try:  # either call may find it out
            nvml.nvmlDeviceGetMemoryInfo(self._gpu(nvml))
        except nvml.NVMLError as error:
            return bool(error.value == nvml.NVML_ERROR_GPU_IS_LOST)
        return False

    def _ask(self, question: Callable[[Any, Any], Value], unknown: Value) -> Value:
        """Returns the answer of NVML on the GPU, or a default where there is none."""
        nvml = _ready()
        if nvml is None:
            return unknown
        try:
            return question(nvml, self._gpu(nvml))
        except Exception:  # whatever NVML raises
            return unknown

    def _gpu(self, nvml: Any) -> Any:
        """Returns NVML's handle of the GPU."""
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{self.uuid}")


def _ready() -> Any:
    """Returns the module pynvml, initialised; None where NVML is missing or not permitted."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # whatever NVML raises
        return None
    return pynvml
