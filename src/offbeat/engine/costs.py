"""The reports and totals of a run."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from offbeat.comm.communicator import Metered
from offbeat.engine.report import Report, Totals

logger = logging.getLogger("offbeat")


class Costs:
    """What a run costs on this worker: the last 1 000 reports, and totals."""

    def __init__(self) -> None:
        self.reports: deque[Report] = deque(maxlen=1000)
        self.totals = Totals()

    def add(self, report: Report) -> None:
        self.reports.append(report)
        self.totals.add(report)
        logger.debug("%s", report)

    def count(self, comm: Metered) -> None:
        """Add the bytes that a communicator has carried since the last call."""
        self.totals.bytes_sent += comm.sent
        self.totals.bytes_received += comm.received
        comm.sent = comm.received = 0

    @contextmanager
    def including(self, comm: Metered) -> Iterator[None]:
        """Add the bytes and seconds of blocking messages that are sent inside."""
        start = comm.now()
        try:
            yield
        finally:
            self.count(comm)
            self.totals.seconds_waited += comm.now() - start
            self.totals.seconds_in_air += comm.now() - start
