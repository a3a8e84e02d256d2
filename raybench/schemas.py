"""The columns of the five tables: their types, units and meaning.

The types are Arrow's. Speed-up and efficiency are not here: they are derived when reporting.

History of the schema (a change of any column raises SCHEMA_VERSION and adds a line):
    1  the first: runs, points, samples, devices, telemetry
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. unit: empty where there is none; description: short, every part repeats it."""

    name: str
    kind: str
    unit: str
    description: str


def _columns(kind: str, unit: str, /, **descriptions: str) -> tuple[Column, ...]:
    return tuple(
        Column(name=name, kind=kind, unit=unit, description=text)
        for name, text in descriptions.items()
    )


_KEYS = (
    *_columns("string", "", run_id="run", point_id="point"),
    *_columns("int64", "", attempt="from 1"),
)

_RUNS = (
    *_columns(
        "string",
        "",
        run_id="run",
        job_name="name in the job file",
        job_text="job file as it was read",
        job_sha256="SHA-256 of what the job means",
    ),
    *_columns("list<string>", "", argv="command line"),
    *_columns("string", "", status="running, ok, failed or interrupted"),
    *_columns("timestamp", "UTC", started_at="start", finished_at="end; null while running"),
    *_columns(
        "int64",
        "points",
        points_total="in the plan",
        points_ok="measured",
        points_failed="failed",
        points_skipped="not run",
    ),
    *_columns("map<string,string>", "", baseline="settings of the baseline points"),
    *_columns("string", "", cluster="where the workers ran", host="where the driver ran"),
    *_columns("map<string,string>", "", versions="software versions"),
    *_columns("string", "", git_commit="commit of the working directory"),
    *_columns(
        "map<string,string>",
        "",
        environment="NCCL_, TORCH_, CUDA_ and OMP_ variables",
        tags="given with --tag",
    ),
)

_POINTS = (
    *_KEYS,
    *_columns(
        "string",
        "",
        status="how it ended",
        error_type="kind of failure",
        error_message="reason",
    ),
    *_columns("timestamp", "UTC", started_at="start"),
    *_columns("double", "s", duration_s="attempt"),
    *_columns("string", "", workload="name or class"),
    *_columns("map<string,string>", "", params="parameters"),
    *_columns(
        "string",
        "",
        backend="null for 1 rank",
        device_type="cuda or cpu",
        device_name="model",
    ),
    *_columns("int64", "", world_size="ranks", node_count="nodes used"),
    *_columns("string", "", precision="arithmetic", scaling="weak or strong"),
    *_columns(
        "int64",
        "samples",
        batch_size="per device and pass",
        global_batch_size="per optimizer step",
    ),
    *_columns("int64", "", grad_accumulation="passes per step"),
    *_columns("double", "s", setup_s="max over ranks"),
    *_columns("int64", "", warmup_iterations="done", iterations="timed"),
    *_columns(
        "double",
        "ms",
        step_ms_mean="mean",
        step_ms_p50="step time: median",
        step_ms_p90="90th percentile",
        step_ms_p95="95th percentile",
        step_ms_p99="99th percentile",
        step_ms_min="minimum",
        step_ms_max="maximum",
        step_ms_std="std. deviation",
        step_ms_ci_low="95 % interval",
        step_ms_ci_high="95 % interval",
    ),
    *_columns("double", "samples/s", throughput="all ranks"),
    *_columns("double", "ms", skew_ms_p50="max - min rank"),
    *_columns("int64", "", slowest_rank="largest median"),
    *_columns(
        "bool",
        "",
        host_bound="GPU waits for CPU",
        stable="steady",
        throttled="clocks limited",
    ),
    *_columns(
        "int64",
        "bytes",
        peak_mem_allocated_bytes="max over ranks",
        peak_mem_reserved_bytes="max over ranks",
    ),
    *_columns(
        "double",
        "ms",
        compute_ms="computing",
        comm_ms="communicating",
        comm_exposed_ms="not hidden",
        wait_ms="for other ranks",
        data_ms="waiting for data",
        optimizer_ms="optimizer",
        host_gap_ms="device idle",
    ),
    *_columns("double", "FLOP", flops_per_step="one device"),
    *_columns("double", "TFLOP/s", achieved_tflops_per_device="achieved"),
    *_columns("double", "%", mfu_pct="utilization"),
    *_columns("double", "GB/s", algbw_gb_s="nccl-tests", busbw_gb_s="nccl-tests"),
    *_columns("double", "J", energy_j="all devices"),
    *_columns("list<string>", "", warnings="what to doubt"),
)

