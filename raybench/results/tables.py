"""The tables: the dataclass of a row of each, and how a record becomes rows.

`summary` is derived from `points` when a run ends (`raybench.analysis.scaling`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from raybench.job.point import RUN_SETTINGS, Scalar, setting_text
from raybench.records import (
    NO_COLLECTIVES,
    Column,
    Device,
    ModuleTime,
    RankMetrics,
    Record,
    RunStatus,
    Samples,
    Status,
    combine_ranks,
)
from raybench.records.devices import DeviceSample, Finding
from raybench.results.breakdown import PartColumns, part_columns, write_time
from raybench.results.columns import TableColumn, arrow_schema, columns_of, to_row
from raybench.results.metrics import (
    NO_ITEMS,
    ConditionColumns,
    MemoryColumns,
    RateColumns,
    StepColumns,
    condition_columns,
    crowding,
    half_interval,
    is_imprecise,
    memory_columns,
    rate_columns,
    relate_to_step,
    step_columns,
)
from raybench.stats.outliers import NEARLY_ALL, borne_out_ms, stands_out

if TYPE_CHECKING:
    import pyarrow as pa

    from raybench.job.model import Measure
    from raybench.records.environment import Code

# The mean step may be so much longer than the median one without a warning.
_RARE_STALLS = 0.01
# A time budget is taken for reached from this share of it on.
_NEARLY = 0.95
# The parts come from other steps than the step time: by so much they may exceed it.
_MOST_PARTS = 1.10
# Lateness and negative communication are told from this share of the step on.
_LEAST_SHARE = 0.02
_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One execution of a job.

    workload_sha256, workload_files, raybench_sha256: as `raybench.records.environment.Code`; None,
    and {} for the files, in a run of a version that did not tell. seed: of the order of the points
    in rounds. only_devices: names of those that `--devices` named; empty where all could be used.
    paused_s: from the end of a sweep to `--resume`, in all; None in a run that was never resumed.
    """

    run_id: Annotated[str, Column("", "id of the run")]
    job_name: Annotated[str, Column("", "name in the job file")]
    job_text: Annotated[str, Column("", "job file as it was read")]
    job_sha256: Annotated[str, Column("", "SHA-256 of what the job means")]
    argv: Annotated[tuple[str, ...], Column("", "command line")]
    status: Annotated[RunStatus, Column("", "running, ok, failed or interrupted")]
    started_at: Annotated[datetime, Column("UTC", "start")]
    finished_at: Annotated[datetime | None, Column("UTC", "end; null while running")] = None
    paused_s: Annotated[
        float | None, Column("s", "not swept, until --resume; null: never resumed")
    ] = None
    points_total: Annotated[int, Column("points", "in the plan")]
    points_ok: Annotated[int, Column("points", "measured")] = 0
    points_failed: Annotated[int, Column("points", "failed")] = 0
    points_skipped: Annotated[int, Column("points", "not run")] = 0
    baseline: Annotated[Mapping[str, Scalar], Column("", "settings of the baseline points")] = (
        field(default_factory=dict)
    )
    only_devices: Annotated[
        tuple[str, ...], Column("", "those that --devices named; empty: all")
    ] = ()
    seed: Annotated[int | None, Column("", "of the order in rounds")] = None
    cluster: Annotated[str, Column("", "where the workers ran")]
    host: Annotated[str, Column("", "where the driver ran")]
    versions: Annotated[Mapping[str, str], Column("", "software versions")] = field(
        default_factory=dict
    )
    git_commit: Annotated[str | None, Column("", "commit of the working directory")] = None
    workload_sha256: Annotated[str | None, Column("", "of the workload's source files")] = None
    raybench_sha256: Annotated[str | None, Column("", "of raybench's files that measure")] = None
    workload_files: Annotated[Mapping[str, str], Column("", "SHA-256 of each source file")] = field(
        default_factory=dict
    )
    environment: Annotated[
        Mapping[str, str], Column("", "variables of NCCL, torch, CUDA, OpenMP, gloo and MKL")
    ] = field(default_factory=dict)
    tags: Annotated[Mapping[str, str], Column("", "given with --tag")] = field(default_factory=dict)

    @property
    def is_health_check(self) -> bool:
        """Return whether `raybench health` made the run; its results are the table `health`."""
        return self.argv[1:2] == ("health",)


