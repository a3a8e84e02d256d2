"""How points and runs end, and why."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Status(StrEnum):
    """How an attempt at a point ended; failures first, the worst first, then ok, then not run.

    label: in a table that people read. clause: in a sentence, behind the point.
    """

    label: str
    clause: str

    OOM = "oom", "out of memory", "ran out of memory"
    ERROR = "error", "error", "failed"
    TIMEOUT = "timeout", "timed out", "timed out"
    LOST = "lost", "worker lost", "was lost with its worker"
    OK = "ok", "ok", "was measured"
    SKIPPED = "skipped", "skipped", "was skipped"
    CANCELLED = "cancelled", "cancelled", "was cancelled"

    def __new__(cls, value: str, label: str = "", clause: str = "") -> Self:
        """Make a member, whose value is what the tables hold; by that alone one is found."""
        member = str.__new__(cls, value)
        member._value_, member.label, member.clause = value, label, clause
        return member

    @property
    def is_failure(self) -> bool:
        """Return whether it is oom, error, timeout or lost."""
        return self is not Status.OK and self not in NOT_RUN

    @property
    def is_retried(self) -> bool:
        """Return whether `--resume` alone repeats the point: lost, skipped or cancelled."""
        return self is Status.LOST or self in NOT_RUN

    @property
    def is_lasting(self) -> bool:
        """Return whether later rounds would end alike: skipped, or failed other than by a loss."""
        return self is Status.SKIPPED or (self.is_failure and self is not Status.LOST)


# For the tables, which may hold statuses of later versions.
NOT_RUN = frozenset({Status.SKIPPED, Status.CANCELLED})


FAILURES = frozenset(status for status in Status if status.is_failure)


class RunStatus(StrEnum):
    """How far a run has come; one that says `running` without a driver was interrupted."""

    RUNNING = "running"
    OK = "ok"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class Cause(StrEnum):
    """Why an attempt has no measurement, as its `error_type`, where raybench itself found out.

    For an exception of a workload, `error_type` is the name of its class instead.
    status: how the attempt ends by it. is_death: of the rank's process, whose log may say why.
    """

    status: Status
    is_death: bool

    PEER_FAILED = "PeerFailed", Status.LOST
    NO_ANSWER = "NoAnswer", Status.LOST
    TIMEOUT = "Timeout", Status.TIMEOUT
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
        """Make a member, whose value is what the tables hold."""
        member = str.__new__(cls, value)
        member._value_, member.status, member.is_death = value, status, is_death
        return member
