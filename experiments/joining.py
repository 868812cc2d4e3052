"""Joining the Ray cluster that is there, or starting one on this machine."""

import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from workload import UserError

_ANSWER_SECONDS = 5.0


@contextmanager
def ray_cluster(must_run: bool = False) -> Iterator[None]:
    """A connection to Ray: RAY_ADDRESS, else a cluster running here, else one of our own.

    `must_run`: UserError rather than a cluster of our own.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    if ray.is_initialized():  # whoever runs us has joined already, and stays joined
        yield
        return
    address = os.environ.get("RAY_ADDRESS", "")
    _check_reachable(address)
    try:
        ray.init(
            "auto" if must_run and not address else None,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    except (ConnectionError, ValueError) as error:
        where = f"RAY_ADDRESS={address}" if address else "this machine"
        reason = str(error).splitlines()[0]
        raise UserError(f"no Ray cluster can be joined at {where}: {reason}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """UserError if nothing answers at HOST:PORT, which Ray would try for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"no Ray cluster answers at RAY_ADDRESS={address} ({error.strerror or error}): start "
            "it, or unset RAY_ADDRESS to use this machine"
        ) from error
