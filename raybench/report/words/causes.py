"""What a step is lost to, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raybench.analysis.answer import MIN_LOSS
from raybench.analysis.rows import ScaledRow
from raybench.analysis.scaling import LOSSES, has_causes
from raybench.report.formatting import share_words, step_uncertainty

# The causes as nouns, in the order of a report.
CAUSES = {
    "lost_comm": "exposed communication",
    "lost_compute": "slower computation",
    "lost_wait": "slow rank",
    "lost_data": "waiting for data",
    "lost_host": "host gap",
    "lost_unexplained": "other time",
}
# What takes the lost time, as the end of a sentence.
LOST_TO = {
    "lost_comm": "communication that computation does not hide",
    "lost_compute": "slower computation",
    "lost_wait": "waiting for the slowest rank",
    "lost_data": "waiting for data",
    "lost_host": "waiting for the host",
    "lost_unexplained": "unexplained",
}
# Said where a point has an optimizer, and so gradients.
_COMPUTE_OF_TRAINING = "Computation, DDP's copies of gradients included, takes longer than ideal."
_MEANINGS = {
    "lost_comm": "Computation does not hide this communication.",
    "lost_compute": "Computation takes longer than ideal.",
    "lost_wait": "The other ranks wait for the slowest rank of a step.",
    "lost_data": "The host waits longer for the next batch than at the baseline.",
    "lost_host": "The device waits longer for the host than at the baseline.",
    "lost_unexplained": "The rest of the step beyond ideal scaling. It includes rare slow steps, "
    "which lengthen only the mean step.",
}

# Smaller shares of a step may be noise, even if the intervals of the step times are narrower.
_LEAST_SHOWN = 0.02
# Where noise is a larger share of a step, it hides causes.
_MOST_NOISE = 0.05
# Smaller shares are not told at all.
_LEAST_TOLD = 0.0005


def causes_of(rows: Sequence[ScaledRow]) -> Iterator[tuple[str, str]]:
    """Yield each cause and its share of the step at these points, then what is below noise.

    Yields nothing without a breakdown: everything would be unexplained.
    """
    if not any(map(has_causes, rows)):
        return
    meanings = dict(_MEANINGS)
    if any(row.optimizer_ms is not None for row in rows):
        meanings["lost_compute"] = _COMPUTE_OF_TRAINING
    noise = max(_LEAST_SHOWN, *(step_uncertainty(row) or 0.0 for row in rows))
    small: list[float] = []
    has_gain = is_any_told = False
    for name in LOSSES:
        lost = sorted(value for row in rows if (value := getattr(row, name)) is not None)
        if not lost:
            continue
        low, high = lost[0], lost[-1]
        if max(-low, high) < noise:
            small.append(max(-low, high))
            continue
        is_any_told = True
        has_gain = has_gain or (low <= -MIN_LOSS and name != "lost_unexplained")
        yield CAUSES[name], f"{share_words(low, high, 1)}. {meanings[name]}"
    if has_gain:
        yield "note", "A value below 0 means that the part takes less time than in ideal scaling."
    most = max(small, default=0.0)
    if most >= _LEAST_TOLD:
        if most > _MOST_NOISE:
            text = "No cause can be named: the step times of the rounds differ more than each "
            text += "cause explains."
            if is_any_told:
                size = share_words(noise, digits=1)
                text = f"Each share is smaller than the noise (up to {size})."
        else:
            text = f"Each is at most {share_words(most, digits=1)}, which may be noise."
        yield "other causes" if is_any_told else "causes", text
