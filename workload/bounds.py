"""What options may be: bounds, and the one line that says which one is out of them."""

import math
from collections.abc import Mapping
from operator import attrgetter

from autoshard.workload.errors import UserError


def check_bounds(
    options: object,
    under: str = "",
    *,
    at_least: Mapping[str, float] | None = None,
    more_than: Mapping[str, float] | None = None,
    up_to: Mapping[str, float] | None = None,
) -> None:
    """UserError names the option that is out of its bounds, or no number; None is not given.

    Args:
        options: a command's, or a part of them; `shape.hidden` is that of its part `shape`.
        under: what comes before their names on a command line: `hyper.`.
        at_least: the least that each may be.
        more_than: what each must be above.
        up_to: the most that each of these may be, which have a least one as well.
    """
    most = dict(up_to or {})
    for name, least in (at_least or {}).items():
        if (value := attrgetter(name)(options)) is not None and not (
            least <= value <= most.get(name, math.inf) and value < math.inf
        ):
            raise _out_of_bounds(under, name, value, "at least", least, most.get(name))
    for name, bound in (more_than or {}).items():
        if (value := attrgetter(name)(options)) is not None and not (
            bound < value <= most.get(name, math.inf) and value < math.inf
        ):
            raise _out_of_bounds(under, name, value, "more than", bound, most.get(name))


def _out_of_bounds(
    under: str, name: str, value: float, least: str, bound: float, most: float | None
) -> UserError:
    words = f"be {least} {bound}" if most is None else f"lie between {bound} and {most}"
    return UserError(f"--{under}{name.replace('_', '-')} must {words}, got {value}")
