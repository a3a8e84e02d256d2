"""Decides from the evidence of all ranks which rank hangs and why. Pure.

No rank is blamed if the evidence fits several explanations, or if all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from raybench.hangs.evidence import Evidence, RankEvidence
from raybench.hangs.mismatch import find_mismatch
from raybench.hangs.ras import RasRank, RasReport
from raybench.hangs.recorder import Call, Stage
from raybench.hangs.stacks import Frame, Wait
from raybench.records.hang import HangCause, HangVerdict, RecorderState

# What a late rank waits for -> the cause of the hang.
_CAUSE_OF_WAIT = {
    Wait.SLEEP: HangCause.SLEEPS,
    Wait.LOCK: HangCause.WAITS_FOR_LOCK,
    Wait.DATA: HangCause.WAITS_FOR_DATA,
    Wait.DEVICE: HangCause.DEVICE_BUSY,
    # The rank has run as many steps as the other ranks, but fewer collectives.
    Wait.BLOCK_END: HangCause.SKIPPED,
    Wait.POINT_END: HangCause.SKIPPED,
}
# Waits inside torch or raybench. They do not show that the rank's own code is stuck.
_WAITS_OUTSIDE_USER_CODE = (Wait.PEERS, Wait.DEVICE, Wait.BLOCK_END, Wait.POINT_END)


def judge(evidence: Evidence, earlier: Evidence | None, min_wait_s: float) -> HangVerdict | None:
    """Return which rank hangs; None if a rank makes progress, works, or none stands out.

    Args:
        earlier: evidence collected some seconds before, if any.
        min_wait_s: a rank that has been in a collective for a shorter time is not waiting.
    """
    if earlier is not None and _has_progressed(evidence, earlier):
        return None
    # The most certain kind of evidence comes first.
    verdict = (
        _judge_processes(evidence.ranks, min_wait_s)
        or _judge_collectives(evidence.ranks, min_wait_s)
        or _judge_launches(evidence)
        or _judge_stacks(evidence.ranks)
    )
    if verdict is None or _is_working(verdict, evidence, earlier):
        return None
    best_to_worst = list(RecorderState)
    worst_recorder = max((rank.recorder for rank in evidence.ranks), key=best_to_worst.index)
    return replace(verdict, recorder=worst_recorder)


def _has_progressed(evidence: Evidence, earlier: Evidence) -> bool:
    """Return whether any rank has entered or finished a collective in the meantime."""
    for now, before in zip(evidence.ranks, earlier.ranks, strict=True):
        # A recorder that answers only now, or no longer, proves no progress.
        has_same_recorder = now.recorder is before.recorder
        if has_same_recorder and _call_counts(now) != _call_counts(before):
            return True
    return False


def _call_counts(rank: RankEvidence) -> Mapping[str, tuple[int, int]]:
    """Return group -> sequence number of the last call, and number of unfinished calls."""
    groups = {call.group for call in rank.recording.calls}
    return {
        group: (rank.recording.last_number(group), len(rank.recording.pending(group)))
        for group in groups
    }


def _is_working(verdict: HangVerdict, evidence: Evidence, earlier: Evidence | None) -> bool:
    """Return whether the blamed rank only works for long: it compiles, or its stack changes."""
    ranks = [*evidence.ranks, *(earlier.ranks if earlier else ())]
    # The blamed rank at two moments, or at one moment without earlier evidence.
    blamed = [rank for rank in ranks if rank.rank == verdict.rank]
    if any(rank.wait is Wait.COMPILER for rank in blamed):
        return True
    # Only with these causes may the rank still compute.
    if verdict.cause not in (HangCause.NOT_ENTERED, HangCause.DEVICE_BUSY):
        return False
    stacks = {_without_innermost_line(rank.stack) for rank in blamed if rank.stack}
    return len(stacks) > 1


def _without_innermost_line(stack: Sequence[Frame]) -> tuple[object, ...]:
    """Drop the innermost line number, because this number changes even in an endless loop."""
    innermost, *outer = stack
    return (innermost.path, innermost.function, *outer)


# ---- processes


def _judge_processes(ranks: Sequence[RankEvidence], min_wait_s: float) -> HangVerdict | None:
    """Blame ranks whose processes have died, else ranks whose processes are stopped."""
    ended = [rank for rank in ranks if rank.process.has_ended]
    stopped = [rank for rank in ranks if rank.process.is_stopped]
    guilty = ended or stopped
    if not guilty:
        return None
    waiting, first_call = [], None
    for rank in ranks:
        call = _first_waiting_call(rank, min_wait_s)
        if call is not None and rank not in guilty:
            waiting.append(rank)
            first_call = first_call or call
    cause = HangCause.DIED if ended else HangCause.STOPPED
    return _blame(cause, guilty, waiting, first_call)


def _first_waiting_call(rank: RankEvidence, min_wait_s: float) -> Call | None:
    """Return the earliest call, of any group, in which the rank waits."""
    for call in rank.recording.calls:  # in order of entry
        if call.stage is not Stage.DONE and call.age_s >= min_wait_s:
            return call
    return None


# ---- flight recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupState:
    """How far the ranks of a process group are in its earliest unfinished call."""

    name: str
    members: tuple[RankEvidence, ...]
    # The earliest call in which a member waits.
    call: Call
    # Members that wait in this call or in a later call.
    waiting: tuple[RankEvidence, ...]
    # Members that have not entered the call.
    late: tuple[RankEvidence, ...]


def _judge_collectives(ranks: Sequence[RankEvidence], min_wait_s: float) -> HangVerdict | None:
    """Return the verdict from the collectives that the ranks have entered."""
    # A state for each process group with waiting ranks.
    states = list(_group_states(ranks, min_wait_s))
    if not states:
        return None
    for state in states:
        if (verdict := _judge_mismatch(state)) is not None:
            return verdict
    waiting = {rank.rank for state in states for rank in state.waiting}
    for state in states:
        # A rank that waits in another group is not guilty: the other group holds this rank up.
        guilty = [rank for rank in state.late if rank.rank not in waiting]
        # If all members were guilty, none of them would stand out.
        if guilty and len(guilty) < len(state.members):
            return _judge_late(guilty, state)
    # No rank is guilty. If all members have entered a call, this call itself does not finish.
    for state in states:
        if not state.late:
            return _judge_unfinished(state)
    return _blame(HangCause.UNKNOWN, (), states[0].waiting, states[0].call)


def _group_states(ranks: Sequence[RankEvidence], min_wait_s: float) -> Iterator[_GroupState]:
    """Yield the state of each group that has a waiting rank."""
    names = dict.fromkeys(call.group for rank in ranks for call in rank.recording.calls)
    for name in names:
        members = _members(ranks, name)
        # Rank -> the earliest call in which it waits.
        waiting_calls = {}
        for rank in members:
            calls = [call for call in rank.recording.pending(name) if call.age_s >= min_wait_s]
            if calls:
                waiting_calls[rank.rank] = min(calls, key=lambda call: call.number)
        if not waiting_calls or len(members) < 2:
            continue
        call = min(waiting_calls.values(), key=lambda call: call.number)
        yield _GroupState(
            name=name,
            members=members,
            call=call,
            waiting=tuple(rank for rank in members if rank.rank in waiting_calls),
            late=tuple(rank for rank in members if not _has_entered(rank, call)),
        )


def _members(ranks: Sequence[RankEvidence], group: str) -> tuple[RankEvidence, ...]:
    """Return the ranks of a group."""
    for rank in ranks:
        recorded_members = rank.recording.members.get(group)
        if recorded_members:
            return tuple(member for member in ranks if member.rank in recorded_members)
    # torch has not recorded the members. A rank without a recording may be in any group.
    return tuple(rank for rank in ranks if _calls_in(rank, group) or not _has_recording(rank))


def _calls_in(rank: RankEvidence, group: str) -> dict[int, Call]:
    """Return sequence number -> call, for the calls of the rank in a group."""
    return {call.number: call for call in rank.recording.calls if call.group == group}


def _has_recording(rank: RankEvidence) -> bool:
    return rank.recorder is RecorderState.ON


def _has_entered(rank: RankEvidence, call: Call) -> bool:
    """Return whether the rank has entered the call; without a recording the stack decides."""
    if _has_recording(rank):
        return rank.recording.last_number(call.group) >= call.number
    if rank.wait in _WAITS_OUTSIDE_USER_CODE:
        return True
    # If the process sent a stack but no recording, the user's code holds the GIL, so the rank has
    # not entered. A process that sent neither may only be slow.
    holds_gil = rank.recorder is RecorderState.NO_ANSWER and bool(rank.stack)
    return not holds_gil


def _judge_late(late: Sequence[RankEvidence], state: _GroupState) -> HangVerdict:
    """Return the verdict on ranks that have not entered the call in which other ranks wait."""
    guilty = _sort_ended_last(late)
    cause = _cause_of_late(guilty[0])
    waiting = [rank for rank in state.waiting if rank not in guilty]
    if cause is HangCause.SKIPPED and len(guilty) > len(waiting):
        # Most ranks have finished their steps, so the waiting ranks may have called one collective
        # too many.
        return _blame(HangCause.UNKNOWN, (), waiting, state.call)
    return _blame(cause, guilty, waiting, state.call)


def _cause_of_late(rank: RankEvidence) -> HangCause:
    """Return why a rank has not entered a collective, by what the rank waits for."""
    return _CAUSE_OF_WAIT.get(rank.wait, HangCause.NOT_ENTERED)


def _sort_ended_last(ranks: Sequence[RankEvidence]) -> list[RankEvidence]:
    """Move ranks that have ended the point to the end, so that a verdict names a running rank."""
    return sorted(ranks, key=lambda rank: rank.wait is Wait.POINT_END)


def _judge_unfinished(state: _GroupState) -> HangVerdict:
    """Return the verdict if all members have entered a call that does not finish."""
    # Rank -> how far the call is there; None if the recording no longer has the call.
    stages = {}
    for rank in state.members:
        call = _calls_in(rank, state.name).get(state.call.number)
        stages[rank.rank] = call.stage if call else None
    not_begun = [rank for rank in state.members if stages[rank.rank] is Stage.ENTERED]
    # If the call runs on some devices but not on others, the other devices are busy.
    if not_begun and Stage.BEGUN in stages.values():
        others = [rank for rank in state.members if rank not in not_begun]
        return _blame(HangCause.DEVICE_BUSY, not_begun, others, state.call)
    verdict = _blame(HangCause.NOT_FINISHED, (), state.members, state.call)
    return replace(verdict, slowest_pair=_slowest_pair(state))


def _slowest_pair(state: _GroupState) -> tuple[int, ...]:
    """Return the two members that have finished the fewest calls; empty if no two stand out."""
    # Rank -> sequence number of its first unfinished call.
    positions = {}
    for rank in state.members:
        pending = [call.number for call in rank.recording.pending(state.name)]
        next_number = rank.recording.last_number(state.name) + 1
        positions[rank.rank] = min(pending, default=next_number)
    slowest_first = sorted(positions, key=lambda rank: (positions[rank], rank))
    pair, others = slowest_first[:2], slowest_first[2:]
    # The pair stands out if the third slowest rank is further than both.
    if others and positions[others[0]] <= positions[pair[1]]:
        return ()
    return tuple(sorted(pair))


def _judge_mismatch(state: _GroupState) -> HangVerdict | None:
    """Return the verdict if members called different collectives under the same number."""
    # Rank -> sequence number -> call.
    calls_of_ranks = {}
    for rank in state.members:
        calls = _calls_in(rank, state.name)
        if calls and _has_recording(rank):
            calls_of_ranks[rank.rank] = calls
    if len(calls_of_ranks) < 2:
        return None
    mismatch = find_mismatch(calls_of_ranks, state.call.number)
    if mismatch is None:
        return None
    guilty = [rank for rank in state.members if rank.rank in mismatch.ranks]
    others = [rank for rank in state.members if rank not in guilty]
    if mismatch.expected is None or mismatch.called is None:
        # Nobody can say which of the collectives is wrong.
        return _blame(mismatch.cause, (), others, state.call)
    verdict = _blame(mismatch.cause, guilty, others, mismatch.expected)
    if mismatch.cause is HangCause.SKIPPED:
        # The guilty rank's call is right, but too early.
        return verdict
    called, expected = str(mismatch.called.shape), str(mismatch.expected.shape)
    return replace(verdict, called=called, expected=expected)


# ---- RAS


def _judge_launches(evidence: Evidence) -> HangVerdict | None:
    """Return the verdict from NCCL's RAS service, if there is no recording of any rank."""
    if not isinstance(evidence.ras, RasReport) or any(map(_has_recording, evidence.ranks)):
        return None
    by_pid = {rank.process.pid: rank for rank in evidence.ranks}
    # Containers may use the same process ids, so a process id would not identify a rank.
    if len(by_pid) < len(evidence.ranks):
        return None
    for communicator in evidence.ras.communicators:
        ras_ranks = [rank for rank in communicator.ranks if rank.pid in by_pid]
        # The process of a missing rank did not answer NCCL.
        answered = [rank for rank in ras_ranks if not rank.is_missing]
        missing = [by_pid[rank.pid] for rank in ras_ranks if rank.is_missing]
        if missing and answered:
            others = [by_pid[rank.pid] for rank in answered]
            cause = _cause_of_late(missing[0])
            return _blame(cause, missing, others, None)
        if (verdict := _judge_launch_counts(answered, by_pid)) is not None:
            return verdict
    return None


