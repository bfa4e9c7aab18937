"""When the next round begins: schedules."""

from offbeat.when.measured import Budget, Seconds
from offbeat.when.schedule import LATER, QSR, AdaComm, Adaptive, Every, Never, Schedule, Then, schedule

__all__ = ["LATER", "QSR", "AdaComm", "Adaptive", "Budget", "Every", "Never", "Schedule", "Seconds", "Then"]
__all__ += ["schedule"]
