"""Why numbers are missing, in words: points that are not compared, and parts of a step."""

from __future__ import annotations

from raybench.records.doubts import LossesUnknown, NotCompared, NotComparedKind, NotMeasured
from raybench.records.status import Status


def not_compared_words(why: NotCompared) -> str:
    """Return why an ok point has no speed-up, as a clause."""
    match why.kind:
        case NotComparedKind.NO_BASELINE:
            return "the job names no baseline"
        case NotComparedKind.NO_BASELINE_POINT:
            return f"no point with {why.subject} and the same other settings is ok"
        case NotComparedKind.BASELINE_NOT_OK:
            return f"the baseline point {Status(why.subject).clause}"
        case NotComparedKind.OTHER_DEVICE:
            return f"the baseline point ran on another device: {why.subject}"
        case NotComparedKind.NOT_MEASURED_ALONE:
            return (
                f"the devices differ, and {why.subject} was not measured alone: add points of "
                "world_size 1 with each of the devices"
            )
        case NotComparedKind.NO_THROUGHPUT:
            return "the workload does not set items_per_step, so there is no throughput"
        case NotComparedKind.BASELINE_WITHOUT_THROUGHPUT:
            return "the baseline point has no throughput"
        case NotComparedKind.CLOCKS_LIMITED:
            return f"the clocks were limited at this point ({why.subject})"
        case NotComparedKind.BASELINE_CLOCKS_LIMITED:
            return f"the clocks were limited at the baseline point ({why.subject})"
        case NotComparedKind.CLOCKS_DIFFER:
            return (
                f"the SM clock was {why.value:.0f} MHz, and {why.of_baseline:.0f} MHz at the "
                "baseline point"
            )
        case NotComparedKind.SEVERAL_BASELINES:
            return f"{why.value:.0f} points could be the baseline: {why.subject}"
        case NotComparedKind.NO_COMMON_ROUND:
            return "the baseline point was not ok in any round of this point"


# Why a part of a step or another column is unknown.
_NOT_MEASURED = {
    NotMeasured.COMMUNICATION: "the step itself is communication",
    NotMeasured.NO_OPTIMIZER: "the step calls no optimizer of torch.optim",
    NotMeasured.MEMORY_OF_CPU: "torch does not count the memory of a CPU",
    NotMeasured.GAP_OF_CPU: "on a CPU the host computes",
    NotMeasured.CUDA_GRAPH: "a step that a CUDA graph replays cannot be divided into parts",
    NotMeasured.NO_DDP: "no model was wrapped by context.ddp(), and there is no set_comm_hook",
    NotMeasured.COMPILED: "another way to reduce gradients would compile the model again",
    NotMeasured.OWN_HOOK: "the workload has a communication hook of its own",
    NotMeasured.SCRIPT_WITHOUT_DDP: (
        "the script has no model in DistributedDataParallel, whose gradients have a hook"
    ),
    NotMeasured.SCRIPT_OWN_HOOK: "the script has a communication hook of its own",
    NotMeasured.SCRIPT_OWN_GROUP: "the script's DDP has a process group of its own",
    NotMeasured.NOT_BESIDE_SCRIPT: "raybench cannot be loaded beside the script",
    NotMeasured.SCRIPT_ENDED: "the script ended before this measurement",
    NotMeasured.SCRIPT_NOT_QUEUED: "the steps of a script cannot be queued in advance",
    NotMeasured.NO_GRADIENTS_REDUCED: "DistributedDataParallel reduced no gradients",
    NotMeasured.NOT_ONLY_GRADIENTS: (
        "it is measured only where DistributedDataParallel reduces the gradients"
    ),
    NotMeasured.NO_COLLECTIVES: "no collective of torch.distributed ran in a step",
    NotMeasured.FAILS_ALONE: "the step failed without the other ranks",
    NotMeasured.HOST_TOO_SLOW: "the host is too slow to queue a whole step in advance",
    NotMeasured.OTHER_STEP: "the instrumented steps did not take the same time as the timed ones",
    NotMeasured.NO_MODEL: "the workload has neither a module nor an optimizer of torch.optim",
    NotMeasured.PARTS_EXCEED: "the parts add up to more than the step",
}


def not_measured_words(why: NotMeasured) -> str:
    """Return why a column is null, as `unknown: the step failed without the other ranks`."""
    return f"{'none' if why.does_not_apply else 'unknown'}: {_NOT_MEASURED[why]}"


def losses_unknown_words(why: LossesUnknown) -> str:
    """Return why the causes of lost time are unknown."""
    reason = _NOT_MEASURED[why.reason]
    return f"at the baseline point, {reason}" if why.is_at_baseline else reason
