"""Which rank hangs and why, from the evidence of all ranks. Pure.

Nobody is blamed where the evidence fits several ranks, or where all ranks do the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from raybench.hangs.evidence import Evidence, RankEvidence
from raybench.hangs.history import Key, key_of, predict
from raybench.hangs.ras import RasRank, RasReport
from raybench.hangs.recorder import Call, CallShape, Stage
from raybench.hangs.stacks import Frame, Wait
from raybench.records.hang import HangCause, HangVerdict, RecorderState

# Collectives whose inputs may have another size on each rank.
_UNEVEN = (
    "all_gather",
    "all_to_all",
    "alltoall",
    "gather",
    "scatter",
    "reduce_scatter",
    "coalesced",
)
_EVEN = ("_all_gather_base", "_reduce_scatter_base", "all_gather_into_tensor")
# Ranks disagree just before they hang; older differences had no consequence.
_NEAR = 32


_CAUSE_OF_WAIT = {
    Wait.SLEEP: HangCause.SLEEPS,
    Wait.LOCK: HangCause.WAITS_FOR_LOCK,
    Wait.DATA: HangCause.WAITS_FOR_DATA,
    Wait.DEVICE: HangCause.DEVICE_BUSY,
    # It has made as many steps as the others with fewer collectives.
    Wait.BLOCK_END: HangCause.SKIPPED,
}


def judge(evidence: Evidence, before: Evidence | None, least_wait_s: float) -> HangVerdict | None:
    """Return the verdict; None where the ranks go on, one works, or nothing sets one apart.

    Args:
        before: an earlier look at the same ranks; None if there was none.
        least_wait_s: a rank waits in a collective after so long.
    """
    if before is not None and _has_moved(evidence, before):
        return None
    judges: Sequence[Callable[[], HangVerdict | None]] = (
        lambda: _of_processes(evidence.ranks, least_wait_s),
        lambda: _of_recorder(evidence.ranks, least_wait_s),
        lambda: _of_ras(evidence),
        lambda: _of_stacks(evidence.ranks),
    )
    found = (judge() for judge in judges)
    verdict = next((verdict for verdict in found if verdict is not None), None)
    if verdict is None or (before is not None and _works(verdict, evidence, before)):
        return None
    order = list(RecorderState)
    worst = max((rank.recorder for rank in evidence.ranks), key=order.index)
    return replace(verdict, recorder=worst)


def _has_moved(now: Evidence, before: Evidence) -> bool:
    """Return whether any rank has entered or finished a collective between two looks."""
    for new, old in zip(now.ranks, before.ranks, strict=True):
        if new.recorder is not old.recorder:
            continue
        if _progress(new) != _progress(old):
            return True
    return False


def _works(verdict: HangVerdict, now: Evidence, before: Evidence) -> bool:
    """Return whether the named rank is late because it works, as in an evaluation of its own."""
    if verdict.cause not in (HangCause.NOT_ENTERED, HangCause.DEVICE_BUSY):
        return False
    stacks = [
        _calls_of(rank.stack)
        for evidence in (now, before)
        for rank in evidence.ranks
        if rank.rank == verdict.rank and rank.stack
    ]
    return len(stacks) > 1 and stacks[0] != stacks[1]


def _calls_of(stack: Sequence[Frame]) -> tuple[object, ...]:
    """Return a stack without the line of its innermost frame, which changes in an endless loop."""
    inner, *outer = stack
    return (inner.path, inner.function, *outer)


def _progress(rank: RankEvidence) -> Mapping[str, tuple[int, int]]:
    """Return group -> (last call, calls that are not done)."""
    groups = {call.group for call in rank.recording.calls}
    return {
        group: (rank.recording.last_number(group), len(rank.recording.pending(group)))
        for group in groups
    }


# ---- processes


def _of_processes(ranks: Sequence[RankEvidence], least_wait_s: float) -> HangVerdict | None:
    """Return the verdict where processes have died or are stopped."""
    for cause, guilty in (
        (HangCause.DIED, [rank for rank in ranks if rank.process.has_ended]),
        (HangCause.STOPPED, [rank for rank in ranks if rank.process.is_stopped]),
    ):
        if guilty:
            others = [rank for rank in ranks if rank not in guilty]
            waiting = [(rank, call) for rank in others if (call := _first_wait(rank, least_wait_s))]
            call = waiting[0][1] if waiting else None
            return _blame(cause, guilty, [rank for rank, _ in waiting], call)
    return None


def _first_wait(rank: RankEvidence, least_wait_s: float) -> Call | None:
    """Return the earliest call in which the rank waits, of any group."""
    pending = (call for call in rank.recording.calls if call.stage is not Stage.DONE)
    return next((call for call in pending if call.age_s >= least_wait_s), None)


# ---- flight recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupState:
    """Where the ranks of a process group are in its calls."""

    name: str
    members: tuple[RankEvidence, ...]
    # The earliest call that is not done, and who waits in it or a later one.
    number: int
    waiting: tuple[RankEvidence, ...]
    call: Call
    # Members that have entered an earlier call at most.
    behind: tuple[RankEvidence, ...]


def _of_recorder(ranks: Sequence[RankEvidence], least_wait_s: float) -> HangVerdict | None:
    """Return the verdict by the calls that the ranks have entered."""
    states = list(_group_states(ranks, least_wait_s))
    for state in states:
        if (verdict := _disagreement(state)) is not None:
            return verdict
    waiting = {rank.rank for state in states for rank in state.waiting}
    for state in states:
        # Who waits in another group is late for the sake of that one.
        guilty = [rank for rank in state.behind if rank.rank not in waiting]
        if guilty and len(guilty) < len(state.members):
            return _not_entered(guilty, state)
    for state in states:
        if not state.behind:
            return _all_entered(state)
    if states:
        state = states[0]
        return _blame(HangCause.UNKNOWN, (), state.waiting, state.call)
    return None


def _group_states(ranks: Sequence[RankEvidence], least_wait_s: float) -> Iterator[_GroupState]:
    """Yield each group in whose calls ranks wait."""
    names = dict.fromkeys(call.group for rank in ranks for call in rank.recording.calls)
    for name in names:
        told = [rank.recording.members.get(name) for rank in ranks]
        known = next((members for members in told if members), None)
        members = tuple(
            rank
            for rank in ranks
            if (rank.rank in known if known else _knows(rank, name) or not _is_read(rank))
        )
        waits = {}
        for rank in members:
            pending = [c for c in rank.recording.pending(name) if c.age_s >= least_wait_s]
            if pending:
                waits[rank.rank] = min(pending, key=lambda call: call.number)
        if not waits or len(members) < 2:
            continue
        number = min(call.number for call in waits.values())
        yield _GroupState(
            name=name,
            members=members,
            number=number,
            waiting=tuple(rank for rank in members if rank.rank in waits),
            call=next(call for call in waits.values() if call.number == number),
            behind=tuple(rank for rank in members if _is_behind(rank, name, number)),
        )


def _is_read(rank: RankEvidence) -> bool:
    return rank.recorder is RecorderState.ON


def _knows(rank: RankEvidence, group: str) -> bool:
    return any(call.group == group for call in rank.recording.calls)


def _is_behind(rank: RankEvidence, group: str, number: int) -> bool:
    """Return whether the rank has not entered the call; without its recorder, by its stack."""
    if _is_read(rank):
        return rank.recording.last_number(group) < number
    # Its stack came and no recording: its own code keeps the interpreter lock. Without either it
    # may be slow to answer.
    keeps_lock = rank.recorder is RecorderState.NO_ANSWER and bool(rank.stack)
    return keeps_lock and rank.wait not in (Wait.PEERS, Wait.DEVICE, Wait.BLOCK_END)


def _not_entered(guilty: Sequence[RankEvidence], state: _GroupState) -> HangVerdict:
    """Return the verdict on ranks that are elsewhere while others wait in a collective."""
    cause = _CAUSE_OF_WAIT.get(guilty[0].wait, HangCause.NOT_ENTERED)
    waiting = [rank for rank in state.waiting if rank not in guilty]
    if cause is HangCause.SKIPPED and len(guilty) > len(waiting):
        # More ranks have ended the block than wait: those may have entered one too many.
        return _blame(HangCause.UNKNOWN, (), waiting, state.call)
    return _blame(cause, guilty, waiting, state.call)


def _all_entered(state: _GroupState) -> HangVerdict:
    """Return the verdict where all members have entered the call, which is not done."""
    stages = {}
    for rank in state.members:
        calls = [call for call in rank.recording.calls if call.group == state.name]
        stages[rank.rank] = next(c.stage for c in calls if c.number == state.number)
    late = [rank for rank in state.members if stages[rank.rank] is Stage.ENTERED]
    if 0 < len(late) < len(state.members):
        others = [rank for rank in state.members if rank not in late]
        return _blame(HangCause.DEVICE_BUSY, late, others, state.call)
    return _blame(HangCause.NOT_FINISHED, (), state.members, state.call)


def _disagreement(state: _GroupState) -> HangVerdict | None:
    """Return the verdict where members called different collectives under the same number."""
    known: dict[int, dict[int, Call]] = {}
    for rank in filter(_is_read, state.members):
        numbers = {call.number: call for call in rank.recording.calls if call.group == state.name}
        if numbers:
            known[rank.rank] = numbers
    if len(known) < 2:
        return None
    first = max(max(min(numbers) for numbers in known.values()), state.number - _NEAR)
    last = min(max(numbers) for numbers in known.values())
    for number in range(first, last + 1):
        there = {rank: numbers[number] for rank, numbers in known.items() if number in numbers}
        shapes = {_comparable(call.shape) for call in there.values()}
        if len(shapes) > 1:
            return _who_disagrees(state, there, known)
    return None


def _comparable(shape: CallShape) -> CallShape:
    """Return the part of a shape that must be the same on all ranks."""
    is_even = shape.operation in _EVEN or not shape.operation.endswith(_UNEVEN)
    # A broadcast of objects is received in a tensor of another shape and the same size.
    sizes = ((_elements(shape),),) if is_even else ()
    return CallShape(operation=shape.operation, sizes=sizes, dtypes=shape.dtypes if is_even else ())


def _elements(shape: CallShape) -> int:
    total = 0
    for sizes in shape.sizes:
        product = 1
        for size in sizes:
            product *= size
        total += product
    return total


def _who_disagrees(
    state: _GroupState, there: Mapping[int, Call], calls: Mapping[int, Mapping[int, Call]]
) -> HangVerdict:
    """Return the verdict on a number under which ranks called different collectives."""
    by_shape = Counter(_comparable(call.shape) for call in there.values())
    (usual, count), *_ = by_shape.most_common()
    prediction = None
    if count <= len(there) / 2:
        # As many for as against: the pattern of their common calls decides.
        number = next(iter(there.values())).number
        prediction = predict(_common(calls, number))
        if prediction is None:
            return _blame(HangCause.OTHER_COLLECTIVE, (), state.members, state.call)
        usual = _comparable(prediction.key[0])
    odd = [rank for rank, call in there.items() if _comparable(call.shape) != usual]
    if len(odd) == len(there):
        return _blame(HangCause.OTHER_COLLECTIVE, (), state.members, state.call)
    guilty = [rank for rank in state.members if rank.rank in odd]
    called = there[guilty[0].rank]
    normal = next(call for rank, call in there.items() if rank not in odd)
    others = [rank for rank in state.members if rank not in guilty]
    if _has_skipped(called, normal, calls):
        return _blame(HangCause.SKIPPED, guilty, others, normal)
    cause = HangCause.OTHER_COLLECTIVE
    if called.shape.operation == normal.shape.operation:
        is_type = called.shape.dtypes != normal.shape.dtypes
        cause = HangCause.OTHER_TYPE if is_type else HangCause.OTHER_SIZE
    return _blame(cause, guilty, others, normal, called)


def _common(calls: Mapping[int, Mapping[int, Call]], number: int) -> list[Key]:
    """Return the calls before the number that all ranks made alike, without a gap."""
    history: list[Key] = []
    first = max(min(numbers) for numbers in calls.values())
    for earlier in range(first, number):
        there = [numbers[earlier] for numbers in calls.values() if earlier in numbers]
        if len(there) < len(calls) or len({_comparable(call.shape) for call in there}) > 1:
            history.clear()
            continue
        history.append(key_of(there[0]))
    return history


def _has_skipped(called: Call, normal: Call, calls: Mapping[int, Mapping[int, Call]]) -> bool:
    """Return whether what the rank called comes after what the others called, as it did before."""
    history = _common(calls, normal.number)
    left_out, made = key_of(normal), key_of(called)
    # As at the end of an earlier block of steps, which exchanged durations of fewer or more steps.
    operation = called.shape.operation
    if operation != normal.shape.operation and any(
        earlier == left_out and later[0].operation == operation
        for earlier, later in pairwise(history)
    ):
        return True
    prediction = predict(history)
    return prediction is not None and prediction.key == left_out and made in prediction.following


# ---- RAS, and stacks alone


def _of_ras(evidence: Evidence) -> HangVerdict | None:
    """Return the verdict by the counts of NCCL's own service, where there is no recorder."""
    if not isinstance(evidence.ras, RasReport) or any(map(_is_read, evidence.ranks)):
        return None
    by_pid = {rank.process.pid: rank for rank in evidence.ranks}
    # Containers on several nodes may have the same process ids; RAS then names no rank for certain.
    if len(by_pid) < len(evidence.ranks):
        return None
    for communicator in evidence.ras.communicators:
        answered = [rank for rank in communicator.ranks if not rank.is_missing]
        silent = [by_pid[r.pid] for r in communicator.ranks if r.is_missing and r.pid in by_pid]
        if silent and answered:
            others = [by_pid[rank.pid] for rank in answered if rank.pid in by_pid]
            cause = _CAUSE_OF_WAIT.get(silent[0].wait, HangCause.NOT_ENTERED)
            return _blame(cause, silent, others, None)
        if (verdict := _fewest_launched(answered, by_pid)) is not None:
            return verdict
    return None


