"""Collects evidence on the ranks of a point that makes no progress.

`collect` runs in the agent of a node and needs no help from the main threads of the ranks, which
may be stuck.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from raybench.hangs import processes, ras, recorder, stacks
from raybench.hangs.processes import Dumps, NoAnswer, ProcessFacts
from raybench.hangs.ras import NoRas, RasReport
from raybench.hangs.recorder import Call, Recording, Stage
from raybench.hangs.stacks import Frame, Wait
from raybench.records.hang import RecorderState

if TYPE_CHECKING:
    from raybench.records.device import DeviceKind


# A description shows the innermost frames of a stack.
_SHOWN_FRAMES = 5
# A row holds no more text.
_SHOWN_RANKS = 8
# The driver needs about a second to read this many calls.
_MAX_CALLS_OF_POINT = 200_000
# Fewer calls of a rank show no pattern.
_MIN_CALLS_OF_RANK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank runs."""

    rank: int
    host: str
    device_kind: DeviceKind
    device_index: int
    # A script runs in a child process of the worker.
    worker_pid: int
    # The UUID of the GPU; None on a CPU.
    device_uuid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoad:
    """How busy a GPU is. A collective that waits uses 100 % at low power."""

    utilization_percent: float | None = None
    power_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence:
    """Evidence on one rank at one moment."""

    place: RankPlace
    # The process that runs the rank: the script's process, if there is a script.
    process: ProcessFacts
    # Innermost frame first; empty if the process wrote no stack.
    stack: tuple[Frame, ...] = ()
    # Innermost frame in the user's code.
    line: Frame | None = None
    # What the rank waits for.
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
    """Evidence on all ranks of a point at one moment."""

    # In rank order; empty if the agent of a node did not answer.
    ranks: tuple[RankEvidence, ...]
    # NoRas.REFUSED with gloo, or if NCCL's RAS service is off.
    ras: RasReport | NoRas = NoRas.REFUSED

    def with_ended_ranks(self, ended: Collection[int]) -> Evidence:
        """Return the evidence with these ranks marked as having ended the point.

        The stack of an ended rank says nothing: its worker waits for the next point.
        """
        ranks = []
        for rank in self.ranks:
            if rank.rank in ended:
                rank = replace(rank, stack=(), line=None, wait=Wait.POINT_END)
            ranks.append(rank)
        return replace(self, ranks=tuple(ranks))


def collect(
    places: Sequence[RankPlace], timeout_s: float, world_size: int
) -> tuple[RankEvidence, ...]:
    """Collect evidence on ranks of this host within about `timeout_s`; never raises.

    Args:
        places: ranks on this host.
        world_size: number of ranks of the point. The more ranks, the fewer calls of each are kept.
    """
    pids = [processes.rank_process(place.worker_pid) for place in places]
    answers = processes.ask(pids, timeout_s)
    max_calls = max(_MIN_CALLS_OF_RANK, _MAX_CALLS_OF_POINT // world_size)
    ranks = []
    for place, answer in zip(places, answers, strict=True):
        recorder_state, recording = _read_recording(answer.dumps)
        stack = stacks.read(answer.stack)
        ranks.append(
            RankEvidence(
                place=place,
                process=answer.facts,
                stack=stack,
                line=stacks.find_user_frame(stack),
                wait=stacks.classify_wait(stack, answer.facts.kernel_wait),
                recorder=recorder_state,
                recording=replace(recording, calls=recording.calls[-max_calls:]),
                load=read_load(place),
            )
        )
    return tuple(ranks)


def _read_recording(dumps: Dumps | NoAnswer) -> tuple[RecorderState, Recording]:
    """Parse the flight recorder's dumps; without dumps the recording is empty."""
    empty_recording = Recording(is_on=False, members={})
    if dumps is NoAnswer.NO_RESPONDER:
        return RecorderState.NO_RESPONDER, empty_recording
    if isinstance(dumps, NoAnswer):
        return RecorderState.NO_ANSWER, empty_recording
    recording = recorder.read(dumps)
    return RecorderState.ON if recording.is_on else RecorderState.OFF, recording


def read_load(place: RankPlace) -> DeviceLoad:
    """Return how busy the GPU of a rank is; on a CPU the fields are None."""
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
    """Ask NCCL's RAS service in the process of any rank; return its JSON text."""
    address = processes.find_ras_address([rank.process.pid for rank in ranks])
    return ras.ask(address, timeout_s) if address else NoRas.REFUSED


def read_ras(answer: str | NoRas, pids: Collection[int]) -> RasReport | NoRas:
    """Parse the answer of NCCL's RAS service.

    Args:
        answer: the JSON text, or why there is none.
        pids: processes of all ranks of the point.
    """
    return answer if isinstance(answer, NoRas) else ras.read(answer, pids)


def describe(evidence: Evidence, first_ranks: Collection[int] = ()) -> str:
    """Return the evidence as text for the detail of a failure, for at most eight ranks.

    Args:
        first_ranks: ranks to describe before the other ranks.
    """
    ranks = [rank for rank in evidence.ranks if rank.rank in first_ranks]
    ranks += [rank for rank in evidence.ranks if rank.rank not in first_ranks]
    lines: list[str] = []
    for rank in ranks[:_SHOWN_RANKS]:
        lines += _describe_rank(rank)
    if len(ranks) > _SHOWN_RANKS:
        lines.append(f"and {len(ranks) - _SHOWN_RANKS} further ranks")
    if isinstance(evidence.ras, RasReport):
        lines += _describe_ras(evidence.ras)
    else:
        lines.append(f"NCCL's RAS service: {evidence.ras}")
    return "\n".join(lines)


def _describe_rank(rank: RankEvidence) -> Iterator[str]:
    """Yield lines on the process, GPU, collectives and stack of a rank."""
    place, process, load = rank.place, rank.process, rank.load
    kernel_function = f" in {process.kernel_wait}" if process.kernel_wait else ""
    yield (
        f"rank {rank.rank} on {place.host}, {place.device_kind}:{place.device_index}: "
        f"pid {process.pid}, state {process.state or 'gone'}{kernel_function}, "
        f"flight recorder {rank.recorder}"
    )
    if load.power_w is not None:
        yield f"  GPU {load.utilization_percent or 0:g} %, {load.power_w:g} W"
    calls = rank.recording.calls
    if calls:
        yield _describe_call("last entered", calls[-1])
    pending = [call for call in calls if call.stage is not Stage.DONE]
    if pending:
        yield _describe_call("waits in", pending[0])
    for frame in rank.stack[:_SHOWN_FRAMES]:
        yield f"  {frame.path}:{frame.line} in {frame.function}"


def _describe_call(title: str, call: Call) -> str:
    name = f"{call.shape.operation} {call.number} of group {call.group}"
    return f"  {title}: {name}, {call.shape}, {call.age_s:.1f} s ago"


def _describe_ras(report: RasReport) -> Iterator[str]:
    """Yield a line for each rank of each communicator."""
    yield f"NCCL {report.nccl_version} counts as launched:"
    for communicator in report.communicators:
        for rank in communicator.ranks:
            counts = {name: count for name, count in rank.launched.items() if count}
            state = "missing" if rank.is_missing else str(counts)
            yield f"  communicator {communicator.name}, pid {rank.pid}: {state}"
