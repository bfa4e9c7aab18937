"""Training tasks that need no download, for the command line and the benchmarks."""

from offbeat.tasks.bytes import bytes_task
from offbeat.tasks.find import find_task
from offbeat.tasks.pictures import digits_task, images_task
from offbeat.tasks.task import Batch, Batches, Task

__all__ = ["Batch", "Batches", "Task", "bytes_task", "digits_task", "find_task", "images_task"]
