"""Failures assert the whole sentence."""

from __future__ import annotations

import re
from typing import Any

import pytest

from offbeat.base.errors import BadArgument


def says(kind: type[BaseException], sentence: str) -> Any:
    """A block that raises this very kind of error with this very sentence; a BadArgument is a ValueError."""
    kinds = {kind, BadArgument} if kind is ValueError else {kind}
    return pytest.raises(kind, match=f"^{re.escape(sentence)}$", check=lambda error: type(error) in kinds)
