"""A report as values: what it says, in this order, whatever the format that lays it out.

Loads nothing that is slow: a terminal's tables are made of these too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from raybench.report.plain_text import plain, shorten

if TYPE_CHECKING:
    from raybench.records.metric import Metric

MARK_COLUMN = "!"
_MOST_LINES = 20
_MOST_CHARS = 300

Tone = Literal["plain", "strong", "aside", "advice", "alarm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A sentence. is_apart: from what is said before it. is_whole: not folded, to be copied."""

    text: str
    tone: Tone = "plain"
    is_apart: bool = False
    is_whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Names and what is said of each, under a title.

    is_quoted: what is said holds text from the results. otherwise: what is said without any.
    """

    title: str
    lines: Sequence[tuple[str, str]]
    is_quoted: bool = False
    otherwise: str = ""


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
        text = shorten(self.text, _MOST_CHARS)
        return f"{text} ({self.where})" if self.where else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Groups of messages under a title."""

    title: str
    groups: Sequence[MessageGroup]

    @property
    def lines(self) -> list[tuple[str, str]]:
        """(how many, what they say) of the first groups."""
        return [(f"{group.count} x ", group.shortened) for group in self.groups[:_MOST_LINES]]

    @property
    def rest(self) -> str:
        """What is to be said of the other groups, if there are any."""
        more = sum(group.count for group in self.groups[_MOST_LINES:])
        return f"and {more} more, each another; `--format json` has all" if more else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Points of one workload, with one title.

    params: those of the workload's parameters that make it a table of its own.
    kind: what the columns do not say of all its points.
    columns: settings first, `settings` of them, then what was measured. A setting is blank
    where it and all before it are as in the row above.
    optional: columns that may be left out where there is no room, the first one first.
    texts: columns that hold no numbers.
    own: metrics that the workload declares itself.
    """

    columns: tuple[str, ...]
    settings: int
    rows: tuple[tuple[str, ...], ...]
    workload: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""
    optional: tuple[str, ...] = ()
    texts: frozenset[str] = frozenset()
    own: tuple[Metric, ...] = ()

    @property
    def title(self) -> str:
        """What its points are of, and what its columns do not say of them."""
        what = f"{self.workload} {self.params_words}".strip()
        return ": ".join(filter(None, (what, self.kind)))

    @property
    def params_words(self) -> str:
        """The parameters as name=value."""
        return " ".join(f"{plain(name)}={plain(value)}" for name, value in self.params.items())

    def without(self, column: str) -> Table:
        """Return the table without one of its columns."""
        place = self.columns.index(column)
        return replace(
            self,
            columns=(*self.columns[:place], *self.columns[place + 1 :]),
            rows=tuple((*row[:place], *row[place + 1 :]) for row in self.rows),
        )


# What to type for more rounds.
HOW_TO_ADD_ROUNDS = "sweep JOB --resume RUN --set measure.rounds=3"

Block = Line | Listing | Messages | Table