def _judge_launch_counts(
    answered: Sequence[RasRank], by_pid: Mapping[int, RankEvidence]
) -> HangVerdict | None:
    """Blame the ranks that have launched fewer collectives of one kind than the other ranks."""
    # NCCL's names of collectives, such as AllReduce.
    kinds = dict.fromkeys(kind for rank in answered for kind in rank.launched)
    for kind in kinds:
        # Process id -> number of launches.
        counts = {rank.pid: rank.launched.get(kind, 0) for rank in answered}
        smallest, largest = min(counts.values()), max(counts.values())
        if smallest == largest:
            continue
        late = [by_pid[pid] for pid, count in counts.items() if count < largest]
        others = [by_pid[pid] for pid, count in counts.items() if count == largest]
        guilty = _sort_ended_last(late)
        cause = _cause_of_late(guilty[0])
        verdict = _blame(cause, guilty, others, None)
        return replace(verdict, collective=_torch_name(kind), number=smallest + 1)
    return None


def _torch_name(kind: str) -> str:
    """Return torch's name of a collective: `AllReduce` becomes `all_reduce`."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in kind).lstrip("_")


# ---- stacks alone


def _judge_stacks(ranks: Sequence[RankEvidence]) -> HangVerdict | None:
    """Return the verdict from the stacks alone, if all running ranks have sent a stack."""
    if any(not rank.stack and rank.wait is not Wait.POINT_END for rank in ranks):
        return None
    waiting = [rank for rank in ranks if _waits_by_stack(rank)]
    guilty = _sort_ended_last([rank for rank in ranks if rank not in waiting])
    if not waiting or not guilty:
        return None
    cause = _cause_of_late(guilty[0])
    return _blame(cause, guilty, waiting, None)


def _waits_by_stack(rank: RankEvidence) -> bool:
    """Return whether the stack shows that the rank waits for other ranks."""
    if rank.wait is Wait.BLOCK_END:
        return True
    # A recording would have shown the collective in which the rank waits.
    return rank.wait in (Wait.PEERS, Wait.DEVICE) and not _has_recording(rank)


def _blame(
    cause: HangCause,
    guilty: Sequence[RankEvidence],
    waiting: Sequence[RankEvidence],
    call: Call | None,
) -> HangVerdict:
    """Return the verdict that blames the first guilty rank, if there is one.

    Args:
        call: the collective in which the waiting ranks are, if known.
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
