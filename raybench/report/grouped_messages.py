"""What many points say, said once with their count: reasons of failures, and warnings. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raybench.records import Cause
from raybench.report import formatting

# Points that differ in these alone say the same. The rank that a sentence begins with is none of
# them: rank 1 and rank 3 are not "rank 1 to 3".
_FIGURES = re.compile(r"±?(?<!\d)(?<!^rank )\d+(?:[.,]\d+)*(?: (?:[KMGT]iB|bytes)\b|%)?")
_BYTES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_MOST_HOSTS = 4
_MOST_RANKS = 4
_MOST_LINES = 20
_MOST_CHARS = 300

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageGroup:
    """What `count` points say; where only the figures vary, with the range of each.

    where: the ranks, hosts and devices that said it; empty where that is not known.
    """

    text: str
    count: int
    where: str = ""

    @property
    def shortened(self) -> str:
        """The text, cut where it is long, and where."""
        text = formatting.shorten(self.text, _MOST_CHARS)
        return f"{text} ({self.where})" if self.where else text


def group_messages(texts: Iterable[str]) -> tuple[MessageGroup, ...]:
    """Each text once, whatever figures it holds, in the order of the first ones."""
    alike: dict[str, list[str]] = {}
    for text in texts:
        alike.setdefault(_FIGURES.sub("#", text), []).append(text)
    return tuple(MessageGroup(text=_ranges(found), count=len(found)) for found in alike.values())


def failures(rows: Iterable[Row]) -> tuple[MessageGroup, ...]:
    """How the points that are not ok ended, and why; rows of `points`."""
    alike: dict[str, list[Row]] = {}
    for row in rows:
        if row["status"] != "ok":
            alike.setdefault(_FIGURES.sub("#", _reason(row)), []).append(row)
    return tuple(
        MessageGroup(
            text=_ranges([_reason(row) for row in members]),
            count=len(members),
            where=_where(members),
        )
        for members in alike.values()
    )


def first_messages(groups: Sequence[MessageGroup]) -> tuple[list[tuple[str, str]], str]:
    """(how many, what they say) of the first ones, and what is to be said of the rest, if any."""
    told = [(f"{group.count} x ", group.shortened) for group in groups[:_MOST_LINES]]
    more = sum(group.count for group in groups[_MOST_LINES:])
    return told, f"and {more} more, each another; `--format json` has all" if more else ""


def lost_nodes(failed: Iterable[tuple[Any, Any]]) -> tuple[str, ...]:
    """Name the hosts of nodes that were lost, of (error_type, error_host), in the order given."""
    hosts = (host for error_type, host in failed if error_type == Cause.NODE_LOST)
    return tuple(
        dict.fromkeys(formatting.plain(host) for host in hosts if formatting.has_value(host))
    )


def some(names: Sequence[str]) -> str:
    """List the first few names."""
    more = len(names) - _MOST_HOSTS
    return ", ".join(names[:_MOST_HOSTS]) + (f" and {more} more" if more > 0 else "")


def _reason(row: Row) -> str:
    """Status and message, without the place that the message begins with: it has columns."""
    message = (
        row["error_message"] if formatting.has_value(row["error_message"]) else "no reason known"
    )
    if formatting.has_value(row["error_host"]):
        place = f"rank {row['error_rank']:.0f} ({row['error_host']}, {row['error_device']}): "
        message = message.removeprefix(place)
    told = formatting.failure(row["status"], row["error_type"], message)
    return f"{formatting.STATUS_WORDS[row['status']]}: {told}"


def _where(rows: Sequence[Row]) -> str:
    placed = [row for row in rows if formatting.has_value(row["error_host"])]
    if not placed:
        return ""
    ranks = sorted({int(row["error_rank"]) for row in placed})
    hosts, devices = (
        list(dict.fromkeys(formatting.plain(row[name]) for row in placed))
        for name in ("error_host", "error_device")
    )
    if len(ranks) == len(hosts) == len(devices) == 1:
        return f"rank {ranks[0]}, {hosts[0]}, {devices[0]}"
    return f"{_one_rank_each(ranks)} on {some(hosts)}"


def _one_rank_each(ranks: Sequence[int]) -> str:
    """In each of these points one rank has failed, not always the same one."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _MOST_RANKS:
        return f"one rank each, of {ranks[0]} to {ranks[-1]},"
    return f"one rank each, {', '.join(map(str, ranks[:-1]))} or {ranks[-1]},"


def _ranges(texts: Sequence[str]) -> str:
    """Texts that differ in figures only, as one: `tried 1.5 to 4.5 GiB`."""
    columns = zip(*(_FIGURES.findall(text) for text in texts), strict=True)
    ranges = iter([_range(figures) for figures in columns])
    return _FIGURES.sub(lambda _: next(ranges), texts[0])


def _range(figures: Sequence[str]) -> str:
    ordered = sorted(dict.fromkeys(figures), key=_size)
    if len(ordered) == 1:
        return ordered[0]
    lowest, highest = ordered[0], ordered[-1]
    if lowest.partition(" ")[2] == highest.partition(" ")[2]:
        lowest = lowest.partition(" ")[0]
    return f"{lowest} to {highest}"


def _size(figure: str) -> list[float]:
    """Measure a number's size, in bytes where it has such a unit; an address or a version counts
    part by part.
    """
    digits, _, unit = figure.replace(",", "").strip("±%").partition(" ")
    parts = digits.split(".") if digits.count(".") > 1 else [digits]
    return [float(part) * _BYTES.get(unit, 1) for part in parts]