@dataclass(frozen=True, kw_only=True)
class AttemptKey:
    """The columns that identify an attempt: run, point, and its number."""

    run_id: Annotated[str, Column("", "id of the run")]
    point_id: Annotated[str, Column("", "id of the point")]
    attempt: Annotated[int, Column("", "counts from 1, over all rounds")]


def _setting_column(name: str) -> Column:
    """Return the column of a setting as RUN_SETTINGS has it; KeyError for another name."""
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
    MemoryColumns,
    PartColumns,
    ConditionColumns,
    RateColumns,
    StepColumns,
    RankMetrics,
    PointColumns,
):
    """A row of `points`: an attempt at a point, or the mean of its rounds.

    None: not known, or the metric does not apply.
    """

    # How an uneven step is shared out, and what probes found of each device beforehand.
    share_by_rank: Annotated[
        tuple[int, ...] | None, Column("samples", "of a step, where shares are uneven")
    ] = None
    fixed_ms_by_rank: Annotated[
        tuple[float, ...] | None, Column("ms", "of a step, by a probe of the device alone")
    ] = None
    speed_by_rank: Annotated[
        tuple[float, ...] | None, Column("samples/s", "of further samples, by the probe")
    ] = None
    slow_ratio_by_rank: Annotated[
        tuple[float | None, ...] | None, Column("", "measured, of emulated devices; null: none")
    ] = None
    exchange_ms: Annotated[
        float | None, Column("ms", "what an exchange adds to a balanced step")
    ] = None
    predicted_step_ms: Annotated[
        float | None, Column("ms", "longest own step and the exchange")
    ] = None
    crossover_batch: Annotated[
        float | None, Column("samples", "global; above it by_speed beats fast")
    ] = None
    workload_metrics: Annotated[
        Mapping[str, float] | None, Column("", "those that the workload declares")
    ] = None
    workload_headings: Annotated[
        Mapping[str, str] | None, Column("", "their headings, with the units")
    ] = None
    warnings: Annotated[tuple[str, ...], Column("", "reasons to doubt the figures")] = ()
    neighbours: Annotated[tuple[str, ...], Column("", "points, runs and processes beside it")] = ()
    node_neighbours: Annotated[
        tuple[str, ...], Column("", "runs and processes on other devices of its nodes")
    ] = ()
    crowded: Annotated[bool | None, Column("", "CPU workers share cores")] = None
    quick: Annotated[bool | None, Column("", "a short look: at most 0.5 s were to be timed")] = None


def point_row(run_id: str, record: Record, measure: Measure, code: Code | None = None) -> PointRow:
    """Return the row in `points` of an attempt; without measurements its metrics are None.

    measure: what the job asked for; the row gets a warning if the measurement fell short of it.
    code: what the workers had loaded; None if it was not checked. Raises ValueError where ranks
    differ in their numbers of timed or instrumented steps: our bug, never the user's.
    """
    point, devices, rank = record.point, record.devices, record.error_rank
    settings: dict[str, Any] = {
        name: point.settings.get(name) for name in (*RUN_SETTINGS, "scaling")
    }
    kind = devices[0].kind if devices else None
    failed = devices[rank] if rank is not None and devices else None
    row = PointRow(
        **_keys_of(run_id, record),
        round=record.round,
        control_of=record.control_of or None,
        status=record.status,
        error_type=record.error_type,
        error_message=record.error_message,
        error_rank=rank,
        error_host=failed.host if failed else None,
        error_device=f"{failed.kind}:{failed.index}" if failed else None,
        error_detail=record.error_detail,
        started_at=record.started_at,
        duration_s=record.duration_s,
        workload=point.workload,
        params={name: setting_text(v) for name, v in {**point.params, **point.env}.items()},
        env=dict(point.env),
        workload_sha256=code.workload_sha256 if code else None,
        raybench_sha256=code.raybench_sha256 if code else None,
        backend=_BACKENDS[kind] if kind and point.world_size > 1 else None,
        device_type=kind,
        device_name=", ".join(dict.fromkeys(device.name for device in devices)) or None,
        models_by_rank=tuple(device.name for device in devices) or None,
        node_count=len({device.node_id for device in devices}) or None,
        **settings,
        grad_accumulation=point.grad_accumulation,
        warnings=record.warnings,
        neighbours=record.neighbours,
        node_neighbours=record.node_neighbours,
        mem_estimate_bytes=record.mem_estimate_bytes,
        crowded=any(crowding(devices)) if kind == "cpu" else None,
    )
    if not record.measurements:
        return row
    row = replace(row, **point_metrics(record), quick=measure.is_quick)
    return replace(row, warnings=(*record.warnings, *_doubts(row, record, measure)))


