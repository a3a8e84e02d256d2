"""What a report says about its points: failures and doubts, each once for all of its points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raybench.analysis.doubts import DoubtGroup
from raybench.analysis.rows import ScaledRow, distinguishing_settings
from raybench.records.doubts import DoubtKind, NotCompared
from raybench.records.status import Status
from raybench.report import formatting
from raybench.report.documents import Listing
from raybench.report.formatting import counted, cut_middle
from raybench.report.point_settings import short_name
from raybench.report.words.doubts import MARKS, doubt_advice, doubt_words, drift_words
from raybench.report.words.failures import failure_of_row, without_estimate
from raybench.report.words.reasons import not_compared_words
from raybench.results.point_row import PointRow


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageGroup:
    """A message about `count` points."""

    # The points in words, as `8 of 40 points`, or the name of a single point.
    who: str
    text: str
    count: int
    # The rank, host and device that failed, or the point that is doubted most; empty: unknown.
    where: str = ""
    # What it does to the number, or what to do; a sentence, or empty.
    advice: str = ""
    # The points ran out of memory.
    is_oom: bool = False

    def shortened(self, most: int) -> str:
        """Return at most `most` characters of the text, with its end; then the other sentences."""
        text = cut_middle(self.text, most).removesuffix(".") + "."
        return " ".join(filter(None, (text, self.where, self.advice)))


_MAX_GROUPS = 20
# Characters of a message; failures that raybench words itself are shorter than LONG.
SHORT, LONG = 150, 600


def list_messages(title: str, groups: Sequence[MessageGroup]) -> Listing:
    """Return lines (points, message) of 20 groups; a last line counts the others."""
    lines = [(group.who, group.shortened(LONG)) for group in groups[:_MAX_GROUPS]]
    if more := sum(group.count for group in groups[_MAX_GROUPS:]):
        lines.append((counted(more, "point"), "`--format json` has the other messages."))
    return Listing(title=title, lines=lines, is_quoted=True)


def _who(count: int, total: int, noun: str = "point") -> str:
    if count == total:
        return f"all {counted(total, noun)}" if total > 1 else f"the {noun}"
    return f"{count} of {counted(total, noun)}"


def marks(row: ScaledRow) -> str:
    """Return the letters of MARKS that apply to a point."""
    letters = {doubt.kind.mark for doubt in row.doubts or ()}
    if row.throughput is None:
        # Parts are shown only for steps with a throughput.
        letters.discard(DoubtKind.NO_BREAKDOWN.mark)
    return "".join(mark for mark in MARKS if mark in letters)


def _places(rows: Sequence[PointRow]) -> str:
    """Return the ranks, hosts and devices of failures, or ""."""
    placed = [row for row in rows if row.error_rank is not None and row.error_host is not None]
    if not placed:
        return ""
    ranks = sorted({row.error_rank or 0 for row in placed})
    hosts = list(dict.fromkeys(str(row.error_host) for row in placed))
    devices = {row.error_device for row in placed}
    if len(ranks) == len(hosts) == len(devices) == 1:
        return f"rank {ranks[0]}, {hosts[0]}, {devices.pop()}"
    # A single rank failed in each point, but not always the same rank.
    *others, last = map(str, ranks)
    many = f"of {ranks[0]} to {last}" if len(ranks) > 4 else f"{', '.join(others)} or {last}"
    who = f"one rank each, {many}," if others else f"rank {last}"
    return f"{who} on {formatting.some(hosts)}"


# Failures with these statuses are grouped, whatever their messages.
_ALIKE = (Status.OOM, Status.SKIPPED, Status.CANCELLED)


def failures(
    rows: Sequence[PointRow], ranks: str, *, is_batch_search: bool = False
) -> tuple[MessageGroup, ...]:
    """Return how points that are not ok ended, and why, as `failed: REASON`.

    Args:
        rows: the `latest_trials` of the table `points`; each row counts.
        ranks: `GPUs` or `workers`.
        is_batch_search: the search has measured what fits, so estimates are left out.
    """
    names = distinguishing_settings(rows)
    members: dict[tuple[object, ...], list[PointRow]] = {}
    for row in rows:
        if row.status is not Status.OK:
            message = None if row.status in _ALIKE else _reason(row)
            members.setdefault((row.status, row.error_type, message), []).append(row)
    groups = []
    for failed in members.values():
        first, places = failed[0], _places(failed)
        is_oom = first.status is Status.OOM
        reason = _reason(first)
        if is_oom and is_batch_search:
            reason = without_estimate(reason)
        if is_oom and names and len(failed) > 1:
            reason = f"for example at {short_name(first, names, ranks)}, {reason}"
        groups.append(
            MessageGroup(
                who=counted(len(failed), "point"),
                text=f"{first.status.label}: {reason}",
                count=len(failed),
                where=f"At {places}." if places else "",
                is_oom=is_oom,
            )
        )
    return tuple(groups)


def _reason(row: PointRow) -> str:
    return failure_of_row(row, with_place=False) or "no reason known"


def not_compared(reasons: Iterable[NotCompared], total: int) -> tuple[MessageGroup, ...]:
    """Return why points have no speed-up, each reason once; `total` counts all points."""
    counts = Counter(reasons)
    return tuple(
        MessageGroup(who=_who(count, total), text=not_compared_words(why), count=count)
        for why, count in counts.items()
    )


def doubts(
    groups: Iterable[DoubtGroup], rows: Sequence[ScaledRow], ranks: str
) -> tuple[MessageGroup, ...]:
    """Return doubts in words, in the order of the groups.

    Args:
        rows: all points of the run.
        ranks: `GPUs` or `workers`.
    """
    names = distinguishing_settings(rows)
    return tuple(_doubt(group, rows, names, ranks) for group in groups)


def _doubt(
    group: DoubtGroup, rows: Sequence[ScaledRow], names: Sequence[str], ranks: str
) -> MessageGroup:
    advice = doubt_advice(group.worst, group.row)
    if group.row is None:
        sizes = {row.world_size for row in rows if row.speed_up is not None}
        if group.worst.kind is DoubtKind.DRIFT and len(sizes) > 1:
            advice = f"Speed-ups between numbers of {ranks} are corrected. {advice}"
        who = counted(group.count, "repeated baseline measurement")
        text = drift_words(group.worst, ranks)
        return MessageGroup(who=who, text=text, count=group.count, advice=advice)
    text, where = doubt_words(group.worst, group.row), ""
    who = _who(group.count, max(group.count, sum(row.status is Status.OK for row in rows)))
    if names and group.count == 1 and len(rows) > 1:
        who = short_name(group.row, names, ranks)
    elif names and group.count > 1 and group.worst.value is not None:
        who += f"; at the worst ({short_name(group.row, names, ranks)})"
    elif names and len(group.subjects) > 1:
        who += f"; for example at {short_name(group.row, names, ranks)}"
    return MessageGroup(who=who, text=text, count=group.count, where=where, advice=advice)
