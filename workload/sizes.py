"""Bytes as people read them."""

_UNITS = (("GiB", 2**30), ("MiB", 2**20))


def told(size: float) -> str:
    """`12 bytes`, `3.5 MiB`, `1,024.000 GiB`: of memory, which is said in powers of two."""
    for unit, each in _UNITS:
        if abs(size) >= each:
            return f"{size / each:,.3f} {unit}"
    return f"{size:,.0f} bytes"