def point_metrics(record: Record) -> dict[str, Any]:
    """Return column -> value of those columns of `points` that an ok record's measurements give.

    None: not known, or does not apply; columns on shares are missing unless the point `is_uneven`.
    Raises ValueError as `point_row` does.
    """
    shares = [m.share for m in record.measurements if m.share is not None]
    # Ranks without a share of an uneven step take no time.
    working = tuple(m for m in record.measurements if m.share is None or m.share.items)
    at_work = replace(record, measurements=working)
    steps = step_columns(at_work)
    typical_ms, mean_ms = steps.step_ms_p50 or 0.0, steps.step_ms_mean or 0.0
    parts = part_columns(working, typical_ms)
    own = {metric: None for one in working for metric in one.workload_metrics}
    values = {
        metric.name: relate_to_step(
            metric.over_step,
            combine_ranks(
                metric.over_ranks or "mean", [one.workload_metrics.get(metric) for one in working]
            ),
            typical_ms=typical_ms,
            mean_ms=mean_ms,
        )
        for metric in own
    }
    methods = {
        **(parts.methods or {}),
        **{metric.name: metric.meaning or metric.description for metric in own},
    }
    subjects = (
        steps,
        rate_columns(at_work, mean_ms),
        condition_columns(working),
        parts,
        memory_columns(at_work),
    )
    found = {name: value for subject in subjects for name, value in vars(subject).items()}
    for column in columns_of(RankMetrics):
        of_ranks = [getattr(one, column.name) for one in working]
        found[column.name] = combine_ranks(column.about.over_ranks or "max", of_ranks)
    # Devices that wait for the others use energy too.
    found["energy_j"] = combine_ranks("sum", [one.energy_j for one in record.measurements])
    if shares:  # the check of an uneven step is made with its probes
        found["gradient_error"] = shares[0].gradient_error
    if shares and len(shares) == len(record.measurements):
        found |= {
            "share_by_rank": tuple(share.items for share in shares),
            "fixed_ms_by_rank": tuple(share.fixed_ms for share in shares),
            "speed_by_rank": tuple(share.items_per_s for share in shares),
            "slow_ratio_by_rank": tuple(share.slow_ratio for share in shares),
            "exchange_ms": shares[0].exchange_ms,
            "predicted_step_ms": shares[0].predicted_step_ms,
            "crossover_batch": shares[0].crossover_batch,
        }
    return {
        **found,
        "methods": methods or None,
        "workload_metrics": {n: v for n, v in values.items() if v is not None} or None,
        "workload_headings": {metric.name: metric.title for metric in own} or None,
    }


def _keys_of(run_id: str, record: Record) -> dict[str, Any]:
    """Return name -> value of the columns that identify an attempt (`AttemptKey`)."""
    return {"run_id": run_id, "point_id": record.point.point_id, "attempt": record.attempt}


