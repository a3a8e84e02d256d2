"""A row of the table `points`, and whether its breakdown is consistent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Literal

from raybench.job.point import RUN_SETTINGS
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.hang import HangVerdict
from raybench.records.measurement import RankMetrics
from raybench.records.metrics import Column
from raybench.records.status import Status
from raybench.results.breakdown import PartColumns
from raybench.results.metrics import ConditionColumns, MemoryColumns, RateColumns, StepColumns
from raybench.results.uneven import UnevenColumns
from raybench.stats.outliers import confirmed_excess_ms, stands_out

# The parts and the step time come from different steps, so the parts may exceed the step by 10 %.
_MAX_PARTS = 1.10


@dataclass(frozen=True, kw_only=True)
class AttemptKey:
    """The columns that identify an attempt."""

    run_id: Annotated[str, Column("", "id of the run")]
    point_id: Annotated[str, Column("", "id of the point")]
    attempt: Annotated[int, Column("", "counts from 1, over all rounds")]


def _setting_column(name: str) -> Column:
    """Return the column of a setting of the job."""
    about = RUN_SETTINGS[name].about
    return Column(about.unit, about.column)


@dataclass(frozen=True, kw_only=True)
class PointColumns(AttemptKey):
    """Which point it is, where it ran, and how the attempt ended."""

    round: Annotated[int | None, Column("", "counts from 1; null: one round")] = None
    control_of: Annotated[int | None, Column("", "world_size of the block that it ends")] = None
    status: Annotated[Status, Column("", "ok, oom, error, timeout, lost, skipped, cancelled")]
    error_type: Annotated[str | None, Column("", "class of the exception")] = None
    error_message: Annotated[str | None, Column("", "why it is not ok")] = None
    error_rank: Annotated[int | None, Column("", "rank that failed first")] = None
    error_host: Annotated[str | None, Column("", "host of that rank")] = None
    error_device: Annotated[str | None, Column("", "its device, as in cuda:3")] = None
    error_detail: Annotated[str | None, Column("", "end of its traceback or log")] = None
    hang: Annotated[
        HangVerdict | None, Column("", "which rank hung and why, where evidence tells")
    ] = None
    started_at: Annotated[datetime, Column("UTC", "start")]
    duration_s: Annotated[float | None, Column("s", "of the whole attempt")] = None
    workload: Annotated[str, Column("", "name or class")] = ""
    params: Annotated[
        Mapping[str, str], Column("", "parameters of the workload and variables of env, as text")
    ] = field(default_factory=dict)
    env: Annotated[Mapping[str, str], Column("", "variables that the job set")] = field(
        default_factory=dict
    )
    workload_sha256: Annotated[str | None, Column("", "its source")] = None
    raybench_sha256: Annotated[str | None, Column("", "raybench's source")] = None
    backend: Annotated[str | None, Column("", "null for 1 rank")] = None
    device_type: Annotated[str | None, Column("", "cuda or cpu")] = None
    device_name: Annotated[str | None, Column("", "model")] = None
    world_size: Annotated[int, _setting_column("world_size")] = 1
    node_count: Annotated[int | None, Column("", "nodes used")] = None
    precision: Annotated[str, _setting_column("precision")] = "fp32"
    scaling: Annotated[Literal["weak", "strong"] | None, Column("", "weak or strong")] = None
    cuda_graph: Annotated[bool, _setting_column("cuda_graph")] = False
    shares: Annotated[str, _setting_column("shares")] = "equal"
    slow_ratio: Annotated[float, _setting_column("slow_ratio")] = 1.0
    slow_count: Annotated[int, _setting_column("slow_count")] = 1
    slow_by: Annotated[str, _setting_column("slow_by")] = "compute"
    devices: Annotated[str, _setting_column("devices")] = "any"
    strategy: Annotated[str, _setting_column("strategy")] = "pack"
    batch_size: Annotated[int | None, _setting_column("batch_size")] = None
    global_batch_size: Annotated[int | None, _setting_column("global_batch_size")] = None
    grad_accumulation: Annotated[int | None, Column("", "passes per step")] = None
    models_by_rank: Annotated[
        tuple[str, ...] | None, Column("", "models of the devices, in rank order")
    ] = None


@dataclass(frozen=True, kw_only=True)
class PointRow(
    # Columns have the reverse order of these classes; the fields below come last.
    UnevenColumns,
    MemoryColumns,
    PartColumns,
    ConditionColumns,
    RateColumns,
    StepColumns,
    RankMetrics,
    PointColumns,
):
    """A row of `points`: an attempt at a point, or the mean of its rounds.

    A value is None if it is unknown or inapplicable.
    """

    workload_metrics: Annotated[
        Mapping[str, float] | None, Column("", "those that the workload declares")
    ] = None
    workload_headings: Annotated[
        Mapping[str, str] | None, Column("", "their headings, with the units")
    ] = None
    doubts: Annotated[
        tuple[Doubt, ...] | None, Column("", "reasons to doubt the numbers; null: unknown")
    ] = None
    neighbours: Annotated[tuple[str, ...], Column("", "points, runs and processes beside it")] = ()
    node_neighbours: Annotated[
        tuple[str, ...], Column("", "runs and processes on other devices of its nodes")
    ] = ()
    crowded: Annotated[bool | None, Column("", "CPU workers share cores")] = None
    quick: Annotated[bool | None, Column("", "a short look: at most 0.5 s were to be timed")] = None


def step_of_parts(row: PointRow) -> float | None:
    """Return the median step in ms of the round whose parts the row has; None if unknown."""
    return row.step_ms_p50 if row.parts_step_ms is None else row.parts_step_ms


def are_parts_of_first_round(row: PointRow) -> bool:
    """Return whether the parts are of the first round, but the step is the mean of all rounds."""
    return row.parts_step_ms is not None and row.parts_step_ms != row.step_ms_p50


def why_no_breakdown(row: PointRow) -> Doubt | None:
    """Return a doubt if the sum of the parts exceeds the step by more than 10 %; else None.

    The local step and the wait must not exceed the step by more than 10 % either. Reports do not
    show parts with this doubt.
    """
    step_ms = step_of_parts(row)
    # Add the parts that are sequential on the slowest rank. A GPU computes while its host waits for
    # data, so only a CPU adds that time.
    parts_ms = [row.compute_ms, row.optimizer_ms, row.host_gap_ms, row.comm_exposed_ms]
    if row.device_type == "cpu":
        parts_ms.append(row.data_ms)
    sum_ms = sum(part_ms or 0.0 for part_ms in parts_ms)
    longest_ms = max(sum_ms, row.local_step_ms or 0.0, row.wait_ms or 0.0)
    if not step_ms or longest_ms <= _MAX_PARTS * step_ms:
        return None
    return Doubt(kind=DoubtKind.NO_BREAKDOWN, value=longest_ms / step_ms, limit=_MAX_PARTS)


def is_slowed_by_one_rank(row: PointRow) -> bool:
    """Return whether the slowest rank is clearly slower than a typical rank by its own work."""
    step_ms = step_of_parts(row)
    if row.slowest_rank is None or row.straggler_ms is None or not step_ms:
        return False
    # `straggler_ms` is the difference between both ranks in steps without communication. The
    # difference counts less if the parts of a step are longer than the timed step.
    excess_ms = confirmed_excess_ms(row.straggler_ms, row.unexplained_ms)
    error_ms = row.straggler_error_ms or 0.0
    return stands_out(excess_ms, error_ms, step_ms)
