"""The section that says whether a run is normal, by the references of its devices."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from raybench.report.blocks import Listing
from raybench.report.point_settings import point_names
from raybench.report.references import HOW_TO_MAKE, count_within
from raybench.report.sections import Section

if TYPE_CHECKING:
    from raybench.report.summary import Summary

_TITLE = "Against the reference"
# So few figures are all shown; of more those outside, and of these the slowest.
_MOST_SHOWN = 4


def reference_lines(report: Summary) -> Iterator[tuple[str, str]]:
    """Yield how many figures are within their reference, then those outside, the slowest first."""
    found = sorted(report.standings, key=lambda one: one.share)
    if not found:
        yield "none", HOW_TO_MAKE
        return
    outside = [one for one in found if not one.is_within]
    if len(found) > 1:
        is_part = any(report.run.run_id in one.entry.measured for one in found)
        own = "; it was made from this run too" if is_part else ""
        middle = median(one.share for one in found)
        yield "all", f"{count_within(found)}, the median is {middle:.0%} of it{own}"
    names = dict(zip((row.point_id for row in report.rows), point_names(report.rows), strict=True))
    shown = found if len(found) <= _MOST_SHOWN else outside
    for one in shown[:_MOST_SHOWN]:
        mark = "" if one.is_within else "! "
        yield f"{mark}{names[one.measured.point_id]}, {one.entry.unit}", one.text
    if (more := len(shown) - _MOST_SHOWN) > 0:
        yield "more", f"{more} outside; `--format json` has all"


SECTION = Section(
    anchor="references",
    title=_TITLE,
    order=90,
    applies=lambda report: any(
        row.status == "ok" and row.device_type == "cuda" for row in report.rows
    ),
    blocks=lambda report: [Listing(title=_TITLE, lines=list(reference_lines(report)))],
)
