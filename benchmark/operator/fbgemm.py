"""Imports fbgemm, if torch is the version that it was built against."""

import importlib
import logging
from functools import lru_cache
from importlib import metadata
from types import ModuleType

from autoshard.benchmark.measurement import TIMING_METHOD
from autoshard.workload import UserError

# fbgemm's libraries link against one minor release of torch; any other fails inside the loader.
TORCH_OF_FBGEMM = {"1.9": "2.14", "1.8": "2.13", "1.7": "2.12", "1.6": "2.11"}
_OF_DRIVER = ("libnvidia-ml", "libcuda.so")  # libraries that come with NVIDIA's driver
_DISTRIBUTIONS = ("fbgemm-gpu-cpu", "fbgemm-gpu")


class InstallationError(UserError):
    """torch or fbgemm is missing, or their versions do not match."""


def installed_fbgemm() -> tuple[str, str]:
    """Returns distribution name and version of the installed fbgemm."""
    found = []
    for distribution in _DISTRIBUTIONS:
        try:
            found.append((distribution, metadata.version(distribution)))
        except metadata.PackageNotFoundError:
            continue
    if not found:
        raise InstallationError(
            "fbgemm is not installed: pip install 'autoshard[cpu]', or 'autoshard[gpu]' on a "
            "machine with an NVIDIA GPU"
        )
    if len(found) > 1:
        raise InstallationError(
            "fbgemm-gpu-cpu and fbgemm-gpu are both installed and overwrite each other: uninstall "
            "both, then install one"
        )
    return found[0]


def check_pair() -> tuple[str, str]:
    """Returns the versions of torch and fbgemm; InstallationError if they do not match."""
    distribution, fbgemm = installed_fbgemm()
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise InstallationError("torch is not installed: pip install torch==2.13.0") from None
    wanted = TORCH_OF_FBGEMM.get(".".join(fbgemm.split(".")[:2]))
    if wanted is None or not torch.startswith(f"{wanted}."):
        raise InstallationError(
            f"torch {torch} and {distribution} {fbgemm} do not belong together: install "
            f"torch {wanted or '2.13'}.* with {distribution} {fbgemm if wanted else '1.8.0'}"
        )
    return torch, fbgemm


@lru_cache(maxsize=1)
def training_ops() -> ModuleType:
    """Returns fbgemm's module with SplitTableBatchedEmbeddingBagsCodegen."""
    torch, fbgemm = check_pair()
    logged = logging.root.manager.disable
    logging.disable()  # fbgemm logs the errors that it raises
    try:
        return importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    except (ImportError, OSError, RuntimeError) as error:
        reason = _first_cause(error)
        if any(library in reason for library in _OF_DRIVER):
            raise InstallationError(
                f"{installed_fbgemm()[0]} {fbgemm} needs NVIDIA's driver, which is not installed "
                f"here ({reason}): install it, or fbgemm's CPU build with EXTRA=cpu"
            ) from error
        raise InstallationError(
            f"fbgemm {fbgemm} cannot be loaded with torch {torch} ({reason}): install both again "
            "from the same index, both for the CPU or both for CUDA"
        ) from error
    finally:
        logging.disable(logged)


def _first_cause(error: BaseException) -> str:
    """Returns in one line what the loader said: torch says only which library it was about."""
    while cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = cause
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def library_versions() -> str:
    """Returns library versions and timing method: costs are comparable where they are equal."""
    torch, fbgemm = check_pair()
    return f"torch {torch}, {installed_fbgemm()[0]} {fbgemm}, timing {TIMING_METHOD}"
