"""What is known of each rank of a point that makes no progress, and how it is collected.

Collected on the host of the ranks, from outside their processes and without their main threads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from raybench.hangs import processes, ras, recorder, stacks
from raybench.hangs.processes import Dumps, NoAnswer, ProcessFacts
from raybench.hangs.ras import NoRas, RasReport
from raybench.hangs.recorder import Recording, Stage
from raybench.hangs.stacks import Frame, Wait
from raybench.records.hang import RecorderState

if TYPE_CHECKING:
    from raybench.records.device import DeviceKind


# A description shows this many innermost frames of a stack.
_FRAMES = 5
# A description shows this many ranks, because a row holds no more text.
_MOST_RANKS = 8
# The driver reads at most so many calls of all ranks together, which takes it about a second.
_MOST_CALLS = 200_000
# A rank's recording of fewer calls shows no pattern.
_LEAST_CALLS = 64


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
    # The process that runs the rank: the script's process, if there is a script.
    process: ProcessFacts
    # Innermost frame first; empty if the process wrote no stack.
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

    def with_answers(self, answered: Collection[int]) -> Evidence:
        """Return the evidence with these ranks at the end of their point.

        The stack of a rank that has answered shows its worker, which waits for the next point.
        """
        ranks = []
        for rank in self.ranks:
            if rank.rank in answered:
                rank = replace(rank, stack=(), line=None, wait=Wait.POINT_END)
            ranks.append(rank)
        return replace(self, ranks=tuple(ranks))


def collect(
    places: Sequence[RankPlace], timeout_s: float, world_size: int
) -> tuple[RankEvidence, ...]:
    """Return what is known of ranks on this host. Takes at most about `timeout_s`; never raises.

    Args:
        places: ranks on this host.
        world_size: number of ranks of the point; recordings are shorter in a large point.
    """
    pids = [processes.rank_process(place.worker_pid) for place in places]
    answers = processes.ask(pids, timeout_s)
    most_calls = max(_LEAST_CALLS, _MOST_CALLS // world_size)
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
                recording=replace(recording, calls=recording.calls[-most_calls:]),
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


def ask_ras(ranks: Sequence[RankEvidence], timeout_s: float) -> str | NoRas:
    """Return the answer of NCCL's service in a process of these ranks, or why there is none."""
    address = processes.ras_address([rank.process.pid for rank in ranks])
    return ras.ask(address, timeout_s) if address else NoRas.REFUSED


def read_ras(answer: str | NoRas, pids: Collection[int]) -> RasReport | NoRas:
    """Return what NCCL's service told. pids: of all ranks."""
    return answer if isinstance(answer, NoRas) else ras.read(answer, pids)


def describe(evidence: Evidence, first: Collection[int] = ()) -> str:
    """Return the evidence as text, a paragraph for each of 8 ranks, for the detail of a failure.

    Args:
        first: ranks to describe first.
    """
    lines = []
    ranks = [rank for rank in evidence.ranks if rank.rank in first]
    ranks += [rank for rank in evidence.ranks if rank.rank not in first]
    for rank in ranks[:_MOST_RANKS]:
        place, process, load = rank.place, rank.process, rank.load
        lines.append(
            f"rank {rank.rank} on {place.host}, {place.device_kind}:{place.device_index}: "
            f"pid {process.pid}, state {process.state or 'gone'}"
            f"{f' in {process.kernel_wait}' if process.kernel_wait else ''}, "
            f"flight recorder {rank.recorder}"
        )
        if load.power_w is not None:
            lines.append(f"  GPU {load.utilization_percent or 0:g} %, {load.power_w:g} W")
        calls = rank.recording.calls
        pending = [call for call in calls if call.stage is not Stage.DONE]
        for title, shown in (("last entered", calls[-1:]), ("waits in", pending[:1])):
            for call in shown:
                name = f"{call.shape.operation} {call.number} of group {call.group}"
                lines.append(f"  {title}: {name}, {call.shape}, {call.age_s:.1f} s ago")
        lines += [
            f"  {frame.path}:{frame.line} in {frame.function}" for frame in rank.stack[:_FRAMES]
        ]
    if len(ranks) > _MOST_RANKS:
        lines.append(f"and {len(ranks) - _MOST_RANKS} further ranks")
    if isinstance(evidence.ras, RasReport):
        lines.append(f"NCCL {evidence.ras.nccl_version} counts as launched:")
        for communicator in evidence.ras.communicators:
            for one in communicator.ranks:
                counts = {name: count for name, count in one.launched.items() if count}
                state = "missing" if one.is_missing else str(counts)
                lines.append(f"  communicator {communicator.name}, pid {one.pid}: {state}")
    else:
        lines.append(f"NCCL's RAS service: {evidence.ras}")
    return "\n".join(lines)
