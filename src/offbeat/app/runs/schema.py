"""The shape of what a run writes. Whatever is read from a folder is checked against it."""

from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AliasChoices, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from offbeat.app.runs.setting import MOST

LARGEST = 10**6  # bytes of a setting or an origin
Entry = dict[str, Any]

_LOOSE = ConfigDict(extra="allow", strict=True)
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Exposed = Annotated[_Seconds, Field(validation_alias=AliasChoices("exposed", "waited"))]  # older logs


@with_config(_LOOSE)
class Steps(TypedDict):
    kind: Literal["steps"]
    step: _Count
    t: _Seconds
    seconds: _Seconds
    exposed: _Exposed
    loss: float
    units: _Count


@with_config(_LOOSE)
class Round(TypedDict):
    kind: Literal["round"]
    step: _Count
    t: _Seconds
    begun_after: _Count
    began: _Seconds
    exposed: _Exposed
    air: _Seconds
    sent: _Count
    drift: float | None
    period: _Count


@with_config(_LOOSE)
class Eval(TypedDict):
    kind: Literal["eval"]
    step: _Count
    t: _Seconds
    units: _Count
    sent: _Count
    loss: float
    accuracy: NotRequired[float]


@with_config(_LOOSE)
class End(TypedDict):
    kind: Literal["end"]
    step: _Count
    t: _Seconds
    rounds: _Count
    sent: _Count
    exposed: _Exposed
    air: _Seconds
    kernel_sent: NotRequired[_Count]
    sent_in_all: NotRequired[_Count]


@with_config(_LOOSE)
class Life(TypedDict):
    """A worker that may come and go begins or ends."""

    kind: Literal["life"]
    step: _Count
    t: _Seconds
    alive: bool


@with_config(ConfigDict(extra="forbid", strict=True))
class SettingFile(TypedDict):
    """The fields of `Setting`."""

    method: str
    task: NotRequired[str]
    model: NotRequired[str | None]
    data: NotRequired[str | None]
    workers: Annotated[int, Field(ge=1, le=MOST["workers"])]
    steps: Annotated[int, Field(ge=1, le=MOST["steps"])]
    batch: NotRequired[Annotated[int, Field(ge=1, le=MOST["batch"])] | None]
    lr: NotRequired[Annotated[float, Field(gt=0, allow_inf_nan=False)] | None]
    optimizer: NotRequired[str | None]
    seed: NotRequired[int]
    evaluations: NotRequired[Annotated[int, Field(ge=1, le=MOST["evaluations"])]]
    checkpoint_every: NotRequired[Annotated[int, Field(ge=1, le=MOST["checkpoint_every"])] | None]
    link: NotRequired[str | None]
    straggler: NotRequired[list[str]]
    where: NotRequired[Literal["processes", "netns", "simulation"]]
    compute: NotRequired[_Seconds]


@with_config(_LOOSE)
class OriginFile(TypedDict):
    command: list[str]
    unit: str
    parameters: NotRequired[_Count]


ENTRY: TypeAdapter[Any] = TypeAdapter(
    Annotated[Steps | Round | Eval | End | Life, Field(discriminator="kind")]
)
SETTING_FILE: TypeAdapter[Any] = TypeAdapter(SettingFile)
ORIGIN_FILE: TypeAdapter[Any] = TypeAdapter(OriginFile)


def read_entry(line: bytes) -> Entry | None:
    """The entry in a line of a log; None if a kill has torn it or something else has written it."""
    try:
        return dict(ENTRY.validate_json(line)) if line.endswith(b"\n") else None
    except ValidationError:
        return None


def read_json(path: Path, shape: TypeAdapter[Any]) -> dict[str, Any]:
    """What a file holds, if it has this shape. A ValueError names the file and what is wrong."""
    if not path.is_file():  # a pipe would never end
        raise ValueError(f"{str(path)!r} does not describe a run (it is missing, or not a file).")
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{str(path)!r} does not describe a run (it has more than {LARGEST} bytes).")
    try:
        return dict(shape.validate_json(path.read_bytes()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = f"{'.'.join(map(str, first['loc']))}: " if first["loc"] else ""
        raise ValueError(f"{str(path)!r} does not describe a run ({where}{first['msg']}).") from error
