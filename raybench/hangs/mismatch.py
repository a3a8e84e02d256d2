"""Which ranks of a process group called another collective than the other ranks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from raybench.hangs.history import predict
from raybench.hangs.recorder import Call, CallShape
from raybench.records.hang import HangCause

# Collectives whose inputs may have another size on each rank.
_UNEVEN_OPERATIONS = (
    "all_gather",
    "all_to_all",
    "alltoall",
    "gather",
    "scatter",
    "reduce_scatter",
    "coalesced",
)
# The names of these collectives end like an uneven one, but their inputs have equal sizes.
_EVEN_OPERATIONS = ("_all_gather_base", "_reduce_scatter_base", "all_gather_into_tensor")
# Ranks call different collectives just before they hang; older differences did no harm.
_MOST_CALLS_AGO = 32

# Number of a call in its group -> call, for one rank.
RankCalls = Mapping[int, Call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A number under which the ranks of a group called different collectives."""

    # SKIPPED, OTHER_COLLECTIVE, OTHER_SIZE or OTHER_TYPE.
    cause: HangCause
    # Ranks that departed from the other ranks; empty if the evidence fits both sides.
    ranks: tuple[int, ...] = ()
    # What the first of these ranks called, and what the other ranks called.
    called: Call | None = None
    expected: Call | None = None


def find_mismatch(calls_of_ranks: Mapping[int, RankCalls], pending: int) -> Mismatch | None:
    """Return the first mismatch among the last calls; None if all ranks called the same.

    Args:
        calls_of_ranks: rank -> its calls in the group, for at least one rank.
        pending: number of the earliest call that has not finished.
    """
    oldest = max(min(calls) for calls in calls_of_ranks.values())
    newest = min(max(calls) for calls in calls_of_ranks.values())
    for number in range(max(oldest, pending - _MOST_CALLS_AGO), newest + 1):
        calls = {rank: own[number] for rank, own in calls_of_ranks.items() if number in own}
        if len({_comparable(call.shape) for call in calls.values()}) > 1:
            return _judge(calls, _common_history(calls_of_ranks, number))
    return None


def _comparable(shape: CallShape) -> CallShape:
    """Return the part of a shape that must be the same on all ranks."""
    is_uneven = shape.operation.endswith(_UNEVEN_OPERATIONS)
    if is_uneven and shape.operation not in _EVEN_OPERATIONS:
        return CallShape(operation=shape.operation, sizes=(), dtypes=())
    # Ranks may receive a broadcast in a tensor of another shape and the same size.
    elements = ((_count_elements(shape),),)
    return CallShape(operation=shape.operation, sizes=elements, dtypes=shape.dtypes)


def _count_elements(shape: CallShape) -> int:
    total = 0
    for sizes in shape.sizes:
        product = 1
        for size in sizes:
            product *= size
        total += product
    return total


def _common_history(calls_of_ranks: Mapping[int, RankCalls], number: int) -> list[CallShape]:
    """Return the calls before this number that all ranks made alike, without a gap."""
    history: list[CallShape] = []
    oldest = max(min(calls) for calls in calls_of_ranks.values())
    for earlier in range(oldest, number):
        calls = [own[earlier] for own in calls_of_ranks.values() if earlier in own]
        is_known = len(calls) == len(calls_of_ranks)
        if is_known and len({_comparable(call.shape) for call in calls}) == 1:
            history.append(calls[0].shape)
        else:
            history.clear()
    return history


def _judge(calls: Mapping[int, Call], history: Sequence[CallShape]) -> Mismatch:
    """Return which of these calls with one number departs from the others, and how."""
    counts = Counter(_comparable(call.shape) for call in calls.values())
    (usual, count), *_ = counts.most_common()
    if count <= len(calls) / 2:
        # No majority: the pattern of the earlier calls decides.
        prediction = predict(history)
        if prediction is None:
            return Mismatch(cause=HangCause.OTHER_COLLECTIVE)
        usual = _comparable(prediction.shape)
    odd = tuple(rank for rank, call in calls.items() if _comparable(call.shape) != usual)
    if len(odd) == len(calls):
        return Mismatch(cause=HangCause.OTHER_COLLECTIVE)
    called = calls[odd[0]]
    expected = next(call for rank, call in calls.items() if rank not in odd)
    cause = _cause_of(called.shape, expected.shape, history)
    return Mismatch(cause=cause, ranks=odd, called=called, expected=expected)


def _cause_of(called: CallShape, expected: CallShape, history: Sequence[CallShape]) -> HangCause:
    """Return why a rank called this collective where the others called the expected one."""
    prediction = predict(history)
    following = prediction.following if prediction and prediction.shape == expected else ()
    # After a skipped call the next call comes too early. At the end of a block the next call is an
    # exchange of durations, whose size differs between blocks.
    comes_next = [after for before, after in pairwise(history) if before == expected]
    if called.operation != expected.operation:
        has_skipped = any(_is_alike(called, shape) for shape in (*following[:1], *comes_next))
        return HangCause.SKIPPED if has_skipped else HangCause.OTHER_COLLECTIVE
    if called in following or called in comes_next:
        return HangCause.SKIPPED
    is_other_type = called.dtypes != expected.dtypes
    return HangCause.OTHER_TYPE if is_other_type else HangCause.OTHER_SIZE


def _is_alike(shape: CallShape, other: CallShape) -> bool:
    return _comparable(shape) == _comparable(other) and shape.dtypes == other.dtypes
