"""A figure of `make bench`: what it is, what it should be, what it is here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One line of the report."""

    name: str
    goal: str
    value: float
    unit: str = ""
