"""The log of NCCL in this process: switched on for good when NCCL is loaded, and read when asked.

NCCL reads its variables once, when the first communicator is made. From then on it writes lines of
INIT and NET where communicators are made and connected, before anything is timed; a collective
that is connected writes none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from raybench.hardware.nccl_log import describe, parse

_SWITCH = "NCCL_DEBUG"
# What a communicator of a thousand ranks may write, and more than that is not read.
_MOST_BYTES = 4 * 2**20


class NcclFile:
    """A file in memory that NCCL writes to, unless the user has switched its log on."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._begin = 0

    @contextmanager
    def record(self) -> Iterator[None]:
        """Form a group, and let it communicate once, inside the `with` block.

        The variables are gone behind it: they are not for processes that a workload starts.
        """
        if self._file is not None:
            self._begin = os.fstat(self._file).st_size
        if self._file is not None or os.environ.get(_SWITCH):
            yield
            return
        # In memory: nothing is left behind, however the process ends.
        self._file = os.memfd_create("raybench-nccl")
        variables = {
            _SWITCH: "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET",
            "NCCL_DEBUG_FILE": f"/proc/self/fd/{self._file}",
        }
        users = {name: os.environ.get(name) for name in variables}
        os.environ |= variables
        try:
            yield
        finally:
            for name, value in users.items():
                os.environ.pop(name)
                os.environ |= {} if value is None else {name: value}

    def routes(self) -> tuple[str, ...]:
        """Describe the ways that the last group has taken; empty where nothing is known of them."""
        if self._file is None:
            return ()
        size = os.fstat(self._file).st_size - self._begin
        text = os.pread(self._file, min(size, _MOST_BYTES), self._begin).decode(errors="replace")
        log = parse(text.splitlines())
        return tuple(sorted({describe(route, log) for route in log.routes}))
