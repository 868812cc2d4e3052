"""What options may be: bounds, and the one line that says which one is out of them."""

import math
from collections.abc import Mapping
from operator import attrgetter, ge, gt

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
    limits = [
        *((name, "at least", ge, least) for name, least in (at_least or {}).items()),
        *((name, "more than", gt, bound) for name, bound in (more_than or {}).items()),
    ]
    for name, words, holds, bound in limits:
        value, most = attrgetter(name)(options), (up_to or {}).get(name)
        if value is None:
            continue
        if not (holds(value, bound) and value < math.inf and (most is None or value <= most)):
            must = f"be {words} {bound}" if most is None else f"lie between {bound} and {most}"
            raise UserError(f"--{under}{name.replace('_', '-')} must {must}, got {value}")
