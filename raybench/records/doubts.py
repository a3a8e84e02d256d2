"""Why a number is doubtful or missing, as data; `report/words/doubts.py` has the texts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Self


class Harm(IntEnum):
    """How a doubt harms a number, the worst first."""

    # The step did other work than the job asked for.
    WRONG = 0
    # Something outside the job changed the number by an unknown amount.
    DISTURBED = 1
    # The number is right and contains a loss, which is the value of the doubt.
    SLOWED = 2
    # The number is right, but a related number was not measured.
    INCOMPLETE = 3
    # The number may differ in another run, by about the value of the doubt.
    IMPRECISE = 4


class DoubtKind(StrEnum):
    """What is doubtful about a point."""

    # Letter in the tables of a report; "" for none.
    mark: str
    harm: Harm
    # Unit of value and limit; "" for none. A share is a fraction of 1.
    unit: str
    # Whether a report merges doubts with different subjects, such as different programs.
    merges_subjects: bool

    IMPOSSIBLE = "impossible", "", Harm.WRONG, ""
    OTHER_GRADIENTS = "other_gradients", "", Harm.WRONG, "share"
    BATCH_NORM = "batch_norm", "", Harm.WRONG
    OTHER_PRECISION = "other_precision", "", Harm.WRONG
    EMULATED_PRECISION = "emulated_precision", "", Harm.WRONG
    MISSING_RANKS = "missing_ranks", "", Harm.WRONG, "ranks"
    HOST_CLOCK = "host_clock", "", Harm.WRONG
    NOT_ALONE = "not_alone", "n", Harm.DISTURBED, "", True
    BUSY_CORES = "busy_cores", "n", Harm.DISTURBED, "cores"
    UNKNOWN_USERS = "unknown_users", "", Harm.DISTURBED
    THROTTLED = "throttled", "t", Harm.DISTURBED, "share"
    CROWDED = "crowded", "c", Harm.DISTURBED, "workers"
    DRIFT = "drift", "", Harm.DISTURBED, "share"
    SHARED_NODE = "shared_node", "n", Harm.DISTURBED, "", True
    OTHER_CLOCKS = "other_clocks", "", Harm.DISTURBED, "ratio"
    OTHER_KERNELS = "other_kernels", "", Harm.DISTURBED
    SLOW_RANK = "slow_rank", "s", Harm.SLOWED, "share"
    LATE_IN_TURN = "late_in_turn", "", Harm.SLOWED, "share"
    HOST_BOUND = "host_bound", "h", Harm.SLOWED, "share"
    ALLOCATOR_RETRIES = "allocator_retries", "", Harm.SLOWED, "retries"
    DEVICE_ALLOCS = "device_allocs", "", Harm.SLOWED, "calls"
    ROUND_FAILED = "round_failed", "", Harm.INCOMPLETE, "", True
    SCRIPT_ENDED = "script_ended", "", Harm.INCOMPLETE, "iterations"
    NO_THROUGHPUT = "no_throughput", "", Harm.INCOMPLETE
    NO_BREAKDOWN = "no_breakdown", "b", Harm.INCOMPLETE, "share"
    PARTS_EXCEED = "parts_exceed", "", Harm.INCOMPLETE, "share"
    NO_COLLECTIVES = "no_collectives", "", Harm.INCOMPLETE
    CHECK_FAILED = "check_failed", "", Harm.INCOMPLETE, "", True
    NOT_COMPARED_GRADIENTS = "not_compared_gradients", "", Harm.INCOMPLETE
    NOT_PROFILED = "not_profiled", "", Harm.INCOMPLETE
    LEFT_BEHIND = "left_behind", "", Harm.INCOMPLETE, "", True
    EMULATED = "emulated", "", Harm.INCOMPLETE, "ratio"
    QUICK = "quick", "q", Harm.IMPRECISE, "s"
    SHORT = "short", "", Harm.IMPRECISE, "s"
    FEW_SAMPLES = "few_samples", "", Harm.IMPRECISE, "iterations"
    UNSTEADY = "unsteady", "u", Harm.IMPRECISE, "iterations"
    TOO_FEW_STEPS = "too_few_steps", "", Harm.IMPRECISE, "iterations"
    STALLS = "stalls", "", Harm.IMPRECISE, "share"
    WIDE = "wide", "w", Harm.IMPRECISE, "share"
    BASE_UNSTEADY = "base_unsteady", "", Harm.IMPRECISE

    def __new__(
        cls, value: str, mark: str, harm: Harm, unit: str = "", merges_subjects: bool = False
    ) -> Self:
        """Make a member; the tables store its value."""
        member = str.__new__(cls, value)
        member._value_, member.mark, member.harm, member.unit = value, mark, harm, unit
        member.merges_subjects = merges_subjects
        return member


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """One reason to doubt a number."""

    kind: DoubtKind
    # In the unit of the kind; None if the kind has no value, or if the value is unknown.
    value: float | None = None
    # The threshold for this doubt, or the value that was asked for.
    limit: float | None = None
    # Rank, host, process, column or reason that the doubt is about; empty for the point itself.
    subject: str = ""

    @property
    def excess(self) -> float:
        """How far the value is beyond the limit; larger is worse."""
        value = self.value or 0.0
        # For busy cores, the limit is the number of cores and no threshold.
        if self.kind is DoubtKind.BUSY_CORES:
            return value
        # For these kinds a smaller value is worse, and there is no limit.
        if self.kind in (DoubtKind.TOO_FEW_STEPS, DoubtKind.QUICK):
            return -value
        return abs(value - (self.limit or 0.0))


def worst_of_each(doubts: Iterable[Doubt]) -> tuple[Doubt, ...]:
    """Return the doubt with the largest excess for each kind and subject."""
    worst: dict[tuple[DoubtKind, str], Doubt] = {}
    for doubt in doubts:
        key = (doubt.kind, doubt.subject)
        if key not in worst or doubt.excess > worst[key].excess:
            worst[key] = doubt
    return tuple(worst.values())


class NotMeasured(StrEnum):
    """Why a column of a point is null."""

    # Whether the quantity does not exist for such a point; otherwise it exists and is unknown.
    does_not_apply: bool

    COMMUNICATION = "communication", True
    NO_OPTIMIZER = "no_optimizer", True
    MEMORY_OF_CPU = "memory_of_cpu", True
    GAP_OF_CPU = "gap_of_cpu", True
    CUDA_GRAPH = "cuda_graph"
    NO_DDP = "no_ddp"
    COMPILED = "compiled"
    OWN_HOOK = "own_hook"
    SCRIPT_WITHOUT_DDP = "script_without_ddp"
    SCRIPT_OWN_HOOK = "script_own_hook"
    SCRIPT_OWN_GROUP = "script_own_group"
    NOT_BESIDE_SCRIPT = "not_beside_script"
    SCRIPT_ENDED = "script_ended"
    SCRIPT_NOT_QUEUED = "script_not_queued"
    NO_GRADIENTS_REDUCED = "no_gradients_reduced"
    NOT_ONLY_GRADIENTS = "not_only_gradients"
    NO_COLLECTIVES = "no_collectives"
    FAILS_ALONE = "fails_alone"
    HOST_TOO_SLOW = "host_too_slow"
    OTHER_STEP = "other_step"
    NO_MODEL = "no_model"
    PARTS_EXCEED = "parts_exceed"

    def __new__(cls, value: str, does_not_apply: bool = False) -> Self:
        """Make a member; the tables store its value."""
        member = str.__new__(cls, value)
        member._value_, member.does_not_apply = value, does_not_apply
        return member


class NotComparedKind(StrEnum):
    """Why a point with status ok has no speed-up."""

    NO_BASELINE = "no_baseline"
    NO_BASELINE_POINT = "no_baseline_point"
    BASELINE_NOT_OK = "baseline_not_ok"
    OTHER_DEVICE = "other_device"
    NOT_MEASURED_ALONE = "not_measured_alone"
    NO_THROUGHPUT = "no_throughput"
    BASELINE_WITHOUT_THROUGHPUT = "baseline_without_throughput"
    CLOCKS_LIMITED = "clocks_limited"
    BASELINE_CLOCKS_LIMITED = "baseline_clocks_limited"
    CLOCKS_DIFFER = "clocks_differ"
    SEVERAL_BASELINES = "several_baselines"
    NO_COMMON_ROUND = "no_common_round"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotCompared:
    """Why a point is not compared with its baseline point."""

    kind: NotComparedKind
    # Settings, a device, a status, limits of clocks, or point ids, depending on the kind.
    subject: str = ""
    # CLOCKS_DIFFER: SM clocks in MHz of the point and of its baseline. SEVERAL_BASELINES: number of
    # baselines, in `value`.
    value: float | None = None
    of_baseline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossesUnknown:
    """Why the losses of a step are unknown."""

    reason: NotMeasured
    # Whether the reason holds for the baseline point.
    is_at_baseline: bool = False
