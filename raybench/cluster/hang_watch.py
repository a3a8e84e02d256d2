"""Watches a running point and reports the rank that hangs."""

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

# A look collects evidence this often; no rank may make progress in between.
_COLLECTIONS_PER_LOOK = 3
# These causes never go away. With another cause the rank may only be slow, for example while it
# evaluates alone.
_LASTING_CAUSES = (
    HangCause.DIED,
    HangCause.STOPPED,
    HangCause.SKIPPED,
    HangCause.OTHER_COLLECTIVE,
    HangCause.OTHER_SIZE,
    HangCause.OTHER_TYPE,
)

T = TypeVar("T")
# A coroutine of the watch: it yields while it has nothing to do, and returns a result.
_Coroutine = Generator[None, None, T]
# Returns None until the answer has arrived or its time is over.
Request = Callable[[], T | None]


class WatchedRanks(Protocol):
    """Source of progress and evidence of the ranks. No method waits for an answer."""

    def ask_progress(self) -> Request[Mapping[int, RankProgress]]:
        """Ask for rank -> progress; ranks whose progress is unknown are omitted."""
        return dict

    def ask_evidence(self) -> Request[Evidence]:
        """Ask for evidence on all ranks; it is empty if a node does not answer."""
        return lambda: Evidence(ranks=())


@dataclass(frozen=True, slots=True, kw_only=True)
class HangFinding:
    """A verdict and the evidence for it."""

    # None if the search for the hanging rank raised an error.
    verdict: HangVerdict | None
    # The evidence as text, or the error of the search.
    description: str


