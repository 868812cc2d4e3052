"""Ports for servers that tests start."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """A port that nobody listens on now and that no outgoing connection is given meanwhile.

    A server may be started long after it has been given its port: so the port lies above those that
    Ray takes for workers (up to 19999) and below those that Linux gives to outgoing connections.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", port))
            return port
