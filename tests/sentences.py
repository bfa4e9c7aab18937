"""Failures assert the whole sentence."""

from __future__ import annotations

import re
from typing import Any

import pytest


def says(kind: type[BaseException], sentence: str) -> Any:
    """A block that raises this very kind of error with this very sentence."""
    return pytest.raises(kind, match=f"^{re.escape(sentence)}$", check=lambda error: type(error) is kind)
