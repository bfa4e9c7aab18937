"""The file that `offbeat plan --cluster` takes."""

from pathlib import Path

import typer

from offbeat.app.cli.plan_options import CLUSTER, JOB, MEASURE
from offbeat.plan import Cluster, Job, read


def read_file(path: Path | None, context: typer.Context) -> tuple[Job | None, Cluster | None]:
    """What it defines; options that say the same are refused."""
    if path is None:
        return None, None
    job, cluster = read(path, Job), read(path, Cluster)
    if job is None and cluster is None:
        raise ValueError(f"{path} defines neither a Cluster nor a Job.")
    panels = [*([CLUSTER, MEASURE] if cluster else []), *([JOB] if job else [])]
    if given := [name for name in _given(context, panels) if name != "--cluster"]:
        kinds = " and a ".join(type(value).__name__ for value in (cluster, job) if value)
        raise ValueError(f"{path} defines a {kinds}: leave out {', '.join(given)}, or change the file.")
    return job, cluster


def _given(context: typer.Context, panels: list[str]) -> list[str]:
    """The options of these panels that stand on the command line."""
    return [
        option.opts[0]
        for option in context.command.params
        if getattr(option, "rich_help_panel", None) in panels
        and getattr(context.get_parameter_source(option.name or ""), "name", "") == "COMMANDLINE"
    ]
