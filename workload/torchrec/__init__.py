"""TorchRec, both ways: a model's tables come in, a plan to train by goes out.

Hands out `to_torchrec` (our plan as one for `DistributedModelParallel(plan=)`) and `from_torchrec`
(a running plan as ours). This is the one door to torchrec: it is imported when one of them is
asked for, and without it one line says what to install.
"""

import importlib
from typing import TYPE_CHECKING, Any

from autoshard.workload.errors import UserError

if TYPE_CHECKING:
    from autoshard.workload.torchrec.plans import from_torchrec, to_torchrec

__all__ = ["from_torchrec", "to_torchrec"]

_ROOMS = {"to_torchrec": "plans", "from_torchrec": "plans"}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        room = importlib.import_module(f"{__name__}.{_ROOMS[name]}")
    except (ImportError, OSError) as error:  # OSError: a library that is there and cannot be loaded
        reason = str(error).splitlines()[0][:160]
        raise UserError(
            f"TorchRec cannot be imported ({reason}): make setup TORCHREC=1 installs it"
        ) from error
    return getattr(room, name)
