"""What makes points doubtful: letters in tables, and warnings and failures, grouped.

The tables hold warnings and failures as texts. Texts that differ in figures only are one message,
with the range of each figure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from raybench.analysis.rounds import Trials
from raybench.analysis.rows import ScaledRow
from raybench.analysis.scaling import NORMAL_LIMITS
from raybench.report import formatting
from raybench.report.documents import Listing
from raybench.report.formatting import shorten_middle
from raybench.results.metrics import is_imprecise
from raybench.results.tables import PointRow, is_slowed_by_one_rank

# The letters that tables have for what makes the numbers of a point doubtful.
MARKS = {
    "u": "unsteady, the level of the step time still changes",
    "w": "wide, the samples of a start leave more than ±10 % open",
    "h": "host-bound, the device waits for the host",
    "t": "throttled, the clocks were limited by heat or a fault",
    "s": "one rank is slower than the others",
    "c": "crowded, CPU workers share cores",
    "n": "not alone, something else used its devices or nodes at the same time",
    "q": "quick, a short look instead of seconds",
    "b": "no breakdown, the parts exceed the step by more than 10 %",
}

# A figure with its unit. The rank that a sentence begins with is none: rank 1 and rank 3 are not
# "rank 1 to 3".
_FIGURE = re.compile(r"±?(?<!\d)(?<!^rank )\d+(?:[.,]\d+)*(?: (?:[KMGT]iB|bytes)\b|%)?")
_BYTES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# A GPU at work runs at its power cap: a fact, which the head of the report has.
_POWER_CAP = re.compile(r"clocks were .* of the samples: (?:power_cap|sync_boost|, )+$")
_UNSTEADY = re.compile(
    "step time (?:was not steady|changes its level|wanders|drifts|is known to)|some steps are much"
    "|too few steps to tell"
)
# The most harmful first; all others stand before what is merely unsteady. In the words of
# `analysis.references`, `sweep.loop`, `results.tables` and `warnings` below.
_HARM = (
    re.compile("^cannot be: "),
    re.compile("^not alone: |^clocks were limited"),
    re.compile("^rank [0-9].* is slower|^the ranks are late|^host-bound: |the machine drifts"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageGroup:
    """A message that stands for `count` texts, which differ in figures only.

    where: rank, host and device that failed if each is one, else ranks and hosts; "" if unknown.
    """

    text: str
    count: int
    where: str = ""

    def shortened(self, most: int) -> str:
        """Return the text, `most` characters of it with its end; then, uncut, `where` in ()."""
        return shorten_middle(self.text, most) + (f" ({self.where})" if self.where else "")


_MAX_GROUPS = 20
# Characters of a message: a failure of raybench's own is shorter, and stays whole with its cure.
SHORT, LONG = 150, 600


def list_messages(title: str, groups: Sequence[MessageGroup]) -> Listing:
    """Return lines (`4 x`, a long message) of 20 groups; a last one sums the counts of others."""
    lines = [(f"{one.count} x", one.shortened(LONG)) for one in groups[:_MAX_GROUPS]]
    if more := sum(group.count for group in groups[_MAX_GROUPS:]):
        lines.append((f"{more} x", "others; `--format json` has all"))
    return Listing(title=title, lines=lines, is_quoted=True)


def doubts(row: ScaledRow) -> tuple[str, ...]:
    """Return `marks` but h, s and b in words, as ("wide", "quick"); () for none.

    "against an unsteady point" is last if the baseline point is unsteady, and this one is not.
    """
    found = marks(row)
    words = [MARKS[mark].partition(",")[0] for mark in found if mark in "uwtcnq"]
    if row.is_base_unsteady and "u" not in found:
        words.append("against an unsteady point")
    return tuple(words)


def marks(row: ScaledRow) -> str:
    """Return the letters of MARKS, in its order, that apply to a point; "" for none."""
    is_ok = row.status == "ok"
    # A GPU at work runs at its power cap: only heat, a fault or an unknown reason is a doubt.
    limits = set(row.throttle_reasons or ("unknown",)) - NORMAL_LIMITS
    found = {
        "u": row.stable is False,
        "w": is_imprecise(row),
        "h": row.host_bound,
        "t": row.throttled and limits,
        "s": is_slowed_by_one_rank(row),
        "c": is_ok and row.crowded,
        "n": is_ok and (row.neighbours or row.node_neighbours),
        "q": is_ok and row.quick,
        # The parts of steps that finish no items are not shown.
        "b": row.why_no_breakdown is not None and row.throughput is not None,
    }
    return "".join(mark for mark, is_set in found.items() if is_set)


def group_messages(
    texts: Iterable[str], rows: Sequence[PointRow] | None = None
) -> tuple[MessageGroup, ...]:
    """Return groups of texts that differ in figures only, with each figure as range, `3 to 5 GiB`.

    In the order of their first texts. All digits are figures, also in `cuda:0`, but not the rank
    that a text begins with (`rank 3 …`). rows: for `where`, the failed point of each text.
    """
    alike: dict[tuple[str, ...], list[tuple[str, PointRow | None]]] = {}
    for place, text in enumerate(texts):
        row = rows[place] if rows is not None else None
        alike.setdefault(tuple(_FIGURE.split(text)), []).append((text, row))
    groups = []
    for between, members in alike.items():
        figures = zip(*(_FIGURE.findall(text) for text, _ in members), strict=True)
        pieces = zip_longest(between, map(_range, figures), fillvalue="")
        places = _places([row for _, row in members if row is not None])
        text = "".join(chain.from_iterable(pieces))
        groups.append(MessageGroup(text=text, count=len(members), where=places))
    return tuple(groups)


def _range(figures: Sequence[str]) -> str:
    """Write the least and the greatest figure, sizes by their bytes, versions part by part."""

    def size(figure: str) -> list[float]:
        digits, _, unit = figure.replace(",", "").strip("±%").partition(" ")
        parts = digits.split(".") if digits.count(".") > 1 else [digits]
        return [float(part) * _BYTES.get(unit, 1) for part in parts]

    lowest, highest = min(figures, key=size), max(figures, key=size)
    if lowest == highest:
        return lowest
    if lowest.partition(" ")[2] == highest.partition(" ")[2]:
        lowest = lowest.partition(" ")[0]
    return f"{lowest} to {highest}"


def _places(rows: Sequence[PointRow]) -> str:
    """Write the ranks, hosts and devices of failures; empty where they are not known."""
    placed = [row for row in rows if row.error_rank is not None and row.error_host is not None]
    if not placed:
        return ""
    ranks = sorted({row.error_rank or 0 for row in placed})
    hosts = list(dict.fromkeys(str(row.error_host) for row in placed))
    devices = {row.error_device for row in placed}
    if len(ranks) == len(hosts) == len(devices) == 1:
        return f"rank {ranks[0]}, {hosts[0]}, {devices.pop()}"
    # In each of these points one rank has failed, not always the same one.
    *others, last = map(str, ranks)
    many = f"of {ranks[0]} to {last}" if len(ranks) > 4 else f"{', '.join(others)} or {last}"
    who = f"one rank each, {many}," if others else f"rank {last}"
    return f"{who} on {formatting.some(hosts)}"


def failures(rows: Iterable[PointRow]) -> tuple[MessageGroup, ...]:
    """Return how rows of the table `points` that are not ok ended, and why, as `failed: REASON`.

    Each row counts: of repeated attempts give the last one alone (`latest_trials`).
    """
    failed, texts = [row for row in rows if row.status != "ok"], []
    for row in failed:
        message = "no reason known" if row.error_message is None else row.error_message
        # The place that it begins with stands in brackets behind it.
        place = f"rank {row.error_rank} ({row.error_host}, {row.error_device}): "
        text = formatting.failure(row.status, row.error_type, message.removeprefix(place))
        texts.append(f"{formatting.STATUS_WORDS[row.status]}: {text}")
    return group_messages(texts, failed)


def warnings(rows: Sequence[ScaledRow], trials: Trials, ranks: str) -> tuple[MessageGroup, ...]:
    """Return what makes figures doubtful, the most harmful first, of equal harm the most frequent.

    Drifts of `trials`; warnings of rows, but not `why`, power caps, a second one on unsteadiness;
    what differs from the baseline point: clocks by a power cap, attention kernels nobody asked for.
    rows: all points, by `scaling`. trials: of the same run. ranks: `GPUs` or `workers`.
    """

    def harm(group: MessageGroup) -> tuple[int, int]:
        harms = [place for place, pattern in enumerate(_HARM) if pattern.search(group.text)]
        usual = len(_HARM) + bool(_UNSTEADY.match(group.text))
        return min([*harms, usual]), -group.count

    found = [
        f"round {number}: at the end of the block of {block} {ranks} the control took "
        f"{abs(drift):.1%} {'longer' if drift > 0 else 'less'} than at first: the machine drifts; "
        "speed-ups are corrected for it"
        for number, block, drift in trials.drifts()
    ]
    bases = {row.series: row for row in rows if row.is_baseline}
    for row in rows:
        texts = [text for text in row.warnings if text != row.why and not _POWER_CAP.search(text)]
        # A point is called unsteady once. That some steps are much longer is told besides.
        unsteady = [t for t in texts if _UNSTEADY.match(t) and not t.startswith("some steps")]
        found += [text for text in texts if text not in unsteady[1:]]
        if (ratio := row.clock_ratio) is not None:
            part = "is due to them" if ratio > 1 else "is lost by them"
            found.append(
                f"SM clocks are {formatting.ratio(ratio)} times those of the baseline point, by "
                f"the power cap; at most so much of the speed-up {part}"
            )
        base = bases.get(row.series, row)
        own, others = row.attention_kernels, base.attention_kernels
        is_asked = row.params.get("attention") != base.params.get("attention")
        if own and others and own != others and not is_asked:
            found.append(
                f"attention by {', '.join(own)}, at the baseline point by {', '.join(others)}: "
                "speed-ups are of the kernels too"
            )
    return tuple(sorted(group_messages(found), key=harm))
