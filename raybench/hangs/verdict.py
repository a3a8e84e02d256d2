"""Which rank hangs and why, from the evidence of all ranks. Pure.

No rank is blamed where the evidence fits several ranks, or where all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from raybench.hangs.evidence import Evidence, RankEvidence
from raybench.hangs.mismatch import find_mismatch
from raybench.hangs.ras import RasRank, RasReport
from raybench.hangs.recorder import Call, Stage
from raybench.hangs.stacks import Frame, Wait
from raybench.records.hang import HangCause, HangVerdict, RecorderState

_CAUSE_OF_WAIT = {
    Wait.SLEEP: HangCause.SLEEPS,
    Wait.LOCK: HangCause.WAITS_FOR_LOCK,
    Wait.DATA: HangCause.WAITS_FOR_DATA,
    Wait.DEVICE: HangCause.DEVICE_BUSY,
    # The rank has made as many steps as the others with fewer collectives.
    Wait.BLOCK_END: HangCause.SKIPPED,
    Wait.POINT_END: HangCause.SKIPPED,
}
# A rank that waits so has not left its code for long; it may be late in a collective.
_WAITS_OF_PEERS = (Wait.PEERS, Wait.DEVICE, Wait.BLOCK_END, Wait.POINT_END)


def judge(evidence: Evidence, before: Evidence | None, least_wait_s: float) -> HangVerdict | None:
    """Return the verdict; None where the ranks go on, a rank works, or no rank stands out.

    Args:
        before: an earlier look at the same ranks; None if there was none.
        least_wait_s: a rank waits in a collective after so long.
    """
    if before is not None and _has_moved(evidence, before):
        return None
    judges: Sequence[Callable[[], HangVerdict | None]] = (
        lambda: _judge_processes(evidence.ranks, least_wait_s),
        lambda: _judge_collectives(evidence.ranks, least_wait_s),
        lambda: _judge_launches(evidence),
        lambda: _judge_stacks(evidence.ranks),
    )
    verdicts = (judge() for judge in judges)
    verdict = next((verdict for verdict in verdicts if verdict is not None), None)
    if verdict is None or _works(verdict, evidence, before):
        return None
    order = list(RecorderState)
    worst = max((rank.recorder for rank in evidence.ranks), key=order.index)
    return replace(verdict, recorder=worst)


def _has_moved(now: Evidence, before: Evidence) -> bool:
    """Return whether any rank has entered or finished a collective between two looks."""
    for new, old in zip(now.ranks, before.ranks, strict=True):
        if new.recorder is old.recorder and _progress(new) != _progress(old):
            return True
    return False


def _progress(rank: RankEvidence) -> Mapping[str, tuple[int, int]]:
    """Return group -> number of the last call, and count of unfinished calls."""
    groups = {call.group for call in rank.recording.calls}
    return {
        group: (rank.recording.last_number(group), len(rank.recording.pending(group)))
        for group in groups
    }


def _works(verdict: HangVerdict, now: Evidence, before: Evidence | None) -> bool:
    """Return whether the named rank is late because it works, as in an evaluation of its own."""
    ranks = [*now.ranks, *(before.ranks if before else ())]
    looks = [rank for rank in ranks if rank.rank == verdict.rank]
    if any(rank.wait is Wait.COMPILER for rank in looks):
        return True
    if verdict.cause not in (HangCause.NOT_ENTERED, HangCause.DEVICE_BUSY):
        return False
    calls = {_calls_on(rank.stack) for rank in looks if rank.stack}
    return len(calls) > 1


def _calls_on(stack: Sequence[Frame]) -> tuple[object, ...]:
    """Return a stack without the line of its innermost frame, which changes in an endless loop."""
    inner, *outer = stack
    return (inner.path, inner.function, *outer)


# ---- processes


def _judge_processes(ranks: Sequence[RankEvidence], least_wait_s: float) -> HangVerdict | None:
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
    """Return the earliest call of any group in which the rank waits."""
    pending = (call for call in rank.recording.calls if call.stage is not Stage.DONE)
    return next((call for call in pending if call.age_s >= least_wait_s), None)


# ---- flight recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupState:
    """Where the ranks of a process group are in its calls."""

    name: str
    members: tuple[RankEvidence, ...]
    # Number of the earliest unfinished call.
    number: int
    # Ranks that wait in this call or in a later one.
    waiting: tuple[RankEvidence, ...]
    call: Call
    # Members that have entered only earlier calls.
    behind: tuple[RankEvidence, ...]


def _judge_collectives(ranks: Sequence[RankEvidence], least_wait_s: float) -> HangVerdict | None:
    """Return the verdict by the collectives that the ranks have entered."""
    states = list(_group_states(ranks, least_wait_s))
    for state in states:
        if (verdict := _judge_calls(state)) is not None:
            return verdict
    waiting = {rank.rank for state in states for rank in state.waiting}
    for state in states:
        # A rank that waits in another group is late for the sake of that group.
        guilty = [rank for rank in state.behind if rank.rank not in waiting]
        if guilty and len(guilty) < len(state.members):
            return _not_entered(guilty, state)
    for state in states:
        if not state.behind:
            return _not_finished(state)
    if states:
        state = states[0]
        return _blame(HangCause.UNKNOWN, (), state.waiting, state.call)
    return None


def _group_states(ranks: Sequence[RankEvidence], least_wait_s: float) -> Iterator[_GroupState]:
    """Yield each group in whose calls ranks wait."""
    names = dict.fromkeys(call.group for rank in ranks for call in rank.recording.calls)
    for name in names:
        members = _members(ranks, name)
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


def _members(ranks: Sequence[RankEvidence], group: str) -> tuple[RankEvidence, ...]:
    """Return the ranks of a group; ranks without a recording may be in any group."""
    lists = (rank.recording.members.get(group) for rank in ranks)
    numbers = next((members for members in lists if members), None)
    if numbers is not None:
        return tuple(rank for rank in ranks if rank.rank in numbers)
    return tuple(rank for rank in ranks if _calls_in(rank, group) or not _is_read(rank))


def _calls_in(rank: RankEvidence, group: str) -> dict[int, Call]:
    """Return number -> call, for the calls of the rank in a group."""
    return {call.number: call for call in rank.recording.calls if call.group == group}


def _is_read(rank: RankEvidence) -> bool:
    return rank.recorder is RecorderState.ON


def _is_behind(rank: RankEvidence, group: str, number: int) -> bool:
    """Return whether the rank has not entered the call; without its recorder, by its stack."""
    if _is_read(rank):
        return rank.recording.last_number(group) < number
    # The stack came without a recording, so the rank's own code keeps the interpreter lock. A
    # rank without a stack may only be slow to answer.
    keeps_lock = rank.recorder is RecorderState.NO_ANSWER and bool(rank.stack)
    return keeps_lock and rank.wait not in _WAITS_OF_PEERS


def _not_entered(late: Sequence[RankEvidence], state: _GroupState) -> HangVerdict:
    """Return the verdict on ranks that are elsewhere while others wait in a collective."""
    guilty = _running_first(late)
    cause = _CAUSE_OF_WAIT.get(guilty[0].wait, HangCause.NOT_ENTERED)
    waiting = [rank for rank in state.waiting if rank not in guilty]
    if cause is HangCause.SKIPPED and len(guilty) > len(waiting):
        # Most ranks have finished their steps, so the waiting ranks may have entered one call too
        # many.
        return _blame(HangCause.UNKNOWN, (), waiting, state.call)
    return _blame(cause, guilty, waiting, state.call)


def _running_first(ranks: Sequence[RankEvidence]) -> list[RankEvidence]:
    """Return the ranks with those that have answered at the end."""
    return sorted(ranks, key=lambda rank: rank.wait is Wait.POINT_END)


def _not_finished(state: _GroupState) -> HangVerdict:
    """Return the verdict where all members have entered the call."""
    stages = {}
    for rank in state.members:
        call = _calls_in(rank, state.name).get(state.number)
        stages[rank.rank] = call.stage if call else None
    not_begun = [rank for rank in state.members if stages[rank.rank] is Stage.ENTERED]
    # Without times of collectives no call is known to have begun.
    if not_begun and Stage.BEGUN in stages.values():
        others = [rank for rank in state.members if rank not in not_begun]
        return _blame(HangCause.DEVICE_BUSY, not_begun, others, state.call)
    verdict = _blame(HangCause.NOT_FINISHED, (), state.members, state.call)
    return replace(verdict, slowest_pair=_slowest_pair(state))


def _slowest_pair(state: _GroupState) -> tuple[int, ...]:
    """Return the two members that have finished the fewest calls; empty if not two stand out."""
    first_pending = []
    for rank in state.members:
        numbers = [call.number for call in rank.recording.pending(state.name)]
        last = rank.recording.last_number(state.name)
        first_pending.append((min(numbers, default=last + 1), rank.rank))
    first_pending.sort()
    slowest, others = first_pending[:2], first_pending[2:]
    stand_out = not others or slowest[1][0] < others[0][0]
    return tuple(sorted(rank for _, rank in slowest)) if stand_out else ()


def _judge_calls(state: _GroupState) -> HangVerdict | None:
    """Return the verdict where members called different collectives under the same number."""
    calls = {rank.rank: _calls_in(rank, state.name) for rank in state.members if _is_read(rank)}
    calls = {rank: own for rank, own in calls.items() if own}
    mismatch = find_mismatch(calls, state.number) if len(calls) > 1 else None
    if mismatch is None:
        return None
    guilty = [rank for rank in state.members if rank.rank in mismatch.ranks]
    others = [rank for rank in state.members if rank not in guilty]
    if mismatch.expected is None or mismatch.called is None:
        return _blame(mismatch.cause, (), others, state.call)
    verdict = _blame(mismatch.cause, guilty, others, mismatch.expected)
    if mismatch.cause is HangCause.SKIPPED:
        return verdict
    called, expected = str(mismatch.called.shape), str(mismatch.expected.shape)
    return replace(verdict, called=called, expected=expected)


# ---- RAS


def _judge_launches(evidence: Evidence) -> HangVerdict | None:
    """Return the verdict by the counts of NCCL's RAS service, where no recorder was read."""
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
        if (verdict := _fewest_launches(answered, by_pid)) is not None:
            return verdict
    return None


