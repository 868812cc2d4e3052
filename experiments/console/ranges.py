"""Ranges on the command line: `60`, `20-100`, `0.1-0.9`."""

from collections.abc import Callable
from typing import TypeVar

from autoshard.workload import UserError

Number = TypeVar("Number", int, float)


def read_range(text: str, option: str, number: Callable[[str], Number]) -> tuple[Number, Number]:
    """The least and the most; UserError names the option."""
    first, dash, last = text.partition("-")
    try:
        low = number(first)
        return low, number(last) if dash else low
    except ValueError as error:
        kind = "whole number" if number is int else "number"
        raise UserError(f"{option}: a {kind} or a range such as 2-8, got {text!r}") from error
