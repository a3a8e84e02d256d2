"""What is said of values beside their references."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.analysis import references
from raybench.analysis.references import NARROW, AbovePeak, Standing

HOW_TO_MAKE = "No reference is known; `raybench export RUN --format reference` writes one."
_OWN = "made from this run too"


def standing_text(one: Standing) -> str:
    """Return `97% of the reference for H200 (94 to 101%, 6 devices, 5 hosts, November 2026)`.

    A value out of the range has `, outside: slow` or `, outside: fast` at the end.
    """
    low, high = one.share_range
    model = one.measured.model.removeprefix("NVIDIA ")
    own = f"; {_OWN}" if one.is_own else ""
    mark = "" if one.is_within else f", outside: {'slow' if one.share < 1 else 'fast'}"
    return (
        f"{one.share:.0%} of the reference for {model} ({100 * low:.0f} to {high:.0%}, "
        f"{one.entry.provenance}{own}){mark}"
    )


def count_within(found: Sequence[Standing]) -> str:
    """Return how many are within: `within reference on 11 of 12 quantities`.

    The text names how many quantities have a range too wide to count.
    """
    count = references.count_within(found)
    own = f" ({_OWN})" if count.is_own else ""
    left_out = f"{count.wide} with ranges wider than ±{NARROW:.0%} not counted"
    if not count.counted:
        return f"{left_out}{own}"
    text = f"within reference on {count.within} of {count.counted} quantities{own}"
    return f"{text}; {left_out}" if count.wide else text


def above_peak(one: AbovePeak) -> str:
    """Return why an entry of a reference file is left out."""
    entry = one.entry
    return (
        f"{one.path}: reference {entry.metric} of {entry.of} is left out, because it cannot be: "
        f"{entry.value:,.0f} {entry.unit} is above the peak of {one.model}, {one.peak:,.0f}; "
        "likeliest the work is counted wrong, or the precision was another"
    )
