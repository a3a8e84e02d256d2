"""The ten tables: the dataclass of each, and the Arrow schema that follows from it.

`summary` is derived from `points` when a run ends (`raybench.analysis.frames`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from raybench.records import Column, Device, DeviceSample, Record, Samples, Status
from raybench.records.devices import Finding
from raybench.results.columns import TableColumn, arrow_schema, columns_of
from raybench.results.point_row import AttemptKey, PointRow, keys_of
from raybench.results.run import Run

if TYPE_CHECKING:
    import pyarrow as pa


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
class ModuleRow(AttemptKey):
    """A module of the model on a profiled rank: a row of `modules`."""

    rank: Annotated[int, Column("", "rank")]
    module: Annotated[str, Column("", "name in the model")]
    kind: Annotated[str, Column("", "class")]
    calls: Annotated[int, Column("", "per step")]
    forward_ms: Annotated[float, Column("ms", "per step")]
    backward_ms: Annotated[float | None, Column("ms", "per step")]


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
    params_json: Annotated[str, Column("", "parameters and settings that are no defaults, as JSON")]
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
    compute_ms: Annotated[float | None, Column("ms", "forward and backward")] = None
    optimizer_ms: Annotated[float | None, Column("ms", "optimizer")] = None
    exposed_comm_ms: Annotated[
        float | None, Column("ms", "communication not hidden by computation")
    ] = None
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
TABLES: Mapping[str, tuple[TableColumn, ...]] = {
    "runs": columns_of(Run),
    "points": columns_of(PointRow),
    "summary": columns_of(SummaryRow),
    "samples": columns_of(SampleRow),
    "devices": (_OF_RUN, *columns_of(Device)),
    "telemetry": (_OF_RUN, *columns_of(DeviceSample)),
    "modules": columns_of(ModuleRow),
    "regions": columns_of(RegionRow),
    "health": (_OF_RUN, *columns_of(Finding)),
}
# Tables with rows of attempts at points, which `point_id` and `attempt` name.
OF_POINTS = ("points", "samples", "modules", "regions")


def units(table: str) -> dict[str, str]:
    """Return the unit of each column of a table, in column order; empty where it has none."""
    return {column.name: column.unit for column in TABLES[table]}


@cache
def schema(table: str) -> pa.Schema:
    """Return the Arrow schema of a table; only the columns that identify a row cannot be null."""
    has_points = table in (*OF_POINTS, "summary")
    required = ("run_id", "point_id") if has_points else ("run_id",)
    return arrow_schema(table, TABLES[table], required)


@cache
def _row_type(table: str) -> pa.StructType:
    """Return the Arrow type of a whole row of a table."""
    import pyarrow as pa

    return pa.struct(list(schema(table)))


def arrow_table(table: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return these rows of a table, with its schema; a column that a row lacks is null."""
    import pyarrow as pa

    # One conversion of whole rows: Table.from_pylist makes one for each column.
    try:
        found = pa.array(rows, _row_type(table))
    except UnicodeEncodeError:
        found = pa.array([storable(row) for row in rows], _row_type(table))
    return pa.Table.from_arrays(found.flatten(), schema=schema(table))


def storable(value: Any) -> Any:
    """Return the value with each text made encodable as UTF-8, inside of lists and dicts too.

    Half a surrogate pair in an exception or in a name is no reason to lose the row.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {storable(key): storable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [storable(entry) for entry in value]
    return value


def sample_columns(run_id: str, record: Record) -> dict[str, list[Any]]:
    """Return the rows of `samples` by column: every iteration of every rank, warm-up included.

    Empty without measurements. Ordered by rank, then by repeat, the warm-up first.
    """
    keys = {**keys_of(run_id, record), "round": record.round}
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


def module_rows(run_id: str, record: Record) -> list[ModuleRow]:
    """Return the times by module of each profiled rank, in rank order; empty without a profile."""
    return [
        ModuleRow(
            **keys_of(run_id, record),
            rank=measurement.rank,
            module=module.name,
            kind=module.kind,
            calls=module.calls,
            forward_ms=module.forward_ms,
            backward_ms=module.backward_ms,
        )
        for measurement in record.measurements
        for module in (measurement.profile.modules if measurement.profile else ())
    ]


def region_rows(run_id: str, record: Record) -> list[RegionRow]:
    """Return the regions that the step names, of each rank in rank order; empty without any."""
    return [
        RegionRow(
            **keys_of(run_id, record),
            rank=measurement.rank,
            region=region.name,
            calls=region.calls,
            region_ms=region.ms,
            share_pct=100 * region.share,
        )
        for measurement in record.measurements
        for region in (measurement.breakdown.regions if measurement.breakdown else ())
    ]
