"""The log of NCCL in this process, written to memory and read for its routes and algorithms.

NCCL reads its variables once, when the first communicator is made. From then on it writes lines of
INIT and NET where communicators are made and connected, before anything is timed; a collective
that is connected writes none. For one step that is not timed it can be made to read them again,
and then says which algorithm each collective runs.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raybench.hardware.nccl_log import choices, parse
from raybench.records.environment import set_variables

_SWITCH = "NCCL_DEBUG"
# A communicator of a thousand ranks may write so much; more is not read.
_MOST_BYTES = 4 * 2**20
_CONNECTIONS, _CHOICES = "INIT,NET", "TUNING"


class NcclFile:
    """A file in memory to which NCCL writes its log, unless the user has switched the log on.

    read_again: returns a function that has NCCL read its variables again; None if it cannot.
    """

    def __init__(self, read_again: Callable[[], Callable[[], object] | None] | None = None) -> None:
        self._file: int | None = None
        self._begin = 0
        self._known: frozenset[str] = frozenset()
        self._find_read_again = read_again or _find_read_again

    @contextmanager
    def record(self) -> Iterator[None]:
        """Have NCCL log the connections of the group that is formed in the block.

        The group must communicate once in it. The variables are removed after the block: they are
        not for processes that a workload starts.
        """
        self._known = frozenset()
        if self._file is not None:
            self._begin = os.fstat(self._file).st_size
        if self._file is not None or os.environ.get(_SWITCH):
            yield
            return
        # In memory: nothing is left behind, however the process ends.
        self._file = os.memfd_create("raybench-nccl")
        with set_variables(_variables(self._file, _CONNECTIONS)):
            yield

    def routes(self) -> tuple[str, ...]:
        """Return the transports that the last group uses, in words; () where they are not known."""
        if self._file is None:
            return ()
        log = parse(_read(self._file, self._begin))
        return tuple(sorted(self._known.union(route.words for route in log.routes)))

    def choices(self, step: Callable[[], object]) -> tuple[str, ...]:
        """Run a step, and return which algorithm NCCL runs for each of its collectives.

        () where the log is the user's, where this NCCL cannot change its log any more, and on ranks
        that write no such lines. The step runs in any case: other ranks may take part in it.
        """
        read_again = self._find_read_again() if self._file is not None else None
        if self._file is None or read_again is None:
            step()
            return ()
        # NCCL empties the file of its routes when it opens it again.
        self._known, self._begin = frozenset(self.routes()), 0
        file = os.memfd_create("raybench-nccl-choices")
        try:
            with set_variables(_variables(file, _CHOICES)):
                read_again()
            try:
                step()
            finally:
                with set_variables(_variables(self._file, _CONNECTIONS)):
                    read_again()
            return tuple(dict.fromkeys(choices(_read(file, 0))))
        finally:
            os.close(file)


def _read(file: int, begin: int) -> list[str]:
    size = os.fstat(file).st_size - begin
    return os.pread(file, min(size, _MOST_BYTES), begin).decode(errors="replace").splitlines()


def _variables(file: int, subsystems: str) -> dict[str, str]:
    return {
        _SWITCH: "INFO",
        "NCCL_DEBUG_SUBSYS": subsystems,
        "NCCL_DEBUG_FILE": f"/proc/self/fd/{file}",
    }


def _find_read_again() -> Callable[[], object] | None:
    """Return a function that has the NCCL of this process read the variables of its log again.

    The function also makes a call without a communicator, which writes a line of the log: only then
    are the variables read. None where NCCL is not loaded or lacks `ncclResetDebugInit`, which NCCL
    has for its own tests.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        forget, count = library.ncclResetDebugInit, library.ncclCommCount
    except (OSError, AttributeError):
        return None

    def read_again() -> None:
        forget()
        count(None, ctypes.byref(ctypes.c_int()))

    return read_again
