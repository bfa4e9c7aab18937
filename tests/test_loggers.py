"""The lines of the page about loggers, run as they stand there. What they wrote is read back."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat

PAGE = (Path(__file__).parent.parent / "docs/frameworks.md").read_text()


def train(logger: str, **names: Any) -> dict[str, float]:
    """Run with a logger connected by its line. Return the metrics in the end."""
    (line,) = re.findall(rf"^\| {re.escape(logger)} \| `(.*)` \|$", PAGE, re.MULTILINE)
    model = nn.Linear(3, 1)
    sync = offbeat.local_sgd(
        model, torch.optim.SGD(model.parameters(), lr=0.1), every=2, group=offbeat.Solo()
    )
    exec(line, {"sync": sync, **names})
    for _ in range(6):
        model(torch.ones(2, 3)).sum().backward()
        sync.step()
    assert sync.reports
    return sync.metrics()


EXACT = ("offbeat/bytes_sent_total", "offbeat/round", "offbeat/period", "offbeat/workers", "offbeat/drift")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        metrics = train("TensorBoard", writer=writer)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == set(metrics)
    assert [event.step for event in events.Scalars("offbeat/round")] == [2, 4, 6]
    assert {name: events.Scalars(name)[-1].value for name in EXACT} == {name: metrics[name] for name in EXACT}


def records(file: Path) -> Iterator[bytes]:
    """The records of a W&B file: after 7 bytes, pieces with a checksum, a length and a kind, none of which
    crosses 32 KiB."""
    whole, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(whole):
        room = 2**15 - at % 2**15
        if room < 7:
            at += room  # no head fits into the rest of a block
            continue
        _, length, kind = struct.unpack_from("<IHB", whole, at)
        record += whole[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    with wandb.init(mode="offline", dir=tmp_path, project="offbeat") as run:
        metrics = train("W&B", run=run)
    wandb.teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in map(Record.FromString, records(file))
        if record.HasField("history")
    ]
    assert [row["_step"] for row in rows] == [2, 4, 6]
    assert {name: rows[-1][name] for name in EXACT} == {name: metrics[name] for name in EXACT}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    store = (tmp_path / "runs").as_uri()
    mlflow.set_tracking_uri(store)
    with mlflow.start_run() as run:
        metrics = train("MLflow", mlflow=mlflow)
    client = mlflow.MlflowClient(store)
    assert [entry.step for entry in client.get_metric_history(run.info.run_id, "offbeat/round")] == [2, 4, 6]
    logged = client.get_run(run.info.run_id).data.metrics
    assert {name: logged[name] for name in EXACT} == {name: metrics[name] for name in EXACT}
