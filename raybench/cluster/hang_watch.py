"""Watches a running point for a rank that hangs, and says which one it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from raybench.cluster import timeouts
from raybench.hangs.evidence import Evidence, describe
from raybench.hangs.suspicion import Look, RankProgress, next_look
from raybench.hangs.verdict import judge
from raybench.records.hang import HangCause, HangVerdict

# Evidence of a hang must stay the same this often.
_LOOKS = 3


class WatchedRanks(Protocol):
    """Where progress and evidence of ranks come from."""

    def progress(self) -> Mapping[int, RankProgress]:
        """Return rank -> progress; ranks without known progress are missing."""
        return {}

    def evidence(self, ranks: Collection[int]) -> Evidence | None:
        """Return what is known of these ranks; None if a node did not answer. Takes seconds."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class HangFinding:
    """A verdict and what it rests on."""

    verdict: HangVerdict
    # `evidence.describe`.
    description: str


class HangWatch:
    """The watch over one point."""

    def __init__(
        self,
        ranks: WatchedRanks,
        hang_s: float,
        tell: Callable[[HangVerdict], None],
    ) -> None:
        """Begin to watch.

        Args:
            ranks: the ranks of the point.
            hang_s: how long a point may go on after a verdict.
            tell: gets each new verdict.
        """
        self._ranks, self._hang_s, self._tell = ranks, hang_s, tell
        self._next_s = time.monotonic() + timeouts.HANG_FIRST_LOOK_S
        # Looks without a verdict since the last progress.
        self._fruitless = 0
        self._blocks: dict[int, tuple[int, bool]] = {}
        self._missing: set[int] = set()
        self._look: Look | None = None
        self._seen: list[Evidence] = []
        self._found: HangFinding | None = None
        self._found_s = 0.0

    def is_over(self, missing: Collection[int]) -> bool:
        """Look if it is time, and return whether `hang_s` has passed since a verdict.

        Call it about once a second. It mostly returns at once, and takes seconds where it looks.

        Args:
            missing: ranks that have not answered.
        """
        if time.monotonic() < self._next_s or not missing:
            return False
        if self._seen:
            self._look_again(missing)
            return False
        look = self._next_look(missing)
        now_s = time.monotonic()
        if self._found is not None:
            over_s = self._found_s + self._hang_s
            if now_s >= over_s:
                return True
            self._next_s = min(now_s + timeouts.HANG_PROGRESS_EVERY_S, over_s)
        elif look is None:
            self._next_s = now_s + timeouts.HANG_PROGRESS_EVERY_S
        elif now_s < look.due_s:
            self._next_s = min(look.due_s, now_s + timeouts.HANG_LONGEST_PAUSE_S)
        else:
            self._look = look
            self._look_again(missing)
        return False

    @property
    def finding(self) -> HangFinding | None:
        """The last verdict; None if there is none or if a rank has moved since."""
        return self._found

    def _next_look(self, missing: Collection[int]) -> Look | None:
        """Read the progress; forget the verdict if a rank has moved."""
        progress = self._ranks.progress()
        known = {rank: progress[rank] for rank in missing if rank in progress}
        blocks = {rank: (told.blocks, told.is_in_block) for rank, told in known.items()}
        # A rank whose agent is late has not moved, so only compare ranks that are known both times.
        has_moved = any(self._blocks.get(rank, block) != block for rank, block in blocks.items())
        if has_moved or set(missing) != self._missing:
            self._missing, self._fruitless, self._found = set(missing), 0, None
        self._blocks = {**self._blocks, **blocks}
        if len(known) < len(missing):
            return None
        return next_look(list(known.values()), self._fruitless)

    def _look_again(self, missing: Collection[int]) -> None:
        """Collect evidence once more; after the last time judge it."""
        assert self._look is not None
        seen = self._ranks.evidence(missing)
        now_s = time.monotonic()
        if seen is None or (self._seen and len(seen.ranks) != len(self._seen[0].ranks)):
            self._seen.clear()
            self._next_s = now_s + timeouts.HANG_PROGRESS_EVERY_S
            return
        self._seen.append(seen)
        self._next_s = now_s + self._look.confirm_after_s / (_LOOKS - 1)
        if len(self._seen) < _LOOKS:
            return
        *earlier, last = self._seen
        verdicts = [judge(last, before, self._look.least_wait_s) for before in earlier]
        self._seen.clear()
        blocks = self._blocks
        self._next_look(missing)
        verdict = verdicts[0]
        has_moved = None in verdicts or blocks != self._blocks
        if verdict is None or has_moved or verdict.cause is HangCause.UNKNOWN:
            self._fruitless += 1
            return
        self._found, self._found_s = _finding(verdict, last), now_s
        self._next_s = now_s + min(timeouts.HANG_PROGRESS_EVERY_S, self._hang_s)
        self._tell(verdict)


def _finding(verdict: HangVerdict, evidence: Evidence) -> HangFinding:
    named = () if verdict.rank is None else (verdict.rank, *verdict.also)
    return HangFinding(verdict=verdict, description=describe(evidence, named))
