"""Predict the next collective from the earlier calls, to find the rank that departs from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from raybench.hangs.recorder import CallShape

# Longer common contexts do not make a prediction more certain.
_MOST_CONTEXT = 24
# Share of the calls after the same context that must agree.
_AGREEMENT = 0.75
# A rank that has skipped calls may be this many calls ahead.
_MOST_SKIPPED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class NextCall:
    """The call that followed the same calls earlier."""

    shape: CallShape
    # The calls after the predicted call, the last time.
    following: tuple[CallShape, ...]


def predict(history: Sequence[CallShape]) -> NextCall | None:
    """Return the call that the pattern so far predicts; None without a clear pattern."""
    for length in range(min(_MOST_CONTEXT, len(history) - 1), 0, -1):
        context = tuple(history[-length:])
        ends = [
            end
            for end in range(length, len(history))
            if tuple(history[end - length : end]) == context
        ]
        if not ends:
            continue
        counted = Counter(history[end] for end in ends)
        shape, count = counted.most_common(1)[0]
        if count < _AGREEMENT * len(ends):
            return None
        last = max(end for end in ends if history[end] == shape)
        following = tuple(history[last + 1 : last + 1 + _MOST_SKIPPED])
        return NextCall(shape=shape, following=following)
    return None
