"""x"""


class DeviceBusy(Exception):  # noqa: N818 - a state of affairs, not an error
    """Another pool on this machine is measuring on the same core."""
