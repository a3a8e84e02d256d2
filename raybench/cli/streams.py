"""The streams of the process: what becomes of stderr never ends a command.

It may be full, as the disk below a log is; its reader may have left (`2>&1 | head`); or the shell
has closed it (`2>&-`). A sweep goes on all the same: its rows are what counts.
"""

from __future__ import annotations

import io
import os
import sys

_STDERR = 2


class _LossyFile(io.FileIO):
    """Drops what cannot be written; what comes later may have room again."""

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left:
                left = left[super().write(left) or 0 :]
        except OSError:
            return size
        return size


def keep_stderr_usable() -> None:
    """Make sys.stderr one that never raises; leave alone what somebody has put in its place."""
    _fill_gaps()
    usual = sys.stderr
    if usual is not sys.__stderr__:
        return
    sys.stderr = io.TextIOWrapper(
        _LossyFile(_STDERR, "wb", closefd=False),
        encoding=usual.encoding if usual else "utf-8",
        errors="backslashreplace",
        line_buffering=True,
        write_through=True,
    )


def _fill_gaps() -> None:
    """Open what is closed of 0, 1 and 2: the next file opened would be what others write to."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= _STDERR:
        os.set_inheritable(descriptor, True)
        descriptor = os.dup(descriptor)
    os.close(descriptor)
