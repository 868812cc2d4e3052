"""Checks that the options of a command are within bounds."""

import math
from collections.abc import Mapping
from operator import attrgetter, ge, gt

from autoshard.workload.errors import UserError

MAX_DEVICES = 2**12  # for which heuristics plan in ten seconds; for four times as many, in minutes
MAX_BATCH_SIZE = 2**31
MAX_TABLES = 2**16  # for which planning takes minutes
MAX_GB = 2**32  # more memory than any device has
# Upper bounds of options that mean the same in all commands. Products of them fit into 64 bits.
_UP_TO: Mapping[str, float] = {
    **dict.fromkeys(("num_devices", "max_devices"), MAX_DEVICES),
    **dict.fromkeys(("batch_size", "batch_per_device"), MAX_BATCH_SIZE),
    "num_tables": MAX_TABLES,
    "num_shards": 2**20,
    **dict.fromkeys(("max_moved_gb", "host_memory_gb", "max_gb"), MAX_GB),
}


def check_bounds(
    options: object,
    under: str = "",
    *,
    at_least: Mapping[str, float] | None = None,
    more_than: Mapping[str, float] | None = None,
    up_to: Mapping[str, float] | None = None,
) -> None:
    """Checks options against bounds. Options that are None are skipped.

    Args:
        options: Options of a command, or a part of them. `shape.hidden` names a nested option.
        under: Prefix of their names on the command line, such as `hyper.`.
        at_least: Inclusive lower bounds.
        more_than: Exclusive lower bounds.
        up_to: Inclusive upper bounds of options that also have a lower one. Devices, batches and
            memory have some in all commands.

    Raises:
        UserError: An option is out of bounds or not a number.
    """
    limits = [
        *((name, "at least", ge, bound) for name, bound in (at_least or {}).items()),
        *((name, "more than", gt, bound) for name, bound in (more_than or {}).items()),
    ]
    for name, words, holds, bound in limits:
        value, upper = attrgetter(name)(options), (up_to or {}).get(name)
        if value is None:
            continue
        if not (holds(value, bound) and value < math.inf and (upper is None or value <= upper)):
            must = f"be {words} {bound}" if upper is None else f"lie between {bound} and {upper}"
            raise UserError(f"--{under}{name.replace('_', '-')} must {must}, got {value}")
    for name, most in _UP_TO.items():
        value = getattr(options, name, None)
        if isinstance(value, int | float) and value > most:  # others are ranges and lists
            option = f"--{under}{name.replace('_', '-')}"
            raise UserError(f"{option} must be at most {most}, got {value}")
