"""Which rank of a point hangs and why: the verdict, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from raybench.records.device import DeviceKind


class HangCause(StrEnum):
    """Why a point makes no progress."""

    DIED = "died"
    STOPPED = "stopped"
    # It waits in code of its own, while others wait for it in a collective.
    SLEEPS = "sleeps"
    WAITS_FOR_LOCK = "waits_for_lock"
    WAITS_FOR_DATA = "waits_for_data"
    # It is elsewhere, while others wait for it in a collective.
    NOT_ENTERED = "not_entered"
    # It has left out a collective that the others have entered, and entered a later one.
    SKIPPED = "skipped"
    OTHER_COLLECTIVE = "other_collective"
    OTHER_SIZE = "other_size"
    OTHER_TYPE = "other_type"
    # It waits for its device, or has entered the collective, which its device has not begun.
    DEVICE_BUSY = "device_busy"
    # All ranks have entered the collective, which does not end: the network or a device.
    NOT_FINISHED = "not_finished"
    UNKNOWN = "unknown"


class RecorderState(StrEnum):
    """Whether a rank's flight recorder was read."""

    ON = "on"
    OFF = "off"
    # The process did not answer: it is stopped, or C code keeps the interpreter lock.
    NO_ANSWER = "no_answer"
    NO_RESPONDER = "no_responder"


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """Which rank hangs, and why."""

    cause: HangCause
    # This and the next four fields are None if no single rank is to blame.
    rank: int | None = None
    host: str | None = None
    device_kind: DeviceKind | None = None
    device_index: int | None = None
    # The process that runs the rank: the script's process, if there is a script.
    pid: int | None = None
    # Other ranks with the same evidence.
    also: tuple[int, ...] = ()
    # The collective in which other ranks wait; None if unknown.
    collective: str | None = None
    # Number of the collective among the calls of its group.
    number: int | None = None
    # Where the rank is in the user's code, as `train.py:88`; None without a stack.
    line: str | None = None
    waiting_ranks: tuple[int, ...] = ()
    # Where the ranks called different collectives: what this rank called, and the others, as
    # `all_reduce of 4096 float`.
    called: str | None = None
    expected: str | None = None
    # Worst state of the recorders of all ranks.
    recorder: RecorderState = RecorderState.NO_RESPONDER
