"""What the runs of a workload or a job answer."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from raybench.errors import UsageError

Best = Literal["max", "min"]

# Columns of `points` and `scaling` that an answer can name -> whether max or min is the best.
ANSWER_METRICS: Mapping[str, Best] = {
    **dict.fromkeys(("speed_up", "efficiency", "throughput", "batch_size"), "max"),
    **dict.fromkeys(("step_ms_p50", "step_ms_p99", "first_step_ms", "compiled_step_ms"), "min"),
    **dict.fromkeys(("compute_ms", "comm_exposed_ms", "straggler_ms", "data_ms"), "min"),
    **dict.fromkeys(("optimizer_ms", "host_gap_ms"), "min"),
    **dict.fromkeys(("peak_mem_allocated_bytes", "energy_j"), "min"),
    **dict.fromkeys(("achieved_tflops_per_device", "mfu_pct", "mfu_6n_pct"), "max"),
    **dict.fromkeys(("gemm_share_pct", "algbw_gb_s", "busbw_gb_s", "memory_gb_s"), "max"),
    "samples_per_joule": "max",
}
SAMPLES = "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a run answers. `Workload.answers` lists the answers that a workload declares.

    >>> import raybench
    >>> raybench.Answer(metric="memory_gb_s", over=("size_bytes",)).best
    'max'

    Args:
        metric: a column of the table `points` or `scaling`, or a metric that the workload declares.
        over: settings whose values are compared. Empty: all settings that vary.
        best: whether the largest or the smallest value is the best: max or min.
        items: what a step finishes, in the plural, such as "tokens".
        question: the question of the job file; empty if it asks none.

    Raises:
        UsageError: `over` is not a tuple, or `best` is neither max nor min.
    """

    metric: str
    over: tuple[str, ...] = ()
    best: Best = "max"
    items: str = SAMPLES
    question: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.over, tuple) or self.best not in typing.get_args(Best):
            raise UsageError(f"Answer {self.metric}: over must be a tuple, best max or min")