def _fewest_launches(
    answered: Sequence[RasRank], by_pid: Mapping[int, RankEvidence]
) -> HangVerdict | None:
    """Return the verdict on ranks that have launched fewer collectives of a kind."""
    kinds = dict.fromkeys(kind for rank in answered for kind in rank.launched)
    for kind in kinds:
        counts = [rank.launched.get(kind, 0) for rank in answered]
        if min(counts) == max(counts):
            continue
        late = [rank for rank in answered if rank.launched.get(kind, 0) < max(counts)]
        guilty = _running_first([by_pid[rank.pid] for rank in late if rank.pid in by_pid])
        others = [by_pid[r.pid] for r in answered if r not in late and r.pid in by_pid]
        if guilty and others:
            cause = _CAUSE_OF_WAIT.get(guilty[0].wait, HangCause.NOT_ENTERED)
            verdict = _blame(cause, guilty, others, None)
            return replace(verdict, collective=_name_in_torch(kind), number=min(counts) + 1)
    return None


def _name_in_torch(kind: str) -> str:
    """Return torch's name of a collective: `AllReduce` becomes `all_reduce`."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in kind).lstrip("_")


# ---- stacks alone


def _judge_stacks(ranks: Sequence[RankEvidence]) -> HangVerdict | None:
    """Return the verdict where some ranks wait for others by their stacks."""
    if any(not rank.stack and rank.wait is not Wait.POINT_END for rank in ranks):
        return None
    waiting = [rank for rank in ranks if _waits_by_stack(rank)]
    guilty = _running_first([rank for rank in ranks if rank not in waiting])
    if not waiting or not guilty:
        return None
    cause = _CAUSE_OF_WAIT.get(guilty[0].wait, HangCause.NOT_ENTERED)
    return _blame(cause, guilty, waiting, None)


def _waits_by_stack(rank: RankEvidence) -> bool:
    # A rank whose recorder shows no open collective waits for nobody inside torch.
    in_torch = rank.wait in (Wait.PEERS, Wait.DEVICE) and not _is_read(rank)
    return in_torch or rank.wait is Wait.BLOCK_END


def _blame(
    cause: HangCause,
    guilty: Sequence[RankEvidence],
    waiting: Sequence[RankEvidence],
    call: Call | None,
) -> HangVerdict:
    """Return the verdict on the first of `guilty`, or on no rank if there is none.

    Args:
        call: the collective in which other ranks wait.
    """
    verdict = HangVerdict(
        cause=cause,
        also=tuple(rank.rank for rank in guilty[1:]),
        waiting_ranks=tuple(rank.rank for rank in waiting),
    )
    if call is not None:
        waited_s = call.age_s if call.stage is not Stage.DONE else None
        operation = call.shape.operation
        verdict = replace(verdict, collective=operation, number=call.number, waited_s=waited_s)
    if not guilty:
        return verdict
    first = guilty[0]
    return replace(
        verdict,
        rank=first.rank,
        host=first.place.host,
        device_kind=first.place.device_kind,
        device_index=first.place.device_index,
        pid=first.process.pid,
        line=str(first.line) if first.line else None,
    )
