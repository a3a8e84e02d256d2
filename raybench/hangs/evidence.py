"""What is known of each rank of a point that makes no progress, and how it is collected.

Collected on the host of the ranks, from outside their processes and without their main threads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from raybench.hangs import processes, ras, recorder, stacks
from raybench.hangs.processes import Dumps, NoAnswer, ProcessFacts
from raybench.hangs.ras import NoRas, RasReport
from raybench.hangs.recorder import Recording
from raybench.hangs.stacks import Frame, Wait

if TYPE_CHECKING:
    from raybench.records.device import DeviceKind


class RecorderState(StrEnum):
    """Whether a rank's flight recorder was read; stands in the row of the point."""

    ON = "on"
    OFF = "off"
    # The process did not answer: it is stopped, or C code keeps the interpreter lock.
    NO_ANSWER = "no_answer"
    NO_RESPONDER = "no_responder"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank runs."""

    rank: int
    host: str
    device_kind: DeviceKind
    device_index: int
    # Of the worker; a script runs in a process below it.
    worker_pid: int
    # As in `Device`; None on a CPU.
    device_uuid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoad:
    """How busy a GPU is. A collective that waits shows 100 % utilisation at low power."""

    utilization_percent: float | None = None
    power_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence:
    """What is known of a rank at one moment."""

    place: RankPlace
    # Of the process that runs the rank: the script's, where there is one.
    process: ProcessFacts
    # Innermost frame first; empty where the process did not write it.
    stack: tuple[Frame, ...] = ()
    # Where the rank is in the user's code, and for what it waits there.
    line: Frame | None = None
    wait: Wait = Wait.NOTHING_KNOWN
    recorder: RecorderState = RecorderState.NO_RESPONDER
    recording: Recording = field(default_factory=lambda: Recording(is_on=False, members={}))
    load: DeviceLoad = field(default_factory=DeviceLoad)

    @property
    def rank(self) -> int:
        """Return the number of the rank."""
        return self.place.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of all ranks of a point at one moment."""

    # In rank order.
    ranks: tuple[RankEvidence, ...]
    # NoRas.REFUSED on gloo, and where NCCL's service is off.
    ras: RasReport | NoRas = NoRas.REFUSED


def collect(
    places: Sequence[RankPlace], timeout_s: float, *, with_places: bool = False
) -> tuple[RankEvidence, ...]:
    """Return what is known of ranks on this host. Takes at most about `timeout_s`; never raises.

    Args:
        with_places: also ask for the lines of the calls; see `processes.ask`.
    """
    pids = [processes.rank_process(place.worker_pid) for place in places]
    answers = processes.ask(pids, timeout_s, with_places=with_places)
    ranks = []
    for place, answer in zip(places, answers, strict=True):
        state, recording = _recording(answer.dumps)
        stack = stacks.read(answer.stack)
        ranks.append(
            RankEvidence(
                place=place,
                process=answer.facts,
                stack=stack,
                line=stacks.place_of(stack),
                wait=stacks.wait_of(stack, answer.facts.kernel_wait),
                recorder=state,
                recording=recording,
                load=read_load(place),
            )
        )
    return tuple(ranks)


def _recording(dumps: Dumps | NoAnswer) -> tuple[RecorderState, Recording]:
    empty = Recording(is_on=False, members={})
    if dumps is NoAnswer.NO_RESPONDER:
        return RecorderState.NO_RESPONDER, empty
    if isinstance(dumps, NoAnswer):
        return RecorderState.NO_ANSWER, empty
    recording = recorder.read(dumps)
    return RecorderState.ON if recording.is_on else RecorderState.OFF, recording


def read_load(place: RankPlace) -> DeviceLoad:
    """Return how busy the GPU of a rank is; nothing is known of a CPU."""
    if place.device_kind != "cuda":
        return DeviceLoad()
    # Imported here: hosts without a GPU may lack NVML.
    import pynvml

    from raybench.hardware import nvml

    uuid = place.device_uuid or nvml.uuid_of(place.device_index)
    handle = nvml.device(uuid) if uuid else None
    if handle is None:
        return DeviceLoad()
    use = nvml.ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    return DeviceLoad(
        utilization_percent=None if use is None else float(use.gpu),
        power_w=nvml.watts(pynvml.nvmlDeviceGetPowerUsage, handle),
    )


def ask_ras(address: tuple[str, int], pids: Collection[int], timeout_s: float) -> RasReport | NoRas:
    """Return what NCCL's service at the address tells of these processes."""
    answer = ras.ask(address, timeout_s)
    return answer if isinstance(answer, NoRas) else ras.read(answer, pids)
