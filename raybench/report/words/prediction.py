"""What predictions say."""

from __future__ import annotations

from raybench.analysis.prediction import NotPredicted, Unpredictable
from raybench.report.formatting import counted
from raybench.results.metrics import WIDEST_INTERVAL


def not_predicted(why: NotPredicted) -> str:
    """Return why a series is not predicted."""
    match why.kind:
        case Unpredictable.SEVERAL_NODES:
            return (
                f"{why.world_size} devices need several nodes; predictions end at the "
                f"{why.devices_per_node} devices of a node, because the network is not measured"
            )
        case Unpredictable.NO_GRADIENTS:
            return f"{why.workload} does not reduce gradients by DistributedDataParallel"
        case Unpredictable.IMPRECISE:
            steps = zip(why.world_sizes, map(_precision, why.half_intervals), strict=True)
            precisions = ", ".join(f"{world_size}: {precision}" for world_size, precision in steps)
            return (
                "a prediction needs step times of two world sizes with intervals of at most "
                f"±{WIDEST_INTERVAL * 100:.0f} % ({precisions}); measure for longer, on devices "
                "that nothing else uses"
            )
        case Unpredictable.FEW_WORLDS:
            return (
                "a prediction needs ok points of two world sizes on one node, and the run has "
                f"{', '.join(map(str, why.world_sizes)) or 'none'}; sweep world_size: [1, 2]"
            )
        case Unpredictable.STRONG_SCALING:
            return (
                "the points scale strongly, so each device gets less work than in any measured "
                "step; sweep batch_size instead of global_batch_size"
            )
        case Unpredictable.SEVERAL_MODELS:
            return f"the points ran on several device models: {', '.join(why.models)}"
        case Unpredictable.CROWDED:
            return "the workers shared CPU cores, which workers on more devices would not"


def _precision(half_interval: float | None) -> str:
    """Return half of the interval of a step as `±12.0 %`."""
    if half_interval is None:
        return "too few samples"
    return f"±{half_interval * 100:.1f} %"


def answer(devices: str, efficiency: str, base: str) -> str:
    """Return the predicted efficiency as a sentence.

    Args:
        devices: the most devices, as `8 GPUs`.
        efficiency: as `56.8 to 85.4 %`.
        base: devices of the baseline, as `1 GPU`.
    """
    return f"{devices} would reach an efficiency of {efficiency}, compared with {base}."


def precision_of_steps(half_width: float, points: int) -> str:
    """Return the precision of predicted steps: half of the widest 95 % interval."""
    size = f"±{half_width * 100:.1f} %"
    if points == 1:
        return f"The 95 % interval of the predicted step time is {size}."
    return f"The 95 % intervals of the {points} predicted step times are {size} or narrower."


def assumptions(rank: str, measured: str, per_node: str) -> str:
    """Return the assumptions of the predictions.

    Args:
        rank: `GPU` or `worker`.
        measured: devices of the measured points, as `1 GPU to 2 GPUs`.
        per_node: devices of a node, as `4 GPUs`.
    """
    return (
        f"Every {rank} is assumed to need the same time for its own work as on {measured}, with "
        "the same batch per device. Exposed communication is assumed to grow as the bytes that a "
        f"device sends in an all_reduce: 2 (n - 1) / n for n devices. A node of this run has "
        f"{per_node}."
    )


def interval(error_of_a_doubling: float) -> str:
    """Return what the intervals of predictions include and what they leave out."""
    return (
        "The intervals include three errors. The first is the interval of the measured step. The "
        "second is how much of the additional communication computation hides: all or none. The "
        f"third is {error_of_a_doubling * 100:.0f} % for each doubling of the devices, the error "
        "found on H200s of one node. They do not include slower devices or links, other traffic, "
        "or slower loading of data."
    )


def beyond_ideal(highest_efficiency: float) -> str:
    """Return why some predictions exceed an efficiency of 100 %."""
    return (
        f"The highest measured efficiency is {highest_efficiency * 100:.1f} %. Points that "
        "measured more than 100 % are predicted up to their measured efficiency. All others end "
        "at 100 %."
    )


def host_bound(points: int) -> str:
    """Return why predictions of host-bound points may be too slow."""
    verb = "is" if points == 1 else "are"
    return (
        f"{counted(points, 'point')} {verb} host-bound. A part of the communication there may be "
        "Python, which more devices do not slow down."
    )
