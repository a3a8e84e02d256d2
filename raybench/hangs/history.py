"""Predict the next collective from the earlier calls, to find the rank that departs from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from raybench.hangs.recorder import Call, CallShape

# Longer common contexts tell no more.
_MOST_CONTEXT = 24
# Share of the calls after the same context that must agree.
_AGREEMENT = 0.75
# How far ahead a rank that skipped calls may be.
_MOST_SKIPPED = 256

# A call with the line that made it: two calls of one shape from different lines are told apart.
Key = tuple[CallShape, str]


def key_of(call: Call) -> Key:
    """Return what identifies a call in the repeating pattern of a program."""
    place = f"{call.place.path}:{call.place.line}" if call.place else ""
    return call.shape, place


@dataclass(frozen=True, slots=True, kw_only=True)
class NextCall:
    """The call that followed the same calls earlier."""

    key: Key
    # The calls after the predicted one, the last time.
    following: tuple[Key, ...]


def predict(history: Sequence[Key]) -> NextCall | None:
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
        key, count = counted.most_common(1)[0]
        if count < _AGREEMENT * len(ends):
            return None
        last = max(end for end in ends if history[end] == key)
        following = tuple(history[last + 1 : last + 1 + _MOST_SKIPPED])
        return NextCall(key=key, following=following)
    return None
