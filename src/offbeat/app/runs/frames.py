"""Where an error comes from: the frames of the user's own code."""

import errno
import os
import sysconfig
import traceback
from pathlib import Path

import torch

import offbeat

FULL = (errno.ENOSPC, errno.EDQUOT)  # numbers of errors
_OTHERS = {
    str(Path(offbeat.__file__).parent), str(Path(torch.__file__).parent.parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
}  # fmt: skip


def own_frames(error: BaseException) -> str:
    """The part of the traceback that is in files of the user: neither in Offbeat nor in a library."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.isfile(frame.filename) and not _is_of_others(os.path.abspath(frame.filename))
    ]
    return "".join(traceback.format_list(frames)).rstrip()


def describe(error: BaseException) -> str:
    """The last line of a traceback, such as `ValueError: boom`; a full disk is said in words."""
    if isinstance(error, OSError) and error.errno in FULL:
        return f"the disk is full{f': {error.filename!r}' if error.filename else ''}."
    return "".join(traceback.format_exception_only(error)).strip()


def _is_of_others(file: str) -> bool:
    return any(file.startswith(folder + os.sep) for folder in _OTHERS)
