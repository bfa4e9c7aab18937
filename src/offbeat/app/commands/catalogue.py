"""What the pages say about each method. `scripts/catalogue` writes it."""

import json
from importlib.resources import files
from typing import Any


def read_catalogue() -> dict[str, Any]:
    """What the pages say about each method, by family, and the losses that were measured."""
    return dict(json.loads((files("offbeat.app.commands") / "methods.json").read_text()))
