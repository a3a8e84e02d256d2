"""Watches a running point for a rank that hangs, and says which rank it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from raybench.cluster import timeouts
from raybench.errors import traceback_of
from raybench.hangs.evidence import Evidence, describe
from raybench.hangs.suspicion import Look, RankProgress, next_look
from raybench.hangs.verdict import judge
from raybench.records.hang import HangCause, HangVerdict

# Evidence of a hang must stay the same this often.
_SIGHTINGS = 3
# These causes cannot go away by themselves. Any other rank may only be slow, as in an evaluation of
# its own.
_LASTING_CAUSES = (
    HangCause.DIED,
    HangCause.STOPPED,
    HangCause.SKIPPED,
    HangCause.OTHER_COLLECTIVE,
    HangCause.OTHER_SIZE,
    HangCause.OTHER_TYPE,
)

T = TypeVar("T")
# Yields while there is nothing to do, and returns its result in the end.
_Steps = Generator[None, None, T]
# Returns the answer; None while the answer is not there and its time is not over.
Request = Callable[[], T | None]


class WatchedRanks(Protocol):
    """Where progress and evidence of ranks come from. No method waits for an answer."""

    def ask_progress(self) -> Request[Mapping[int, RankProgress]]:
        """Ask for rank -> progress; ranks without known progress are missing."""
        return dict

    def ask_evidence(self) -> Request[Evidence]:
        """Ask what is known of all ranks; no rank is there if a node does not answer."""
        return lambda: Evidence(ranks=())


@dataclass(frozen=True, slots=True, kw_only=True)
class HangFinding:
    """A verdict and what it rests on."""

    # None if the search for the hanging rank failed.
    verdict: HangVerdict | None
    # The evidence as text, or the error of the search.
    description: str


class HangWatch:
    """The watch over one point. It never waits, so it delays nothing."""

    def __init__(
        self,
        ranks: WatchedRanks,
        hang_s: float | None,
        tell: Callable[[HangVerdict], None],
    ) -> None:
        """Begin to watch.

        Args:
            ranks: the ranks of the point.
            hang_s: how long a point may go on after a verdict; None does not end it.
            tell: gets each new verdict.
        """
        self._ranks, self._hang_s, self._tell = ranks, hang_s, tell
        self._missing: frozenset[int] = frozenset()
        # Whether a rank has answered since the progress was last read.
        self._has_answered = False
        # Rank -> its blocks, and whether it is in a block, when the progress was last read.
        self._blocks: dict[int, tuple[int, bool]] = {}
        self._found: HangFinding | None = None
        self._found_s = 0.0
        self._told: HangVerdict | None = None
        self._is_asking = False
        self._steps = self._watch()

    @property
    def finding(self) -> HangFinding | None:
        """The last verdict; None if there is none or if a rank has moved since."""
        return self._found

    @property
    def poll_s(self) -> float:
        """How long the caller may wait before it calls `is_over` again."""
        return timeouts.HANG_POLL_S if self._is_asking else timeouts.POINT_LOOKS_AT_NODES_EVERY_S

    def is_over(self, missing: Collection[int]) -> bool:
        """Go on with the watch, and return whether `hang_s` has passed since a verdict.

        Args:
            missing: ranks that have not answered.
        """
        if not missing:
            return False
        if frozenset(missing) != self._missing:
            self._missing = frozenset(missing)
            self._has_answered, self._found = True, None
        try:
            next(self._steps)
        except Exception as error:
            # A point must not fail because the search for a hanging rank fails. The row shows the
            # error if the point reaches its time limit.
            self._found = HangFinding(verdict=None, description=traceback_of(error))
            self._steps, self._is_asking = _do_nothing(), False
        if self._found is None or self._found.verdict is None or self._hang_s is None:
            return False
        return time.monotonic() >= self._found_s + self._hang_s

    def _watch(self) -> _Steps[None]:
        """Read the progress from time to time, and look at the ranks when a look is due."""
        # Looks since the last progress.
        looks = 0
        yield from _pause(timeouts.HANG_FIRST_LOOK_S)
        while True:
            ranks = yield from self._read_progress()
            looks = looks if ranks.stand_still else 0
            look = next_look(ranks.progress, looks) if ranks.are_known else None
            left_s = look.due_s - time.monotonic() if look else timeouts.HANG_PROGRESS_EVERY_S
            if look and left_s <= 0:
                is_complete = yield from self._look(look)
                looks += is_complete
                left_s = timeouts.HANG_POLL_S if is_complete else timeouts.HANG_PROGRESS_EVERY_S
            # While there is a verdict, read the progress soon: the rank may go on.
            longest_s = timeouts.HANG_LONGEST_PAUSE_S
            if self._found is not None:
                longest_s = timeouts.HANG_PROGRESS_EVERY_S
            yield from _pause(min(left_s, longest_s))

    def _read_progress(self) -> _Steps[_Standing]:
        """Return how far the missing ranks are; forget the verdict if one of them has moved."""
        missing, has_moved = self._missing, self._has_answered
        self._has_answered = False
        told = yield from self._answer(self._ranks.ask_progress())
        progress = {rank: told[rank] for rank in missing if rank in told}
        blocks = {rank: (known.blocks, known.is_in_block) for rank, known in progress.items()}
        # Compare only ranks that are known both times: a late agent is no sign of progress.
        for rank, block in blocks.items():
            has_moved |= self._blocks.get(rank, block) != block
        if has_moved or self._has_answered:
            self._found = None
        self._blocks |= blocks
        return _Standing(
            progress=list(progress.values()),
            are_known=len(progress) == len(missing),
            stand_still=not (has_moved or self._has_answered),
        )

    def _look(self, look: Look) -> _Steps[bool]:
        """Collect evidence several times, and note the verdict if the evidence stays the same.

        Return whether all evidence came.
        """
        seen: list[Evidence] = []
        while len(seen) < _SIGHTINGS:
            if seen:
                yield from _pause(look.confirm_after_s / (_SIGHTINGS - 1))
            evidence = yield from self._answer(self._ranks.ask_evidence())
            if not evidence.ranks:
                return False
            answered = {rank.rank for rank in evidence.ranks} - self._missing
            seen.append(evidence.with_answers(answered))
        standing = yield from self._read_progress()
        *earlier, last = seen
        verdicts = [judge(last, before, look.least_wait_s) for before in earlier]
        verdict = verdicts[0]
        if None in verdicts or verdict is None or verdict.cause is HangCause.UNKNOWN:
            self._found = None
        elif standing.stand_still:
            self._note(verdict, last)
        return True

    def _note(self, verdict: HangVerdict, evidence: Evidence) -> None:
        """Keep the verdict, and tell it once it is certain."""
        before = self._found.verdict if self._found else None
        if not _is_same_hang(before, verdict):
            self._found_s = time.monotonic()
        named = () if verdict.rank is None else (verdict.rank, *verdict.also)
        self._found = HangFinding(verdict=verdict, description=describe(evidence, named))
        is_certain = (
            self._hang_s is not None
            or verdict.cause in _LASTING_CAUSES
            or _is_same_hang(before, verdict)
        )
        if is_certain and not _is_same_hang(self._told, verdict):
            self._told = verdict
            self._tell(verdict)

    def _answer(self, request: Request[T]) -> _Steps[T]:
        """Return the answer of a request as soon as it is there."""
        self._is_asking = True
        while (answer := request()) is None:
            yield
        self._is_asking = False
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    """How far the ranks without an answer are."""

    progress: Sequence[RankProgress]
    # Whether the progress of all of them is known.
    are_known: bool
    # Whether none of them has moved since the progress was last read.
    stand_still: bool


def _pause(seconds: float) -> _Steps[None]:
    """Yield until so many seconds have passed."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        yield


def _do_nothing() -> _Steps[None]:
    while True:
        yield


def _is_same_hang(verdict: HangVerdict | None, other: HangVerdict) -> bool:
    return verdict is not None and (verdict.cause, verdict.rank) == (other.cause, other.rank)
