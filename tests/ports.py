"""Ports for process groups of the tests."""

import random
import socket


def free_port() -> int:
    """A port below those that the system gives to connections: none of them can take it in the meantime."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
