"""What takes the lost time of a step, in words."""

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
# The causes, as the end of a sentence on the lost time.
LOST_TO = {
    "lost_comm": "communication that computation does not hide",
    "lost_compute": "slower computation",
    "lost_wait": "waiting for the slowest rank",
    "lost_data": "waiting for data",
    "lost_host": "waiting for the host",
    "lost_unexplained": "unexplained",
}
# For points with an optimizer, which have gradients.
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
_LEAST_SHARE = 0.02
# Noise that is a larger share of a step hides causes.
_MOST_NOISE = 0.05
# Smaller shares of a step are not mentioned.
_LEAST_MENTIONED = 0.0005


def causes_of(rows: Sequence[ScaledRow]) -> Iterator[tuple[str, str]]:
    """Yield (label, sentence): the causes above the noise, then a note on all smaller causes."""
    if not any(map(has_causes, rows)):
        # Without a breakdown everything would be unexplained.
        return
    meanings = dict(_MEANINGS)
    if any(row.optimizer_ms is not None for row in rows):
        meanings["lost_compute"] = _COMPUTE_OF_TRAINING
    noise = max(_LEAST_SHARE, *(step_uncertainty(row) or 0.0 for row in rows))
    shares_below_noise: list[float] = []
    has_gain = has_cause = False
    for name in LOSSES:
        values = [getattr(row, name) for row in rows]
        lost_shares = [value for value in values if value is not None]
        if not lost_shares:
            continue
        low, high = min(lost_shares), max(lost_shares)
        # A share below 0 is a gain.
        largest_share = max(-low, high)
        if largest_share < noise:
            shares_below_noise.append(largest_share)
            continue
        has_cause = True
        has_gain = has_gain or (low <= -MIN_LOSS and name != "lost_unexplained")
        yield CAUSES[name], f"{share_words(low, high, 1)}. {meanings[name]}"
    if has_gain:
        yield "note", "A value below 0 means that the part takes less time than in ideal scaling."
    most = max(shares_below_noise, default=0.0)
    if most < _LEAST_MENTIONED:
        return
    if most <= _MOST_NOISE:
        text = f"Each is at most {share_words(most, digits=1)}, which may be noise."
    elif has_cause:
        text = f"Each share is smaller than the noise (up to {share_words(noise, digits=1)})."
    else:
        text = "No cause can be named: the step times of the rounds differ more than each "
        text += "cause explains."
    yield "other causes" if has_cause else "causes", text
