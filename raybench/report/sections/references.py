"""The section that says whether a run is normal, by the references of its devices."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from raybench.report import formatting
from raybench.report.blocks import Listing
from raybench.report.plain_text import counted
from raybench.report.point_settings import point_names
from raybench.report.references import HOW_TO_MAKE
from raybench.report.sections import Section

if TYPE_CHECKING:
    from raybench.report.summary import Summary

# So few figures are all shown; of more those outside, and of these the first.
_MOST_SHOWN = 4


def applies(report: Summary) -> bool:
    """Return whether a run has measured GPUs."""
    return any(row.status == "ok" and row.device_type == "cuda" for row in report.rows)


def reference_line(report: Summary) -> str:
    """Return what the section says in a sentence: how many are within, and the slowest outside."""
    (listing,) = _listing(report)
    found = [(name, text) for name, text in listing.lines if name.startswith("! ")]
    texts = [listing.lines[0][1], *(f"{name}: {text}" for name, text in found[:1])]
    if len(report.standings) == 1:
        texts = [report.standings[0].text]
    return formatting.sentence(f"against the reference: {'; '.join(texts)}".removesuffix("."))


def _listing(report: Summary) -> Iterator[Listing]:
    """Yield how many figures are within their reference, then those outside, the slowest first."""
    found = report.standings
    if not found:
        yield Listing(title="Against the reference", lines=[("none", HOW_TO_MAKE)])
        return
    names = dict(zip((row.point_id for row in report.rows), point_names(report.rows), strict=True))
    outside = [one for one in found if not one.is_within]
    shown = sorted(found if len(found) <= _MOST_SHOWN else outside, key=lambda one: one.share)
    middle = median(one.share for one in found)
    within = f"within on {len(found) - len(outside)} of {counted(len(found), 'figure')}"
    is_part = any(starts.run == report.run.run_id for one in found for starts in one.entry.measured)
    own = "; it was made from this run too" if is_part else ""
    lines = [("all", f"{within}, the median is {middle:.0%} of it{own}")]
    for one in shown[:_MOST_SHOWN]:
        mark = "" if one.is_within else "! "
        lines.append((f"{mark}{names[one.point_id]}, {one.entry.unit}", one.text))
    if (more := len(shown) - _MOST_SHOWN) > 0:
        lines.append(("more", f"{more} outside; `--format json` has all"))
    yield Listing(title="Against the reference", lines=lines)


SECTION = Section(
    anchor="references",
    title="Against the reference",
    order=90,
    applies=applies,
    blocks=_listing,
)
