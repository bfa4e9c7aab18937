"""Training tasks that need no download, for the command line and the benchmarks."""

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from offbeat.base.errors import suggest
from offbeat.tasks.bytes import bytes_task
from offbeat.tasks.loader import LoaderBatches
from offbeat.tasks.pictures import digits_task, images_task
from offbeat.tasks.task import Batch, Batches, Task, shard

__all__ = ["Batch", "Batches", "LoaderBatches", "Task", "bytes_task", "digits_task", "find_task"]
__all__ += ["images_task", "shard"]
TASKS: dict[str, Callable[..., Task]] = {"bytes": bytes_task, "digits": digits_task, "images": images_task}


def find_task(name: str, **given: Any) -> Task:
    """The task of this name, or the one that the function `task` in a Python file returns.

    `given` holds arguments of the task, such as size, data or seed. None stands for the task's default. An
    argument that the task does not take is an error, except `seed` and `cache`, which are then left out.
    Your own file says `def task(size="small", seed=0): return Task(...)`; `path/to/file.py:other` calls the
    function `other` instead.

        find_task("digits", size="tiny", seed=1)
    """
    build = TASKS[name] if name in TASKS else _load_function(name)
    accepted = inspect.signature(build).parameters
    wanted = {key: value for key, value in given.items() if value is not None}
    for key in wanted:
        if key not in accepted and key not in ("seed", "cache"):
            takes = ", ".join(accepted) or "none"
            raise ValueError(f"The task {name!r} has no argument {key!r}: it takes {takes}.")
    for key, parameter in accepted.items():
        if parameter.default is parameter.empty and key not in wanted:
            raise ValueError(f"The task {name!r} needs {key!r}.")
    arguments = {key: value for key, value in wanted.items() if key in accepted}
    if name in TASKS:
        return build(**arguments)
    task = _run(name, lambda: build(**arguments))
    if not isinstance(task, Task):
        raise ValueError(f"The function of the task {name!r} must return a Task, not {type(task).__name__}.")
    return replace(task, name=Path(name).stem) if task.name == "task" else task


def _load_function(name: str) -> Callable[..., Task]:
    """The function in `path/to/file.py`, or in `path/to/file.py:function`."""
    file, _, function = name.partition(":")
    if not file.endswith(".py"):
        known = f"one of {', '.join(sorted(TASKS))}, or a Python file with a function `task`."
        raise ValueError(f"There is no task {name!r}{suggest(name, TASKS)}: name {known}")
    if not os.path.isfile(file):
        raise ValueError(f"The task file {file!r} does not exist.")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    assert loader is not None
    sys.modules.setdefault(spec.name, module)  # dataclasses and pickle look for it here
    _run(file, lambda: loader.exec_module(module))
    build = getattr(module, function or "task", None)
    if not callable(build):
        raise ValueError(f"{file!r} has no function {function or 'task'!r} that returns a Task.")
    return build  # type: ignore[no-any-return]


def _run(file: str, call: Callable[[], Any]) -> Any:
    """Run the user's code. Whatever it raises becomes one sentence."""
    try:
        return call()
    except Exception as error:
        frames, path = traceback.extract_tb(error.__traceback__), os.path.abspath(file.partition(":")[0])
        lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == path]
        where = f"line {lines[-1]}: " if lines else ""
        raise ValueError(f"{file!r} cannot be used: {where}{type(error).__name__}: {error}.") from error
