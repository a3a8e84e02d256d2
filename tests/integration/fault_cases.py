"""The faults that ranks are made to have, and what a sweep must make of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.integration.fault_workloads import memory_cgroups

# All ranks wait in a communication: no row can tell whose is the wrong one.
NOBODYS_FAULT = ("mismatch", "skip")
_ANSWERED_S, _KILLED_S, _HUNG_S = 2.0, 6.0, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fault of one rank, or of all (-1), and what is asked of it.

    wanted: the statuses that are right. limit_s: from the fault to the next point, or from the
    deadline of the point where that is what ends it.
    """

    fault: str
    what: str
    wanted: frozenset[str]
    limit_s: float
    rank: int = 1


def _case(fault: str, what: str, wanted: str, limit_s: float, rank: int = 1) -> Case:
    return Case(
        fault=fault, what=what, wanted=frozenset(wanted.split()), limit_s=limit_s, rank=rank
    )


CASES = (
    _case("raise_init", "exception in __init__", "error", _ANSWERED_S),
    _case("raise", "exception in step", "error", _ANSWERED_S),
    _case("unpicklable", "exception that cannot be pickled", "error", _ANSWERED_S),
    _case("oom", "out of device memory, one rank", "oom", _ANSWERED_S),
    _case("oom", "out of device memory, all ranks", "oom", _ANSWERED_S, rank=-1),
    _case("host_memory", "out of host memory (killed by the kernel)", "lost oom", _KILLED_S),
    _case("exit_init", "os._exit in __init__", "lost", _KILLED_S),
    _case("exit", "os._exit in step", "lost", _KILLED_S),
    _case("sys_exit", "sys.exit in step", "lost error", _KILLED_S),
    _case("kill", "SIGKILL of one rank", "lost", _KILLED_S),
    _case("kill", "SIGKILL of all ranks", "lost", _KILLED_S, rank=-1),
    _case("segfault", "segmentation fault", "lost", _KILLED_S),
    _case("child_kill", "SIGKILL of a rank that has a child", "lost", _KILLED_S),
    _case("child", "child process left behind", "ok", _KILLED_S),
    _case("stop", "SIGSTOP of one rank", "timeout", _HUNG_S),
    _case("loop", "endless Python loop", "timeout", _HUNG_S),
    _case("hold_gil", "endless C code that holds the GIL", "timeout", _HUNG_S),
    _case("sleep", "endless wait, all ranks", "timeout", _HUNG_S, rank=-1),
    _case("hang_init", "hang in __init__", "timeout", _HUNG_S),
    _case("mismatch", "one rank receives what nobody sends", "timeout", _HUNG_S),
    # gloo ends a process that gets another collective than its own; NCCL hangs.
    _case("skip", "one rank skips a collective", "timeout error lost", _KILLED_S),
)
IMPORT_ERROR = _case("import", "one rank cannot import the workload", "error", _ANSWERED_S)
IMPORT_HANG = _case("import", "one rank never joins: it hangs in the import", "timeout", _HUNG_S)
CUDA_CASES = (
    _case("device_error", "index error on the device", "error", _KILLED_S),
    _case("device_hang", "endless kernel", "timeout", _HUNG_S),
)


def possible(device: str) -> list[Case]:
    """Those that can be made real on this machine."""
    cases = [*CASES, *(CUDA_CASES if device == "cuda" else ())]
    return [case for case in cases if case.fault != "host_memory" or memory_cgroups()]


def between_good_points(cases: Sequence[Case]) -> list[tuple[str, int]]:
    """Faults for `write_job`: a good point, a case, a good point, and so on."""
    faults = [("none", 0)]
    for case in cases:
        faults += [(case.fault, case.rank), ("none", 0)]
    return faults
