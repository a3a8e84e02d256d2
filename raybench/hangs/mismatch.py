"""Finds the ranks of a process group that called another collective than most ranks. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from raybench.hangs.history import predict
from raybench.hangs.recorder import Call, CallShape
from raybench.records.hang import HangCause

# Ends of the names of collectives whose inputs may have another size on each rank.
_UNEVEN_SUFFIXES = (
    "all_gather",
    "all_to_all",
    "alltoall",
    "gather",
    "scatter",
    "reduce_scatter",
    "coalesced",
)
# Names that end like an uneven collective, although the inputs have equal sizes.
_EVEN_EXCEPTIONS = ("_all_gather_base", "_reduce_scatter_base", "all_gather_into_tensor")
# Ranks call different collectives just before they hang; older differences did no harm.
_MAX_CALLS_BACK = 32

# The calls of one rank in a group: sequence number -> call.
RankCalls = Mapping[int, Call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Different collectives that ranks called under the same sequence number."""

    # SKIPPED, OTHER_COLLECTIVE, OTHER_SIZE or OTHER_TYPE.
    cause: HangCause
    # Ranks that called the wrong collective; empty if nobody can say which collective is wrong.
    ranks: tuple[int, ...] = ()
    # What the first of `ranks` called, and what the other ranks called.
    called: Call | None = None
    expected: Call | None = None


def find_mismatch(calls_of_ranks: Mapping[int, RankCalls], pending: int) -> Mismatch | None:
    """Return the first mismatch among the last calls; None if all ranks called the same.

    Args:
        calls_of_ranks: rank -> its calls in the group, for at least one rank.
        pending: sequence number of the earliest unfinished call.
    """
    # Between these two numbers the records of all ranks overlap.
    oldest = max(min(rank_calls) for rank_calls in calls_of_ranks.values())
    newest = min(max(rank_calls) for rank_calls in calls_of_ranks.values())
    for number in range(max(oldest, pending - _MAX_CALLS_BACK), newest + 1):
        # Rank -> its call with this number, if recorded.
        calls = {}
        for rank, rank_calls in calls_of_ranks.items():
            if number in rank_calls:
                calls[rank] = rank_calls[number]
        if len({_common_part(call.shape) for call in calls.values()}) > 1:
            return _judge(calls, _common_history(calls_of_ranks, number))
    return None


def _common_part(shape: CallShape) -> CallShape:
    """Return the part of a shape that must be the same on all ranks."""
    has_uneven_name = shape.operation.endswith(_UNEVEN_SUFFIXES)
    if has_uneven_name and shape.operation not in _EVEN_EXCEPTIONS:
        # The inputs may differ between ranks, so only the operation counts.
        return CallShape(operation=shape.operation, sizes=(), dtypes=())
    # Only the number of elements counts: a broadcast may arrive in a tensor of another shape.
    sizes = ((_count_elements(shape),),)
    return CallShape(operation=shape.operation, sizes=sizes, dtypes=shape.dtypes)


def _count_elements(shape: CallShape) -> int:
    return sum(math.prod(sizes) for sizes in shape.sizes)


def _common_history(calls_of_ranks: Mapping[int, RankCalls], number: int) -> list[CallShape]:
    """Return the calls before `number`, back to the last call that differed between ranks."""
    history: list[CallShape] = []
    oldest = max(min(rank_calls) for rank_calls in calls_of_ranks.values())
    for earlier in range(oldest, number):
        calls = [
            rank_calls[earlier] for rank_calls in calls_of_ranks.values() if earlier in rank_calls
        ]
        is_complete = len(calls) == len(calls_of_ranks)
        if is_complete and len({_common_part(call.shape) for call in calls}) == 1:
            history.append(calls[0].shape)
        else:
            history.clear()
    return history


def _judge(calls: Mapping[int, Call], history: Sequence[CallShape]) -> Mismatch:
    """Return which ranks called the wrong collective, and why.

    Args:
        calls: rank -> its call. The calls differ, but have the same sequence number.
        history: the calls before, which were the same on all ranks.
    """
    counts = Counter(_common_part(call.shape) for call in calls.values())
    [(right_shape, count)] = counts.most_common(1)
    if count <= len(calls) / 2:
        # Without a majority the pattern of the earlier calls decides.
        prediction = predict(history)
        if prediction is None:
            return Mismatch(cause=HangCause.OTHER_COLLECTIVE)
        right_shape = _common_part(prediction.shape)
    wrong_ranks, right_calls = [], []
    for rank, call in calls.items():
        if _common_part(call.shape) == right_shape:
            right_calls.append(call)
        else:
            wrong_ranks.append(rank)
    if not right_calls:  # no rank called what was predicted
        return Mismatch(cause=HangCause.OTHER_COLLECTIVE)
    called, expected = calls[wrong_ranks[0]], right_calls[0]
    cause = _classify(called.shape, expected.shape, history)
    return Mismatch(cause=cause, ranks=tuple(wrong_ranks), called=called, expected=expected)


def _classify(called: CallShape, expected: CallShape, history: Sequence[CallShape]) -> HangCause:
    """Return whether a rank skipped the expected collective, or how its call differs from it."""
    # A rank that skips the expected collective calls a later collective too early. Find the later
    # collectives: those that are predicted, and those that have followed before.
    prediction = predict(history)
    following = prediction.following if prediction and prediction.shape == expected else ()
    successors = [after for before, after in pairwise(history) if before == expected]
    if called.operation != expected.operation:
        # `_matches` ignores some sizes: at the end of a block the next collective exchanges
        # durations, and its size differs between blocks.
        next_shapes = (*following[:1], *successors)
        has_skipped = any(_matches(called, shape) for shape in next_shapes)
        return HangCause.SKIPPED if has_skipped else HangCause.OTHER_COLLECTIVE
    if called in following or called in successors:
        return HangCause.SKIPPED
    is_other_type = called.dtypes != expected.dtypes
    return HangCause.OTHER_TYPE if is_other_type else HangCause.OTHER_SIZE


def _matches(shape: CallShape, other: CallShape) -> bool:
    """Return whether two ranks may call these shapes in the same collective."""
    return _common_part(shape) == _common_part(other) and shape.dtypes == other.dtypes
