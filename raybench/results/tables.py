"""The tables: a dataclass for the rows of each table, and their schemas.

`raybench.analysis.scaling` derives `summary` from `points` when a run ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from raybench.job.point import Scalar
from raybench.records.device import Device
from raybench.records.devices import DeviceSample, Finding
from raybench.records.measurement import ModuleTime
from raybench.records.metrics import Column
from raybench.records.status import RunStatus, Status
from raybench.results.columns import TableColumn, arrow_schema, columns_of
from raybench.results.point_row import AttemptKey, PointRow

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One execution of a job; settings that older versions did not store are None or empty."""

    run_id: Annotated[str, Column("", "id of the run")]
    job_name: Annotated[str, Column("", "name in the job file")]
    job_text: Annotated[str, Column("", "job file as it was read")]
    job_sha256: Annotated[str, Column("", "SHA-256 of what the job means")]
    argv: Annotated[tuple[str, ...], Column("", "command line")]
    status: Annotated[RunStatus, Column("", "running, ok, failed or interrupted")]
    started_at: Annotated[datetime, Column("UTC", "start")]
    finished_at: Annotated[datetime | None, Column("UTC", "end; null while running")] = None
    # Sum of the times between the end of a sweep and `--resume`.
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
    cpu_section: Annotated[
        bool | None, Column("", "the section cpu of the job replaced other keys")
    ] = None

    @property
    def is_health_check(self) -> bool:
        """Whether `raybench health` made the run, with results in the table `health`."""
        return self.argv[1:2] == ("health",)


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
    """A point of a run, all its rounds in one row.

    A value is None if it is unknown or inapplicable.
    """

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
    doubts: Annotated[
        tuple[str, ...] | None, Column("", "kinds of doubts, as in points; null: unknown")
    ] = None
    error_message: Annotated[str | None, Column("", "why it is not ok")] = None


# Columns of tables whose dataclasses do not know their run or rank.
_RUN = TableColumn(name="run_id", kind="string", about=Column("", "run"), read=str, null=MISSING)
_RANK = TableColumn(name="rank", kind="int64", about=Column("", "rank"), read=int, null=MISSING)
TABLES: Mapping[str, tuple[TableColumn, ...]] = {
    "runs": columns_of(Run),
    "points": columns_of(PointRow),
    "summary": columns_of(SummaryRow),
    "samples": columns_of(SampleRow),
    "devices": (_RUN, *columns_of(Device)),
    "telemetry": (_RUN, *columns_of(DeviceSample)),
    "modules": (*columns_of(AttemptKey), _RANK, *columns_of(ModuleTime)),
    "regions": columns_of(RegionRow),
    "health": (_RUN, *columns_of(Finding)),
}
# Tables whose rows belong to an attempt at a point.
ATTEMPT_TABLES = ("points", "samples", "modules", "regions")


def column_units(table: str) -> dict[str, str]:
    """Return the unit of each column, in their order; "" without a unit."""
    return {column.name: column.unit for column in TABLES[table]}


@cache
def schema(table: str) -> pa.Schema:
    """Return the schema of a table; only its run_id and point_id are required."""
    has_points = table in (*ATTEMPT_TABLES, "summary")
    required = ("run_id", "point_id") if has_points else ("run_id",)
    return arrow_schema(table, TABLES[table], required)


def arrow_table(table: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return rows as an Arrow table of this kind.

    Args:
        rows: values by column, such as `to_row` returns. A missing key becomes null, and an unknown
            key is ignored. In a column of integers, 1.5 becomes 1.

    Raises:
        OverflowError: an integer has more than 64 bits.
        ArrowException: a value does not fit its column.
    """
    import pyarrow as pa

    # Table.from_pylist would be slower, because it converts each column by itself.
    row_type = pa.struct(list(schema(table)))
    try:
        array = pa.array(rows, row_type)
    except UnicodeEncodeError:
        # Lone surrogates are rare, so look for them only now.
        array = pa.array([storable(row) for row in rows], row_type)
    return pa.Table.from_arrays(array.flatten(), schema=schema(table))


def storable(value: Any) -> Any:
    """Return the value with all its texts encodable as UTF-8: lone surrogates become `?`."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {storable(key): storable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [storable(entry) for entry in value]
    return value
