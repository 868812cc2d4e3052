"""Formats sizes of memory for reports and messages."""

_UNITS = (("GiB", 2**30), ("MiB", 2**20))


def format_bytes(size: float) -> str:
    """Returns `12 bytes`, `3.5 MiB` or `1,024.000 GiB`, in powers of two."""
    for unit, factor in _UNITS:
        if abs(size) >= factor:
            return f"{size / factor:,.3f} {unit}"
    return f"{size:,.0f} bytes"