_SAMPLES = (
    *_KEYS,
    *_columns(
        "int64",
        "",
        repeat="from 0",
        rank="rank",
        iteration="from 0, warm-up apart",
    ),
    *_columns("bool", "", is_warmup="untimed step"),
    *_columns(
        "int64",
        "ns",
        start_ns="since the point began",
        step_ns="duration",
        host_ns="host time",
        data_ns="waiting for data",
    ),
    *_columns("map<string,int64>", "ns", other_parts_ns="other parts"),
)

_DEVICES = (
    *_columns("string", "", run_id="run"),
    *_columns(
        "string",
        "",
        kind="cuda or cpu",
        node_id="node",
        host="host name",
        address="IP address",
    ),
    *_columns("int64", "", index="on its node, in PCI order"),
    *_columns(
        "string", "", uuid="identity", name="model", pci_bus_id="PCI id", driver_version="driver"
    ),
    *_columns("int64", "bytes", memory_bytes="total"),
    *_columns(
        "int64",
        "MHz",
        sm_clock_mhz="SM clock at the start",
        sm_clock_max_mhz="highest SM clock",
        memory_clock_mhz="memory clock at the start",
    ),
    *_columns("double", "W", power_cap_w="power limit"),
    *_columns("string", "", topology="links to the other devices"),
    *_columns(
        "int64",
        "",
        process_id="of the worker",
        cpu_count="of the node",
        niceness="of the worker",
        omp_num_threads="of the worker",
    ),
    *_columns(
        "map<string,string>",
        "",
        versions="software of the worker",
        environment="variables of the worker",
    ),
)

_TELEMETRY = (
    *_columns("string", "", run_id="run", node_id="node"),
    *_columns("int64", "", index="device on its node, in PCI order"),
    *_columns("string", "", uuid="device"),
    *_columns("timestamp", "UTC", time="when it was read"),
    *_columns("int64", "MHz", sm_clock_mhz="SM clock", memory_clock_mhz="memory clock"),
    *_columns("double", "W", power_w="power drawn"),
    *_columns("double", "degC", temperature_c="GPU temperature"),
    *_columns(
        "double", "%", gpu_utilization_pct="kernel running", memory_utilization_pct="memory busy"
    ),
    *_columns("list<string>", "", throttle_reasons="why clocks are held down"),
)

TABLES = {
    "runs": _RUNS,
    "points": _POINTS,
    "samples": _SAMPLES,
    "devices": _DEVICES,
    "telemetry": _TELEMETRY,
}


def units(table: str) -> dict[str, str]:
    """Column -> unit, in column order; empty where a column has none."""
    return {column.name: column.unit for column in TABLES[table]}


@cache
def schema(table: str) -> pa.Schema:
    """The Arrow schema of a table. Every column is nullable but those that identify the row."""
    import pyarrow as pa

    required = {"run_id"} if table in ("runs", "devices", "telemetry") else {"run_id", "point_id"}
    fields = [
        pa.field(
            column.name,
            _arrow_type(column.kind),
            nullable=column.name not in required,
            metadata=_metadata(column),
        )
        for column in TABLES[table]
    ]
    return pa.schema(fields, metadata={"table": table, "schema_version": str(SCHEMA_VERSION)})


def _metadata(column: Column) -> dict[str, str]:
    description = {"description": column.description}
    return {"unit": column.unit, **description} if column.unit else description


def _arrow_type(kind: str) -> pa.DataType:
    import pyarrow as pa

    special = {
        "timestamp": pa.timestamp("us", tz="UTC"),
        "list<string>": pa.list_(pa.string()),
        "map<string,string>": pa.map_(pa.string(), pa.string()),
        "map<string,int64>": pa.map_(pa.string(), pa.int64()),
    }
    return special[kind] if kind in special else pa.type_for_alias(kind)
