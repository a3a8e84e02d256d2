"""Why numbers are missing, in words: points that are not compared, and parts of a step."""

from __future__ import annotations

from raybench.records import Status
from raybench.records.doubts import LossesUnknown, NotCompared, NotComparedKind, NotMeasured


def not_compared_words(why: NotCompared) -> str:
    """Return why an ok point has no speed-up, without a capital and a full stop."""
    match why.kind:
        case NotComparedKind.NO_BASELINE:
            return "the job names no baseline"
        case NotComparedKind.NO_BASELINE_POINT:
            return f"no ok point with {why.subject} in this series"
        case NotComparedKind.BASELINE_NOT_OK:
            return f"baseline point {Status(why.subject).clause}"
        case NotComparedKind.OTHER_DEVICE:
            return f"baseline point ran on another device: {why.subject}"
        case NotComparedKind.NOT_MEASURED_ALONE:
            return (
                f"its devices differ, and what {why.subject} does alone was not measured: "
                "add points of world_size 1 with each of the devices"
            )
        case NotComparedKind.NO_THROUGHPUT:
            return "no throughput: the workload does not set items_per_step"
        case NotComparedKind.BASELINE_WITHOUT_THROUGHPUT:
            return "baseline point has no throughput"
        case NotComparedKind.CLOCKS_LIMITED:
            return f"clocks were limited at this point ({why.subject})"
        case NotComparedKind.BASELINE_CLOCKS_LIMITED:
            return f"clocks were limited at the baseline point ({why.subject})"
        case NotComparedKind.CLOCKS_DIFFER:
            return (
                f"SM clocks differ: {why.value:.0f} MHz, and {why.of_baseline:.0f} MHz at the "
                "baseline point"
            )
        case NotComparedKind.SEVERAL_BASELINES:
            return f"{why.value:.0f} points match the baseline of this series: {why.subject}"
        case NotComparedKind.NO_COMMON_ROUND:
            return "baseline point was not ok in any round of this point"


_PARTS = {
    NotMeasured.COMMUNICATION: "the step itself is communication",
    NotMeasured.NO_OPTIMIZER: "no optimizer of torch.optim stepped",
    NotMeasured.MEMORY_OF_CPU: "torch does not count the memory of a CPU",
    NotMeasured.CLOCK_OF_CPU: "on a CPU nothing goes on behind the host's clock",
    NotMeasured.GAP_OF_CPU: "on a CPU the host computes",
    NotMeasured.CUDA_GRAPH: "steps replayed from a CUDA graph are not taken apart",
    NotMeasured.NO_DDP: "no model was wrapped by context.ddp(), and there is no set_comm_hook",
    NotMeasured.COMPILED: "a compiled model would be compiled anew for another way of reducing",
    NotMeasured.OWN_HOOK: "the workload has a communication hook of its own",
    NotMeasured.SCRIPT_WITHOUT_DDP: (
        "the script has no model in DistributedDataParallel, whose gradients have a hook"
    ),
    NotMeasured.SCRIPT_OWN_HOOK: "the script has a communication hook of its own",
    NotMeasured.SCRIPT_OWN_GROUP: "the script's DDP has a process group of its own",
    NotMeasured.NOT_BESIDE_SCRIPT: "raybench cannot be loaded beside the script",
    NotMeasured.SCRIPT_ENDED: "the script ended by itself before",
    NotMeasured.SCRIPT_NOT_QUEUED: "the steps of a script cannot be queued beforehand",
    NotMeasured.NO_GRADIENTS_REDUCED: "DistributedDataParallel reduced no gradients",
    NotMeasured.NOT_ONLY_GRADIENTS: "told for gradients that DistributedDataParallel reduces",
    NotMeasured.NO_COLLECTIVES: "no collective of torch.distributed was seen in a step",
    NotMeasured.FAILS_ALONE: "without its peers the step failed",
    NotMeasured.HOST_TOO_SLOW: "the host needs too long to queue a whole step",
    NotMeasured.OTHER_STEP: "the instrumented steps took another time than the timed ones",
    NotMeasured.NO_MODEL: "neither an optimizer of torch.optim nor a module was found",
    NotMeasured.PARTS_EXCEED: "the parts exceed the step",
}


def not_measured_words(why: NotMeasured) -> str:
    """Return why a column is null, as `unknown: the host needs too long to queue a whole step`."""
    return f"{'none' if why.does_not_apply else 'unknown'}: {_PARTS[why]}"


def losses_unknown_words(why: LossesUnknown) -> str:
    """Return why it is not known what a step is lost to."""
    if why.reason is NotMeasured.PARTS_EXCEED and why.is_at_baseline:
        return "the parts exceed the step of the baseline point"
    reason = _PARTS[why.reason]
    return f"at the baseline point, {reason}" if why.is_at_baseline else reason