def _doubts(row: PointRow, record: Record, measure: Measure) -> Iterator[str]:
    """Yield what the reader of an ok point's row must know, one sentence each."""
    measurements = record.measurements
    if row.batch_size is not None and measurements[0].items_per_step is None:
        yield NO_ITEMS
    if NO_COLLECTIVES in (row.methods or {}).get("comm_exposed_ms", ""):
        yield f"no breakdown on several ranks: {NO_COLLECTIVES}"
    samples = row.iterations or 0
    wanted = measure.fewest_samples * measure.repeats
    if samples < wanted:
        yield f"{samples} of {wanted} iterations timed"
    first = measurements[0].repetitions
    steps = sum(len(one.timed.step_ns) * one.inner_iterations for one in first)
    # Of a repeat.
    timed_s = (row.step_ms_mean or 0.0) * steps / (row.repeats or 1) / 1000
    if measure.is_quick:
        yield f"quick: {timed_s:.2g} s timed"
    elif measure.iterations is None and timed_s < _NEARLY * measure.seconds:
        yield f"timed for {timed_s:.2g} s of the requested {measure.seconds:g} s"
    yield from step_doubts(row, is_count_fixed=measure.iterations is not None)
    yield from part_doubts(row)
    if row.alloc_retries:
        yield (
            f"the timed steps include {row.alloc_retries} retries of the allocator, which had to "
            "give back what it kept: memory is short, take a smaller batch"
        )
    elif row.device_allocs:
        yield (
            f"the timed steps include {row.device_allocs} calls of cudaMalloc: memory had not "
            "settled, warm up for longer"
        )
    if row.throttled:
        timed = [r.timed.throttled for m in measurements for r in m.repetitions]
        marks = [mark for marks in timed for mark in marks]
        reasons = ", ".join(row.throttle_reasons or ()) or "reason unknown"
        yield f"clocks were limited in {sum(marks) / len(marks):.0%} of the samples: {reasons}"
    if row.mfu_pct is not None and row.mfu_pct > 100:
        yield (
            f"{row.mfu_pct:.0f}% of the device's peak is impossible: the operations or the "
            "peak are counted wrong, or the precision is not what was asked for"
        )


def step_doubts(row: PointRow, *, is_count_fixed: bool) -> Iterator[str]:
    """Yield a sentence for each doubt about the step time of a row.

    Args:
        is_count_fixed: the job set a count of iterations, so a small count is no doubt.
    """
    half_width = half_interval(row)
    if half_width is not None and is_imprecise(row):
        known = ">100%" if half_width >= 1 else f"{half_width:.1%}"
        yield f"step time is known to ±{known} only"
    mean_ms, median_ms = row.step_ms_mean or 0.0, row.step_ms_p50 or 0.0
    if mean_ms > (1 + _RARE_STALLS) * median_ms:
        yield (
            f"some steps are much longer: the mean of {write_time(mean_ms, digits=4)}, which the "
            f"rates follow, is {mean_ms / median_ms - 1:.1%} above the median"
        )
    if row.stable is False:
        yield (
            f"step time changes its level still after {row.warmup_iterations} iterations of warm-up"
        )
    elif row.stable is None and not is_count_fixed:
        yield "too few steps to tell whether their time is steady"


def step_of_parts(row: PointRow) -> float | None:
    """Return the step in ms to which the parts of a row add up: the median of their round."""
    return row.step_ms_p50 if row.parts_step_ms is None else row.parts_step_ms


def is_of_first_round(row: PointRow) -> bool:
    """Return whether the parts of a row are of its first round, and its step of all rounds."""
    return row.parts_step_ms is not None and row.parts_step_ms != row.step_ms_p50


def why_no_breakdown(row: PointRow) -> str | None:
    """Return why the parts of a point's step must not be shown; None if they may.

    They must not if compute, optimizer, host gap, exposed communication and on a CPU data together,
    or local step or wait alone, exceed the median step of their round by more than 10 %. What is
    unknown counts as 0. None too without a step time.
    """
    step_ms = step_of_parts(row)
    # Parts that follow each other on the slowest rank; `wait_ms` is time of the others. On a GPU
    # the host may wait for data while the device computes.
    parts_ms = [row.compute_ms, row.optimizer_ms, row.host_gap_ms, row.comm_exposed_ms]
    data_ms = row.data_ms if row.device_type == "cpu" else 0.0
    sum_ms = sum(ms or 0.0 for ms in (*parts_ms, data_ms))
    longest_ms = max(sum_ms, row.local_step_ms or 0.0, row.wait_ms or 0.0)
    if not step_ms or longest_ms <= _MOST_PARTS * step_ms:
        return None
    return (
        f"no breakdown: the parts come to {write_time(longest_ms)}, the step takes "
        f"{write_time(step_ms)}; the instrumented steps were slower than the timed ones"
    )


