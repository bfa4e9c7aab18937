"""Train one PyTorch model on many workers that rarely communicate."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from offbeat.names import *  # noqa: F403
    from offbeat.names import __all__ as __all__

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import all names once one of them is used, so that `offbeat --version` need not wait for torch."""
    if name != "__all__" and name.startswith("__"):
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    names = _import_module("offbeat.names")
    public = getattr(names, "__all__", [])  # nothing while it is being imported
    globals().update({public_name: getattr(names, public_name) for public_name in public})
    if name in public or name == "__all__":
        return getattr(names, name)
    raise AttributeError(f"module 'offbeat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *getattr(_import_module("offbeat.names"), "__all__", [])]