class HangWatch:
    """Watches one point for a rank that hangs. No method waits."""

    def __init__(
        self,
        ranks: WatchedRanks,
        hang_s: float | None,
        report: Callable[[HangVerdict], None],
    ) -> None:
        """Begin to watch.

        Args:
            ranks: the ranks of the point.
            hang_s: how long a point may go on after a verdict; None does not end it.
            report: called with each new verdict that is certain.
        """
        self._ranks, self._hang_s, self._report = ranks, hang_s, report
        # Ranks that have not ended the point.
        self._running: frozenset[int] = frozenset()
        # Whether a rank has ended the point since the progress was last read.
        self._has_rank_ended = False
        # Rank -> (number of finished blocks, whether it is in a block), as last read.
        self._blocks: dict[int, tuple[int, bool]] = {}
        self._finding: HangFinding | None = None
        # When the verdict of the finding was first made.
        self._verdict_s = 0.0
        # The last verdict that `report` got.
        self._reported: HangVerdict | None = None
        # Whether `ask_progress` or `ask_evidence` has an open request.
        self._awaits_answer = False
        # `is_over` continues this coroutine at each call.
        self._watching = self._watch()

    @property
    def finding(self) -> HangFinding | None:
        """The last verdict; None if there is none or if a rank has made progress since."""
        return self._finding

    @property
    def poll_s(self) -> float:
        """How long the caller may wait before it calls `is_over` again."""
        return (
            timeouts.HANG_POLL_S if self._awaits_answer else timeouts.POINT_LOOKS_AT_NODES_EVERY_S
        )

    def is_over(self, running: Collection[int]) -> bool:
        """Continue the watch, and return whether `hang_s` has passed since a verdict.

        Args:
            running: ranks that have not ended the point.
        """
        if not running:
            return False
        if frozenset(running) != self._running:
            self._running = frozenset(running)
            self._has_rank_ended, self._finding = True, None
        try:
            # Run `_watch` until it has to wait.
            next(self._watching)
        except Exception as error:
            # A point must not fail because the search for a hanging rank fails. The row shows the
            # error if the point reaches its time limit.
            self._finding = HangFinding(verdict=None, description=traceback_of(error))
            self._watching, self._awaits_answer = _do_nothing(), False
        if self._finding is None or self._finding.verdict is None or self._hang_s is None:
            return False
        return time.monotonic() >= self._verdict_s + self._hang_s

    def _watch(self) -> _Coroutine[None]:
        """Read the ranks' progress regularly, and collect evidence of a hang when a look is due."""
        looks_since_progress = 0
        yield from _pause(timeouts.HANG_FIRST_LOOK_S)
        while True:
            standing = yield from self._read_progress()
            if standing.has_progressed:
                looks_since_progress = 0
            look = None
            if standing.is_complete:
                look = next_look(standing.progress, looks_since_progress)
            pause_s = look.due_s - time.monotonic() if look else timeouts.HANG_PROGRESS_EVERY_S
            if look and pause_s <= 0:
                have_all_answered = yield from self._look(look)
                pause_s = timeouts.HANG_PROGRESS_EVERY_S
                if have_all_answered:
                    # Go on at once, to learn when the next look is due.
                    looks_since_progress += 1
                    pause_s = timeouts.HANG_POLL_S
            # After a verdict the rank may go on, so read its progress more often.
            max_pause_s = timeouts.HANG_LONGEST_PAUSE_S
            if self._finding is not None:
                max_pause_s = timeouts.HANG_PROGRESS_EVERY_S
            yield from _pause(min(pause_s, max_pause_s))

    def _read_progress(self) -> _Coroutine[_Standing]:
        """Return how far the running ranks are; drop the finding if a rank has made progress."""
        running, has_progressed = self._running, self._has_rank_ended
        self._has_rank_ended = False
        answer = yield from self._wait_for(self._ranks.ask_progress())
        progress = {rank: answer[rank] for rank in running if rank in answer}
        for rank, rank_progress in progress.items():
            # Ranks run their steps in blocks.
            blocks = (rank_progress.blocks, rank_progress.is_in_block)
            # The first known progress of a rank says nothing: its agent may have answered late.
            blocks_before = self._blocks.get(rank, blocks)
            has_progressed |= blocks != blocks_before
            self._blocks[rank] = blocks
        # A rank may have ended while this method waited for the answer.
        has_progressed |= self._has_rank_ended
        if has_progressed:
            self._finding = None
        return _Standing(
            progress=list(progress.values()),
            is_complete=len(progress) == len(running),
            has_progressed=has_progressed,
        )

    def _look(self, look: Look) -> _Coroutine[bool]:
        """Collect evidence several times, and set the finding if a verdict holds each time.

        Returns:
            Whether all nodes have sent their evidence.
        """
        collections: list[Evidence] = []
        while len(collections) < _COLLECTIONS_PER_LOOK:
            if collections:
                yield from _pause(look.confirm_after_s / (_COLLECTIONS_PER_LOOK - 1))
            evidence = yield from self._wait_for(self._ranks.ask_evidence())
            if not evidence.ranks:
                return False
            ended = {rank.rank for rank in evidence.ranks} - self._running
            collections.append(evidence.with_ended_ranks(ended))
        standing = yield from self._read_progress()
        *earlier_collections, last = collections
        # All verdicts are on the last evidence, so they are equal. A verdict is None if a rank has
        # moved since the earlier evidence.
        verdicts = [judge(last, earlier, look.min_wait_s) for earlier in earlier_collections]
        verdict = None if None in verdicts else verdicts[0]
        if verdict is None or verdict.cause is HangCause.UNKNOWN:
            self._finding = None
        elif not standing.has_progressed:
            self._set_finding(verdict, last)
        return True

    def _set_finding(self, verdict: HangVerdict, evidence: Evidence) -> None:
        """Make the verdict the current finding, and report it once it is certain."""
        previous = self._finding.verdict if self._finding else None
        is_repeated = _is_same_hang(previous, verdict)
        if not is_repeated:
            self._verdict_s = time.monotonic()
        # The description begins with these ranks.
        blamed = () if verdict.rank is None else (verdict.rank, *verdict.also)
        self._finding = HangFinding(verdict=verdict, description=describe(evidence, blamed))
        is_lasting = verdict.cause in _LASTING_CAUSES
        # A user who sets `hang_s` wants the first verdict at once.
        is_certain = self._hang_s is not None or is_lasting or is_repeated
        if is_certain and not _is_same_hang(self._reported, verdict):
            self._reported = verdict
            self._report(verdict)

    def _wait_for(self, request: Request[T]) -> _Coroutine[T]:
        """Yield until the request has an answer, and return the answer."""
        self._awaits_answer = True
        while (answer := request()) is None:
            yield
        self._awaits_answer = False
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    """How far the running ranks are."""

    progress: Sequence[RankProgress]
    # Whether the progress of all running ranks is known.
    is_complete: bool
    # Whether a rank has progressed or ended since the progress was last read.
    has_progressed: bool


def _pause(seconds: float) -> _Coroutine[None]:
    """Yield until so many seconds have passed."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        yield


def _do_nothing() -> _Coroutine[None]:
    while True:
        yield


def _is_same_hang(verdict: HangVerdict | None, other: HangVerdict) -> bool:
    return verdict is not None and (verdict.cause, verdict.rank) == (other.cause, other.rank)