def is_slowed_by_one_rank(row: PointRow) -> bool:
    """Return whether one rank is slower than the others by its own steps; False if unknown.

    By `stands_out` of the `borne_out_ms`: more than 2 % of the step and three standard errors. In
    the mean of several rounds the rank is what they name most often, which may be none, and the
    excess their mean. A breakdown that contradicts the step counts too: see `why_no_breakdown`.
    """
    excess_ms, step_ms = row.straggler_ms, step_of_parts(row)
    if row.slowest_rank is None or excess_ms is None or not step_ms:
        return False
    excess_ms = borne_out_ms(excess_ms, row.unexplained_ms)
    return stands_out(excess_ms, row.straggler_error_ms or 0.0, step_ms)


def part_doubts(row: PointRow) -> Iterator[str]:
    """Yield a sentence for each thing that slowed the step down: host, a slow or a late rank.

    Instead, why the breakdown cannot be used. Nothing for a point without a breakdown.
    """
    step_ms, exposed_ms = row.step_ms_p50 or 0.0, row.comm_exposed_ms
    if reason := why_no_breakdown(row):
        yield reason
        return
    if row.host_bound and row.host_gap_ms is not None:
        idle = write_time(row.host_gap_ms)
        yield f"host-bound: the device idles for {idle} of {write_time(step_ms)}"
    if is_slowed_by_one_rank(row):
        # It costs its excess at most. Less where communication that would be exposed without it is
        # hidden behind its excess: at most `comm_ms`, of which `exposed_ms` is still exposed.
        excess_ms, device_ms = row.straggler_ms or 0.0, row.straggler_device_ms
        most_ms = borne_out_ms(excess_ms, row.unexplained_ms)
        is_known = row.comm_ms is not None and exposed_ms is not None
        hidden_ms = max(0.0, (row.comm_ms or 0.0) - (exposed_ms or 0.0)) if is_known else 0.0
        least_ms = max(0.0, most_ms - hidden_ms)
        cost = write_time(*([] if least_ms > 0.995 * most_ms else [least_ms]), most_ms)
        if row.device_type == "cpu":
            where = "host"
        elif device_ms is None:
            where = "device or host"
        elif device_ms >= NEARLY_ALL * excess_ms:
            where = "device"
        elif excess_ms - device_ms >= NEARLY_ALL * excess_ms:
            where = "host"
        else:
            where = f"device {write_time(device_ms)}, host {write_time(excess_ms - device_ms)}"
        whose = "the other's" if row.world_size == 2 else "the others'"
        yield (
            f"rank {row.slowest_rank} is slower: its own step takes {write_time(excess_ms)} longer "
            f"than {whose} ({where}), which costs {cost} of {write_time(step_ms)}"
        )
    late_ms = row.late_in_turn_ms
    if late_ms is not None and late_ms > _LEAST_SHARE * step_ms:
        late, step = write_time(late_ms), write_time(step_ms)
        yield f"the ranks are late in turn, which costs up to {late} of {step}"
    rest_ms = row.unexplained_ms
    if row.world_size > 1 and rest_ms is not None and rest_ms < -_LEAST_SHARE * step_ms:
        yield (
            f"the parts exceed the step by {write_time(-rest_ms)}: without communication the step "
            f"takes {write_time(row.local_step_ms or 0.0)}, with it {write_time(step_ms)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow(AttemptKey):
    """An iteration of a rank: a row of `samples`."""

    round: Annotated[int | None, Column("", "counts from 1; null: one round")] = None
    repeat: Annotated[int, Column("", "build of the workload, from 0")]
    rank: Annotated[int, Column("", "as in torch.distributed")]
    iteration: Annotated[int, Column("", "from 0 in each repeat, warm-up apart")]
    is_warmup: Annotated[bool, Column("", "untimed step")]
    start_ns: Annotated[int, Column("ns", "since the point began")]
    step_ns: Annotated[int, Column("ns", "duration")]
    host_ns: Annotated[int, Column("ns", "host time")]
    data_ns: Annotated[int | None, Column("ns", "waiting for data")] = None
    other_parts_ns: Annotated[Mapping[str, int] | None, Column("ns", "other parts")] = None
    throttled: Annotated[bool | None, Column("", "clocks were held down")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRow(AttemptKey):
    """A region of the step on a rank: a row of `regions`."""

    rank: Annotated[int, Column("", "rank")]
    region: Annotated[str, Column("", "name that the step gives it")]
    calls: Annotated[int, Column("", "per step")]
    region_ms: Annotated[float, Column("ms", "per step, median")]
    share_pct: Annotated[float, Column("%", "of the steps in which it was timed")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """A point of a run, all rounds and attempts as one row. None: not known, or does not apply."""

    run_id: Annotated[str, Column("", "id of the run")]
    point_id: Annotated[str, Column("", "id of the point")]
    job_name: Annotated[str, Column("", "name in the job file")]
    workload: Annotated[str, Column("", "name or class")]
    params_json: Annotated[str, Column("", "parameters and other changed settings, as JSON")]
    precision: Annotated[str, Column("", "as in the job")]
    world_size: Annotated[int, Column("", "ranks")]
    device_name: Annotated[str | None, Column("", "model")] = None
    batch_size: Annotated[int | None, Column("items", "per rank")] = None
    global_batch_size: Annotated[int | None, Column("items", "of all ranks")] = None
    status: Annotated[Status, Column("", "of the last attempts; ok where one round is")]
    rounds: Annotated[int, Column("", "how many are ok")] = 0
    step_ms: Annotated[float | None, Column("ms", "median step, mean of the rounds")] = None
    step_ms_low: Annotated[float | None, Column("ms", "95 % interval over rounds")] = None
    step_ms_high: Annotated[float | None, Column("ms", "95 % interval over rounds")] = None
    throughput_items_per_s: Annotated[float | None, Column("items/s", "of all ranks")] = None
    speed_up: Annotated[float | None, Column("", "over the job's baseline point")] = None
    efficiency: Annotated[float | None, Column("", "speed-up over the ratio of ranks")] = None
    parts_step_ms: Annotated[
        float | None, Column("ms", "median step of the first round, whose parts follow")
    ] = None
    compute_ms: Annotated[float | None, Column("ms", "forward and backward")] = None
    optimizer_ms: Annotated[float | None, Column("ms", "optimizer")] = None
    comm_exposed_ms: Annotated[
        float | None, Column("ms", "communication not hidden by computation")
    ] = None
    unexplained_ms: Annotated[float | None, Column("ms", "step less its parts")] = None
    straggler_ms: Annotated[
        float | None, Column("ms", "slowest rank's own step less the others'")
    ] = None
    data_wait_ms: Annotated[float | None, Column("ms", "waiting for the next batch")] = None
    device_idle_ms: Annotated[float | None, Column("ms", "device waits for the host")] = None
    peak_memory_bytes: Annotated[int | None, Column("bytes", "by tensors, largest rank")] = None
    mfu_pct: Annotated[float | None, Column("%", "of the datasheet's peak")] = None
    bus_gb_s: Annotated[float | None, Column("GB/s", "bus bandwidth of a collective")] = None
    metrics_json: Annotated[str, Column("", "the workload's own, as a JSON object")]
    error_message: Annotated[str | None, Column("", "why it is not ok")] = None


_OF_RUN = TableColumn(name="run_id", kind="string", about=Column("", "run"), read=str, null=MISSING)
_RANK = TableColumn(name="rank", kind="int64", about=Column("", "rank"), read=int, null=MISSING)
TABLES: Mapping[str, tuple[TableColumn, ...]] = {
    "runs": columns_of(Run),
    "points": columns_of(PointRow),
    "summary": columns_of(SummaryRow),
    "samples": columns_of(SampleRow),
    "devices": (_OF_RUN, *columns_of(Device)),
    "telemetry": (_OF_RUN, *columns_of(DeviceSample)),
    "modules": (*columns_of(AttemptKey), _RANK, *columns_of(ModuleTime)),
    "regions": columns_of(RegionRow),
    "health": (_OF_RUN, *columns_of(Finding)),
}
# Tables with rows of attempts at points, which `point_id` and `attempt` name.
OF_POINTS = ("points", "samples", "modules", "regions")


def units(table: str) -> dict[str, str]:
    """Return column -> unit ("" for none), in order; raises KeyError for an unknown table."""
    return {column.name: column.unit for column in TABLES[table]}


@cache
def schema(table: str) -> pa.Schema:
    """Return a table's schema; only its run_id and point_id are not null. KeyError if unknown."""
    has_points = table in (*OF_POINTS, "summary")
    required = ("run_id", "point_id") if has_points else ("run_id",)
    return arrow_schema(table, TABLES[table], required)


def arrow_table(table: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return rows, as `to_row` makes them, with the table's schema; texts are made `storable`.

    A missing key is null, also where the schema forbids it; a key without a column is ignored.
    A number becomes the column's type: 1.5 becomes 1 in one of integers. Raises KeyError for an
    unknown table, OverflowError for an integer beyond 64 bits in a column of integers, and
    ArrowException for other values that do not fit.
    """
    import pyarrow as pa

    # One conversion of whole rows: Table.from_pylist makes one for each column.
    row_type = pa.struct(list(schema(table)))
    try:
        found = pa.array(rows, row_type)
    except UnicodeEncodeError:
        found = pa.array([storable(row) for row in rows], row_type)
    return pa.Table.from_arrays(found.flatten(), schema=schema(table))


def storable(value: Any) -> Any:
    """Return the value with each text made encodable as UTF-8, in lists and dicts too.

    A lone surrogate, as in an exception's text, becomes `?`, a tuple a list, a text enum a str.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {storable(key): storable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [storable(entry) for entry in value]
    return value


def sample_columns(run_id: str, record: Record) -> dict[str, list[Any]]:
    """Return column -> values of the rows of `samples`: all iterations of all ranks, with warm-up.

    Ordered by rank, then by repeat, the warm-up first. {} without measurements.
    """
    keys = {**_keys_of(run_id, record), "round": record.round}
    columns: dict[str, list[Any]] = {}
    for measurement in record.measurements:
        for repeat, repetition in enumerate(measurement.repetitions):
            place = {**keys, "rank": measurement.rank, "repeat": repeat}
            for is_warmup, samples in ((True, repetition.warmup), (False, repetition.timed)):
                part = _iterations({**place, "is_warmup": is_warmup}, samples)
                for name, values in part.items():
                    columns.setdefault(name, []).extend(values)
    return columns


def _iterations(place: Mapping[str, Any], samples: Samples) -> dict[str, Iterable[Any]]:
    """Return the rows of `samples` for some iterations, by column. place: what all have."""
    count = len(samples.step_ns)
    unknown = (None,) * count
    others = {storable(name): spent for name, spent in samples.part_ns.items() if name != "data"}
    parts = [dict(zip(others, spent, strict=True)) for spent in zip(*others.values(), strict=True)]
    return {
        **{name: (value,) * count for name, value in place.items()},
        "iteration": range(count),
        "start_ns": samples.start_ns,
        "step_ns": samples.step_ns,
        "host_ns": samples.host_ns,
        "data_ns": samples.part_ns.get("data") or unknown,
        "other_parts_ns": parts or unknown,
        "throttled": samples.throttled or unknown,
    }


def module_rows(run_id: str, record: Record) -> list[dict[str, Any]]:
    """Return the rows of `modules`: one per profiled rank and module, in rank order."""
    return [
        {**_keys_of(run_id, record), "rank": measurement.rank, **to_row(module)}
        for measurement in record.measurements
        for module in (measurement.profile.modules if measurement.profile else ())
    ]


def region_rows(run_id: str, record: Record) -> list[dict[str, Any]]:
    """Return the rows of `regions`: one per rank with a breakdown and region, in rank order."""
    return [
        {
            **_keys_of(run_id, record),
            "rank": measurement.rank,
            "region": region.name,
            "calls": region.calls,
            "region_ms": region.ms,
            "share_pct": 100 * region.share,
        }
        for measurement in record.measurements
        for region in (measurement.breakdown.regions if measurement.breakdown else ())
    ]
