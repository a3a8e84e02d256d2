"""The columns of the nine tables: their types, units and meaning.

The types are Arrow's. Speed-up and efficiency are not here: they are derived when reporting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from raybench.job.point import BATCH_SIZES, OPTIONAL, RUN_SETTINGS
from raybench.results.metrics import METRICS

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


def _run_settings(*names: str) -> Iterator[Column]:
    """Columns as `raybench.job.point` declares them."""
    kinds: dict[type, str] = {bool: "bool", int: "int64", float: "double"}
    for name in names:
        setting = RUN_SETTINGS[name]
        kind = kinds.get(setting.kind, "string")
        yield Column(
            name=name, kind=kind, unit=setting.about.unit, description=setting.about.column
        )


_KEYS = (
    *_columns("string", "", run_id="id of the run", point_id="id of the point"),
    *_columns("int64", "", attempt="counts from 1, over all rounds"),
)
_ROUND = (
    *_columns("int64", "", round="counts from 1; null: one round"),
    *_columns("bool", "", is_control="baseline point again, at the end of a block"),
)

_RUNS = (
    *_columns(
        "string",
        "",
        run_id="id of the run",
        job_name="name in the job file",
        job_text="job file as it was read",
        job_sha256="SHA-256 of what the job means",
    ),
    *_columns("list<string>", "", argv="command line"),
    *_columns("string", "", status="running, ok, failed or interrupted"),
    *_columns("timestamp", "UTC", started_at="start", finished_at="end; null while running"),
    *_columns("double", "s", paused_s="not swept, until --resume; null: never resumed"),
    *_columns(
        "int64",
        "points",
        points_total="in the plan",
        points_ok="measured",
        points_failed="failed",
        points_skipped="not run",
    ),
    *_columns("map<string,string>", "", baseline="settings of the baseline points"),
    *_columns("list<string>", "", only_devices="those that --devices named; empty: all"),
    *_columns("int64", "", seed="of the order in rounds"),
    *_columns("string", "", cluster="where the workers ran", host="where the driver ran"),
    *_columns("map<string,string>", "", versions="software versions"),
    *_columns(
        "string",
        "",
        git_commit="commit of the working directory",
        workload_sha256="of the workload's source files",
        raybench_sha256="of raybench's files that measure",
    ),
    *_columns("map<string,string>", "", workload_files="SHA-256 of each source file"),
    *_columns(
        "map<string,string>",
        "",
        environment="NCCL_, TORCH_, CUDA_ and OMP_ variables",
        tags="given with --tag",
    ),
)

_POINTS = (
    *_KEYS,
    *_ROUND,
    *_columns("int64", "", control_of="world_size of the block that it ends"),
    *_columns(
        "string",
        "",
        status="ok, oom, error, timeout, lost, skipped, cancelled",
        error_type="class of the exception",
        error_message="why it is not ok",
    ),
    *_columns("int64", "", error_rank="rank that failed first"),
    *_columns(
        "string",
        "",
        error_host="host of that rank",
        error_device="its device, as in cuda:3",
        error_detail="end of its traceback or log",
    ),
    *_columns("timestamp", "UTC", started_at="start"),
    *_columns("double", "s", duration_s="of the whole attempt"),
    *_columns("string", "", workload="name or class"),
    *_columns(
        "map<string,string>",
        "",
        params="parameters of the workload and variables of env, as text",
        env="variables that the job set",
    ),
    *_columns("string", "", workload_sha256="its source", raybench_sha256="raybench's source"),
    *_columns(
        "string",
        "",
        backend="null for 1 rank",
        device_type="cuda or cpu",
        device_name="model",
    ),
    *_run_settings("world_size"),
    *_columns("int64", "", node_count="nodes used"),
    *_run_settings("precision"),
    *_columns("string", "", scaling="weak or strong"),
    *_run_settings(*OPTIONAL, *BATCH_SIZES),
    *_columns("int64", "", grad_accumulation="passes per step"),
    *(
        Column(name=one.name, kind=one.kind, unit=one.unit, description=one.description)
        for one in METRICS
    ),
    *_columns(
        "list<string>",
        "",
        warnings="reasons to doubt the figures",
        neighbours="points, runs and processes beside it",
    ),
    *_columns(
        "bool", "", crowded="CPU workers share cores", quick="a short look: min_seconds is 0"
    ),
    *_columns("map<string,double>", "", workload_metrics="those that the workload declares"),
    *_columns("map<string,string>", "", workload_headings="their headings, with the units"),
)

_SAMPLES = (
    *_KEYS,
    *_ROUND,
    *_columns(
        "int64",
        "",
        repeat="build of the workload, from 0",
        rank="as in torch.distributed",
        iteration="from 0 in each repeat, warm-up apart",
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
    *_columns("bool", "", throttled="clocks were held down"),
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
        rack="of the node, by its label; empty: none",
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
    *_columns("double", "W", power_cap_w="power limit", power_cap_default_w="as delivered"),
    *_columns("string", "", topology="links to the other devices"),
    *_columns("double", "degC", temperature_c="GPU temperature at the start"),
    *_columns("list<string>", "", throttle_reasons="why clocks are limited at the start"),
    *_columns("int64", "", ecc_errors="uncorrected, since the driver was loaded"),
    *_columns("bool", "", persistence_mode="driver stays loaded", mig_mode="GPU is partitioned"),
    *_columns("string", "", pcie_link="PCIe link at the start", pcie_link_max="widest PCIe link"),
    *_columns("int64", "", numa_node="nearest", other_processes="using the device before"),
    *_columns("int64", "bytes", disk_free_bytes="temporary files", shm_free_bytes="/dev/shm"),
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
    *_columns(
        "int64",
        "bytes",
        memory_used_bytes="by all processes",
        nvlink_tx_bytes="sent since the driver was loaded",
        nvlink_rx_bytes="received since the driver was loaded",
    ),
    *_columns("int64", "", ecc_errors="uncorrected, since the driver was loaded"),
    *_columns("list<string>", "", throttle_reasons="why clocks are limited"),
)

_MODULES = (
    *_KEYS,
    *_columns("int64", "", rank="rank"),
    *_columns("string", "", module="name in the model", kind="class"),
    *_columns("int64", "", calls="per step"),
    *_columns("double", "ms", forward_ms="per step", backward_ms="per step"),
)

_REGIONS = (
    *_KEYS,
    *_columns("int64", "", rank="rank"),
    *_columns("string", "", region="name that the step gives it"),
    *_columns("int64", "", calls="per step"),
    *_columns("double", "ms", region_ms="per step, median"),
    *_columns("double", "%", share_pct="of the steps in which it was timed"),
)

_HEALTH = (
    *_columns("string", "", run_id="run", test="what was read", stage="tests that it is one of"),
    *_columns(
        "string",
        "",
        kind="device, pair, node or cluster",
        subject="its name",
        model="of its devices",
    ),
    *_columns("list<string>", "", uuids="of its devices; of a pair from and to"),
    *_columns("int64", "", passes="in which it was read"),
    *_columns("double", "", value="median of the passes, in `unit`; null: did not run"),
    *_columns("string", "", unit="of value", expected="what it was held against"),
    *_columns("double", "", ratio="its time to that of those alike; null: none are"),
    *_columns(
        "string",
        "",
        verdict="bad, untested, suspect, unknown or healthy",
        reason="why it is not healthy",
        evidence="with whom it was tried, and what held",
        culprit="what it is slow because of; empty: itself",
        action="replace, reset, setting or watch",
        command="what to type; never run",
    ),
)

_LINKS = (
    *_columns("string", "", run_id="run", from_uuid="device, or host", to_uuid="device, or host"),
    *_columns("string", "", from_name="its name", to_name="its name", kind="how the bytes went"),
    *_columns("int64", "bytes", message_bytes="of one message"),
    *_columns("double", "GB/s", gb_per_s="bandwidth"),
    *_columns("double", "us", latency_us="of the smallest message"),
)

TABLES = {
    "runs": _RUNS,
    "points": _POINTS,
    "samples": _SAMPLES,
    "devices": _DEVICES,
    "telemetry": _TELEMETRY,
    "modules": _MODULES,
    "regions": _REGIONS,
    "health": _HEALTH,
    "links": _LINKS,
}
# Tables with rows of attempts at points, which `point_id` and `attempt` name.
OF_POINTS = ("points", "samples", "modules", "regions")


def units(table: str) -> dict[str, str]:
    """Column -> unit, in column order; empty where a column has none."""
    return {column.name: column.unit for column in TABLES[table]}


@cache
def schema(table: str) -> pa.Schema:
    """Make the Arrow schema of a table; only the columns that identify the row are not nullable."""
    import pyarrow as pa

    required = {"run_id", "point_id"} if table in OF_POINTS else {"run_id"}
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


@cache
def row_type(table: str) -> pa.StructType:
    """Make the type of a whole row of a table."""
    import pyarrow as pa

    return pa.struct(list(schema(table)))


def _metadata(column: Column) -> dict[str, str]:
    description = {"description": column.description}
    return {"unit": column.unit, **description} if column.unit else description


def _arrow_type(kind: str) -> pa.DataType:
    import pyarrow as pa

    special = {
        "timestamp": pa.timestamp("us", tz="UTC"),
        "list<string>": pa.list_(pa.string()),
        "list<double>": pa.list_(pa.float64()),
        "list<int64>": pa.list_(pa.int64()),
        "map<string,string>": pa.map_(pa.string(), pa.string()),
        "map<string,double>": pa.map_(pa.string(), pa.float64()),
        "map<string,int64>": pa.map_(pa.string(), pa.int64()),
    }
    return special[kind] if kind in special else pa.type_for_alias(kind)
