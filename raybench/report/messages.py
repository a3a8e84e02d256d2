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
    # A sentence on the ranks, hosts and devices that failed; "" if unknown.
    where: str = ""
    # A sentence on the effect of a doubt, or on what to do; may be "".
    advice: str = ""
    # The points ran out of memory.
    is_oom: bool = False

    def shortened(self, most: int) -> str:
        """Return the text, its middle cut to `most` characters in all, then place and advice."""
        text = cut_middle(self.text, most).removesuffix(".") + "."
        return " ".join(filter(None, (text, self.where, self.advice)))


_MAX_GROUPS = 20
# Longest messages in characters. Failures that raybench words itself are shorter than LONG.
SHORT, LONG = 150, 600
# Up to so many ranks are named; of more, the first and the last.
_MOST_RANKS_NAMED = 4


def list_messages(title: str, groups: Sequence[MessageGroup]) -> Listing:
    """Return a line for each of the first 20 groups; a last line counts the other points."""
    lines = [(group.who, group.shortened(LONG)) for group in groups[:_MAX_GROUPS]]
    if other_points := sum(group.count for group in groups[_MAX_GROUPS:]):
        lines.append((counted(other_points, "point"), "`--format json` has the other messages."))
    return Listing(title=title, lines=lines, is_quoted=True)


def _share_of_points(count: int, total: int) -> str:
    """Return `8 of 40 points`, `all 40 points` or `the point`."""
    if count == total:
        return f"all {counted(total, 'point')}" if total > 1 else "the point"
    return f"{count} of {counted(total, 'point')}"


def marks(row: ScaledRow) -> str:
    """Return the letters of MARKS that apply to a point."""
    letters = {doubt.kind.mark for doubt in row.doubts or ()}
    if row.throughput is None:
        # Parts are shown only for steps with a throughput.
        letters.discard(DoubtKind.NO_BREAKDOWN.mark)
    return "".join(mark for mark in MARKS if mark in letters)


def _failed_ranks(rows: Sequence[PointRow]) -> str:
    """Return the ranks, hosts and device of failures: `rank 0, node1, cuda:0`; "" if unknown."""
    located = [row for row in rows if row.error_rank is not None and row.error_host is not None]
    if not located:
        return ""
    ranks = sorted({row.error_rank or 0 for row in located})
    hosts = list(dict.fromkeys(str(row.error_host) for row in located))
    devices = {row.error_device for row in located}
    if len(ranks) == len(hosts) == len(devices) == 1:
        return f"rank {ranks[0]}, {hosts[0]}, {devices.pop()}"
    # A single rank failed in each point, but not always the same rank.
    *others, last = map(str, ranks)
    if not others:
        which = f"rank {last}"
    elif len(ranks) > _MOST_RANKS_NAMED:
        which = f"one rank each, of {ranks[0]} to {last},"
    else:
        which = f"one rank each, {', '.join(others)} or {last},"
    return f"{which} on {formatting.some(hosts)}"


# Points that ended so form one group, whatever their messages.
_GROUPED_BY_STATUS = (Status.OOM, Status.SKIPPED, Status.CANCELLED)


def failures(
    rows: Sequence[PointRow], ranks_noun: str, *, is_batch_search: bool = False
) -> tuple[MessageGroup, ...]:
    """Return how points that are not ok ended, and why, as `failed: REASON`.

    Args:
        rows: latest attempt of each trial, from the table `points`.
        ranks_noun: `GPUs` or `workers`.
        is_batch_search: leave out estimates of the memory that a point needs.
    """
    names = distinguishing_settings(rows)
    # (status, type of the error, message) -> points. The message is None for a status that makes
    # one group whatever the messages are.
    rows_of_group: dict[tuple[object, ...], list[PointRow]] = {}
    for row in rows:
        if row.status is not Status.OK:
            message = None if row.status in _GROUPED_BY_STATUS else _reason(row)
            rows_of_group.setdefault((row.status, row.error_type, message), []).append(row)
    groups = []
    for failed in rows_of_group.values():
        first, failed_ranks = failed[0], _failed_ranks(failed)
        is_oom = first.status is Status.OOM
        reason = _reason(first)
        if is_oom and is_batch_search:
            # The search has measured what fits.
            reason = without_estimate(reason)
        if is_oom and names and len(failed) > 1:
            # The points may have different messages; `reason` is from the first point.
            reason = f"for example at {short_name(first, names, ranks_noun)}, {reason}"
        groups.append(
            MessageGroup(
                who=counted(len(failed), "point"),
                text=f"{first.status.label}: {reason}",
                count=len(failed),
                where=f"At {failed_ranks}." if failed_ranks else "",
                is_oom=is_oom,
            )
        )
    return tuple(groups)


def _reason(row: PointRow) -> str:
    return failure_of_row(row, with_place=False) or "no reason known"


def not_compared(reasons: Iterable[NotCompared], total: int) -> tuple[MessageGroup, ...]:
    """Return a group for each reason why points have no speed-up.

    Args:
        reasons: one for each point without a speed-up.
        total: number of points of the run.
    """
    groups = []
    for why, count in Counter(reasons).items():
        who = _share_of_points(count, total)
        groups.append(MessageGroup(who=who, text=not_compared_words(why), count=count))
    return tuple(groups)


def doubts(
    groups: Iterable[DoubtGroup], rows: Sequence[ScaledRow], ranks_noun: str
) -> tuple[MessageGroup, ...]:
    """Return doubts in words, in the order of the groups.

    Args:
        rows: all points of the run.
        ranks_noun: `GPUs` or `workers`.
    """
    names = distinguishing_settings(rows)
    messages = []
    for group in groups:
        if group.row is None:  # only the doubt about drift belongs to no point
            messages.append(_drift_message(group, rows, ranks_noun))
        else:
            messages.append(_doubt_message(group, group.row, rows, names, ranks_noun))
    return tuple(messages)


def _drift_message(group: DoubtGroup, rows: Sequence[ScaledRow], ranks_noun: str) -> MessageGroup:
    """Return the message on a drift: the machine became slower or faster during the run."""
    advice = doubt_advice(group.worst, row=None)
    world_sizes = {row.world_size for row in rows if row.speed_up is not None}
    if group.worst.kind is DoubtKind.DRIFT and len(world_sizes) > 1:
        advice = f"Speed-ups between numbers of {ranks_noun} are corrected. {advice}"
    who = counted(group.count, "repeated baseline measurement")
    text = drift_words(group.worst, ranks_noun)
    return MessageGroup(who=who, text=text, count=group.count, advice=advice)


def _doubt_message(
    group: DoubtGroup,
    worst_row: ScaledRow,
    rows: Sequence[ScaledRow],
    names: Sequence[str],
    ranks_noun: str,
) -> MessageGroup:
    """Return the message on doubts about points; it names the worst point by settings `names`."""
    ok_count = sum(row.status is Status.OK for row in rows)
    # Points that are not ok may have doubts too.
    who = _share_of_points(group.count, max(group.count, ok_count))
    worst_name = short_name(worst_row, names, ranks_noun)  # "" without settings
    if worst_name and group.count == 1 and len(rows) > 1:
        who = worst_name
    elif worst_name and group.count > 1 and group.worst.value is not None:
        who += f"; at the worst ({worst_name})"
    elif worst_name and len(group.subjects) > 1:
        who += f"; for example at {worst_name}"
    text, advice = doubt_words(group.worst, worst_row), doubt_advice(group.worst, worst_row)
    return MessageGroup(who=who, text=text, count=group.count, advice=advice)
