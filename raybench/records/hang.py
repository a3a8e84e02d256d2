"""Which rank of a point hangs and why: the verdict, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from raybench.records.device import DeviceKind


class HangCause(StrEnum):
    """Why a point makes no progress."""

    DIED = "died"
    STOPPED = "stopped"
    # The rank sleeps in the user's code, while other ranks wait for it in a collective.
    SLEEPS = "sleeps"
    WAITS_FOR_LOCK = "waits_for_lock"
    WAITS_FOR_DATA = "waits_for_data"
    # The rank is not in the collective in which other ranks wait.
    NOT_ENTERED = "not_entered"
    # The rank is in a later collective than the other ranks.
    SKIPPED = "skipped"
    OTHER_COLLECTIVE = "other_collective"
    OTHER_SIZE = "other_size"
    OTHER_TYPE = "other_type"
    # The rank waits for its device, or its device has not begun the collective.
    DEVICE_BUSY = "device_busy"
    # All ranks are in the same collective, which does not end: the network or a device hangs.
    NOT_FINISHED = "not_finished"
    UNKNOWN = "unknown"


class RecorderState(StrEnum):
    """Whether a rank's flight recorder was read."""

    ON = "on"
    OFF = "off"
    # The process is stopped, or C code holds the GIL.
    NO_ANSWER = "no_answer"
    NO_RESPONDER = "no_responder"


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """Which rank hangs, and why."""

    cause: HangCause
    # The rank, its host, device and process are None if no single rank is to blame.
    rank: int | None = None
    host: str | None = None
    device_kind: DeviceKind | None = None
    device_index: int | None = None
    # For a script, the process of the script.
    pid: int | None = None
    # Other ranks with the same evidence.
    also: tuple[int, ...] = ()
    # The collective in which other ranks wait, and its sequence number in its group.
    collective: str | None = None
    number: int | None = None
    # How long a rank has waited in the collective when the verdict was found.
    waited_s: float | None = None
    # Line of the user's code that the rank executes, as `train.py:88`; None without a stack.
    line: str | None = None
    waiting_ranks: tuple[int, ...] = ()
    # NOT_FINISHED: the two ranks that have finished the fewest collectives; empty if no two ranks
    # stand out.
    slowest_pair: tuple[int, ...] = ()
    # If the ranks called different collectives: the calls of this rank and of the other ranks, as
    # `all_reduce of 4096 float`.
    called: str | None = None
    expected: str | None = None
    # Worst state of the recorders of all ranks.
    recorder: RecorderState = RecorderState.NO_RESPONDER
