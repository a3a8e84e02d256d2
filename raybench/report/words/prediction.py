"""What predictions say."""

from __future__ import annotations

from raybench.analysis.prediction import NotPredicted, Unpredictable
from raybench.results.metrics import WIDEST_INTERVAL


def not_predicted(why: NotPredicted) -> str:
    """Return why a series is not predicted."""
    match why.kind:
        case Unpredictable.SEVERAL_NODES:
            return (
                f"{why.world_size} devices need several nodes; their step depends on the network "
                f"and on NCCL's algorithm, so predictions end at the {why.devices_per_node} "
                "devices of a node"
            )
        case Unpredictable.NO_GRADIENTS:
            return (
                f"no step of DistributedDataParallel: {why.workload} has no gradients that are "
                "known to be reduced"
            )
        case Unpredictable.IMPRECISE:
            steps = zip(why.world_sizes, map(_precision, why.half_intervals), strict=True)
            known = ", ".join(f"{world_size} {precision}" for world_size, precision in steps)
            return (
                f"needs two world sizes with steps known to ±{WIDEST_INTERVAL:.0%}, but has "
                f"{known}; measure for longer, on devices that nothing else uses"
            )
        case Unpredictable.FEW_WORLDS:
            return (
                "needs ok points of two world sizes on one node, has "
                f"{', '.join(map(str, why.world_sizes)) or 'none'}; sweep world_size: [1, 2]"
            )
        case Unpredictable.STRONG_SCALING:
            return (
                "scales strongly: ranks share the same work, and with more of them a device has "
                "less than in any step of the run; with global_batch_size, sweep batch_size instead"
            )
        case Unpredictable.SEVERAL_MODELS:
            return f"its points ran on several devices: {', '.join(why.models)}"
        case Unpredictable.CROWDED:
            return "its workers shared cores, which more devices would not"


def _precision(half_interval: float | None) -> str:
    """Return `±12.0%`, half of the interval of a step."""
    if half_interval is None:
        return "of too few samples for an interval"
    return f"±{half_interval:.1%}"
