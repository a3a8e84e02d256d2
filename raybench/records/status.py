"""How points and runs end, and why."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Status(StrEnum):
    """How an attempt at a point ended; failures first, then ok, then not run."""

    # Text in the tables of a report.
    label: str
    # Predicate of a sentence whose subject is the point.
    clause: str

    OOM = "oom", "out of memory", "ran out of memory"
    ERROR = "error", "error", "failed"
    TIMEOUT = "timeout", "timed out", "timed out"
    LOST = "lost", "worker lost", "was lost with its worker"
    OK = "ok", "ok", "was measured"
    SKIPPED = "skipped", "skipped", "was skipped"
    CANCELLED = "cancelled", "cancelled", "was cancelled"

    def __new__(cls, value: str, label: str = "", clause: str = "") -> Self:
        """Make a member; the tables store its value."""
        member = str.__new__(cls, value)
        member._value_, member.label, member.clause = value, label, clause
        return member

    @property
    def is_failure(self) -> bool:
        """Whether the attempt ran and failed."""
        return self is not Status.OK and self not in NOT_RUN

    @property
    def is_retried(self) -> bool:
        """Whether `--resume` repeats the point."""
        return self is Status.LOST or self in NOT_RUN

    @property
    def is_lasting(self) -> bool:
        """Whether the point would end in the same way in later rounds."""
        return self is Status.SKIPPED or (self.is_failure and self is not Status.LOST)


# A lookup may be a plain string, because tables may hold statuses of later versions of raybench.
NOT_RUN = frozenset({Status.SKIPPED, Status.CANCELLED})


FAILURES = frozenset(status for status in Status if status.is_failure)


class RunStatus(StrEnum):
    """Status of a run; `running` without a driver means interrupted."""

    RUNNING = "running"
    OK = "ok"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class Cause(StrEnum):
    """Values of `error_type` for failures that raybench itself detects.

    For an exception of a workload, `error_type` is the name of its class.
    """

    # Status of an attempt that ends for this cause.
    status: Status
    # Whether the process of the rank died. If so, its log may have the reason.
    is_death: bool

    PEER_FAILED = "PeerFailed", Status.LOST
    NO_ANSWER = "NoAnswer", Status.LOST
    TIMEOUT = "Timeout", Status.TIMEOUT
    HANG = "Hang", Status.TIMEOUT
    WORKER_DIED = "WorkerDied", Status.LOST, True
    HOST_OUT_OF_MEMORY = "HostOutOfMemory", Status.OOM, True
    ANSWER_LOST = "AnswerLost", Status.LOST
    WORKER_LOST = "WorkerLost", Status.LOST
    NO_START = "NoStart", Status.ERROR
    NODE_LOST = "NodeLost", Status.LOST
    CLUSTER_LOST = "ClusterError", Status.LOST
    INVALID_MEASUREMENT = "InvalidMeasurement", Status.ERROR
    SCRIPT_EXIT = "ScriptExit", Status.ERROR
    SCRIPT_ENDED = "ScriptEnded", Status.ERROR
    NO_STEPS = "NoSteps", Status.ERROR
    TOO_FEW_DEVICES = "TooFewDevices", Status.SKIPPED
    NEEDS_CUDA = "NeedsCuda", Status.SKIPPED
    OUT_OF_MEMORY_BEFORE = "OutOfMemoryBefore", Status.SKIPPED
    STOPPED = "Stopped", Status.SKIPPED
    INTERRUPTED = "Interrupted", Status.CANCELLED

    def __new__(cls, value: str, status: Status, is_death: bool = False) -> Self:
        """Make a member; the tables store its value."""
        member = str.__new__(cls, value)
        member._value_, member.status, member.is_death = value, status, is_death
        return member
