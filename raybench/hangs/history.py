"""Predicts the next collective from the earlier ones, to find the rank that called another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from raybench.hangs.recorder import CallShape

# Number of last calls to find earlier in the history. More do not make a prediction more certain.
_MAX_CONTEXT_CALLS = 24
# Share of the calls after the same context that must agree.
_MIN_AGREEMENT = 0.75
# A rank that has skipped calls may be this many calls ahead.
_MAX_SKIPPED_CALLS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class NextCall:
    """The predicted next call: it has followed the same calls before."""

    shape: CallShape
    # The calls that came after the predicted call the last time.
    following: tuple[CallShape, ...]


def predict(history: Sequence[CallShape]) -> NextCall | None:
    """Return the call that usually followed the last calls; None without a clear pattern."""
    # The longest context that has occurred before decides.
    for length in range(min(_MAX_CONTEXT_CALLS, len(history) - 1), 0, -1):
        context = tuple(history[-length:])
        indices_after_context = [
            index
            for index in range(length, len(history))
            if tuple(history[index - length : index]) == context
        ]
        if indices_after_context:
            return _most_common_call(history, indices_after_context)
    return None


def _most_common_call(
    history: Sequence[CallShape], indices_after_context: Sequence[int]
) -> NextCall | None:
    """Return the call that followed the context most often; None if it is not common enough."""
    calls = [history[index] for index in indices_after_context]
    shape, count = Counter(calls).most_common(1)[0]
    if count < _MIN_AGREEMENT * len(calls):
        return None
    last_index = max(index for index in indices_after_context if history[index] == shape)
    # A rank that has skipped the predicted call may be in any of these calls.
    following = tuple(history[last_index + 1 : last_index + 1 + _MAX_SKIPPED_CALLS])
    return NextCall(shape=shape, following=following)