def _fewest_launched(
    answered: Sequence[RasRank], by_pid: Mapping[int, RankEvidence]
) -> HangVerdict | None:
    """Return the verdict on ranks that have launched fewer collectives of a kind."""
    kinds = dict.fromkeys(kind for rank in answered for kind in rank.launched)
    for kind in kinds:
        counts = [rank.launched.get(kind, 0) for rank in answered]
        if min(counts) == max(counts):
            continue
        late = [rank for rank in answered if rank.launched.get(kind, 0) < max(counts)]
        guilty = [by_pid[rank.pid] for rank in late if rank.pid in by_pid]
        others = [by_pid[r.pid] for r in answered if r not in late and r.pid in by_pid]
        if guilty and others:
            cause = _CAUSE_OF_WAIT.get(guilty[0].wait, HangCause.NOT_ENTERED)
            number = min(counts) + 1
            return _blame(cause, guilty, others, None, named=(_words_of_nccl(kind), number))
    return None


def _words_of_nccl(kind: str) -> str:
    """Return torch's name of a collective: `AllReduce` becomes `all_reduce`."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in kind).lstrip("_")


def _of_stacks(ranks: Sequence[RankEvidence]) -> HangVerdict | None:
    """Return the verdict where no collective tells: some ranks wait for others, by their stacks."""
    if any(not rank.stack for rank in ranks):
        return None
    waiting = [rank for rank in ranks if _waits_by_stack(rank)]
    guilty = [rank for rank in ranks if rank not in waiting]
    if not waiting or not guilty:
        return None
    cause = _CAUSE_OF_WAIT.get(guilty[0].wait, HangCause.NOT_ENTERED)
    return _blame(cause, guilty, waiting, None)


def _waits_by_stack(rank: RankEvidence) -> bool:
    # Where a recorder is read, a stack inside torch waits for nobody unless a collective is open.
    in_torch = rank.wait in (Wait.PEERS, Wait.DEVICE) and not _is_read(rank)
    return in_torch or rank.wait is Wait.BLOCK_END


def _blame(
    cause: HangCause,
    guilty: Sequence[RankEvidence],
    waiting: Sequence[RankEvidence],
    call: Call | None,
    called: Call | None = None,
    *,
    named: tuple[str, int] | None = None,
) -> HangVerdict:
    """Return the verdict on the first of `guilty`; nobody is blamed where there is none."""
    first = guilty[0] if guilty else None
    line: Frame | None = first.line if first else None
    if called is not None:
        line = called.place or line
    if call is not None:
        named = call.shape.operation, call.number
    return HangVerdict(
        cause=cause,
        rank=first.rank if first else None,
        host=first.place.host if first else None,
        device_kind=first.place.device_kind if first else None,
        device_index=first.place.device_index if first else None,
        pid=first.process.pid if first else None,
        also=tuple(rank.rank for rank in guilty[1:]),
        collective=named[0] if named else None,
        number=named[1] if named else None,
        line=str(line) if line else None,
        waiting_ranks=tuple(rank.rank for rank in waiting),
        called=str(called.shape) if called else None,
        expected=str(call.shape) if call and called else None,
    )
