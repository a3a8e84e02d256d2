"""Values compared with references, in words."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.analysis import references
from raybench.analysis.references import NARROW, AbovePeak, Standing
from raybench.report.formatting import counted, share_words

HOW_TO_MAKE = (
    "There are no reference values for these points. `raybench export RUN --format reference` "
    "makes some from a run."
)
# A sentence names the units of values if there are at most so many.
_MOST_UNITS = 2
_OWN = "This run is part of the reference, so the comparison is not independent."


def standing_text(standing: Standing, *, says_own: bool = True) -> str:
    """Return sentences on a value: its share of the reference, and whether that is normal.

    Args:
        standing: the value and its reference.
        says_own: say whether the reference includes this run.
    """
    low, high = standing.share_range
    model = standing.measured.model.removeprefix("NVIDIA ")
    sentences = [
        f"{share_words(standing.share)} of the {model} reference.",
        f"{share_words(low, high)} are normal, as measured on {standing.entry.provenance}.",
    ]
    if not standing.is_within:
        sentences.append(f"Too {'slow' if standing.share < 1 else 'fast'}.")
    if standing.is_own and says_own:
        sentences.append(_OWN)
    return " ".join(sentences)


def within_words(standings: Sequence[Standing], *, says_own: bool = True) -> str:
    """Return sentences on how many values are in the normal range, and how many are not judged.

    Args:
        standings: the values and their references.
        says_own: say whether references include this run.
    """
    count = references.count_within(standings)
    sentences = []
    # Values whose reference has a narrow normal range.
    judged = references.counted_standings(standings)
    units = list(dict.fromkeys(standing.entry.unit for standing in judged))
    if count.counted:
        named_units = f" ({', '.join(units)})" if len(units) <= _MOST_UNITS else ""
        values = f"{counted(count.counted, 'value')}{named_units}"
        compared = f"{values} {'was' if count.counted == 1 else 'were'} compared with references"
        within = f"{count.within} {'is' if count.within == 1 else 'are'}"
        if count.within == count.counted:
            within = "it is" if count.counted == 1 else "all are"
        sentences.append(f"{compared}: {within} in the normal range.")
    if count.wide:
        sentences.append(
            f"{counted(count.wide, 'other value')} cannot be judged: the normal range is wider "
            f"than ±{share_words(NARROW)}."
        )
    if count.is_own and says_own:
        sentences.append(_OWN)
    return " ".join(sentences)


def above_peak(left_out: AbovePeak) -> str:
    """Return why an entry of a reference file is left out."""
    entry = left_out.entry
    return (
        f"{left_out.path}: reference {entry.metric} of {entry.of} is left out, because it cannot "
        f"be true: {entry.value:,.0f} {entry.unit} is above the peak of {left_out.model}, "
        f"{left_out.peak:,.0f}; the work is counted wrong, or the precision was another"
    )
