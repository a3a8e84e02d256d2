"""The metrics of a point, each declared once.

From here the table `points` has their columns, `point_metrics` how ranks become a point, and the
reports their columns, the legend and the progress line. A column that is not computed from one
value a rank is computed in `point_metrics`, a derived one in `analysis.scaling`.
A workload declares metrics of its own in its class: their values are in the column
`workload_metrics`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raybench.records import Measurement
from raybench.records.metric import Metric, combine_ranks, relate_to_step

Row = Mapping[str, Any]


def _plain(kind: str, unit: str, /, **descriptions: str) -> tuple[Metric, ...]:
    """Metrics that only `show` and the exports have, of one type and unit."""
    return tuple(
        Metric(name=name, kind=kind, unit=unit, description=text)
        for name, text in descriptions.items()
    )


def _memory_part(name: str, heading: str, description: str, meaning: str) -> Metric:
    """Declare a part of the memory at its peak."""
    return Metric(
        name=f"mem_{name}_bytes",
        unit="bytes",
        description=description,
        kind="int64",
        heading=heading,
        meaning=meaning,
        format="gib",
    )


def _part(name: str, description: str, heading: str, meaning: str) -> Metric:
    """Declare a part of the step, in the unit of the table."""
    return Metric(
        name=name,
        unit="ms",
        description=description,
        heading=heading,
        meaning=meaning,
        format="part",
    )


# In the order of their columns.
METRICS: tuple[Metric, ...] = (
    Metric(
        name="setup_s",
        unit="s",
        description="process group and model, slowest rank",
        over_ranks="max",
    ),
    *_plain(
        "int64",
        "",
        repeats="builds of the workload",
        warmup_iterations="done",
        iterations="timed samples",
        inner_iterations="steps per timed sample",
    ),
    *_plain(
        "double",
        "ms",
        step_ms_mean="whole time over its steps",
        step_ms_p50="median step time, since version 5 not of maxima",
        step_ms_p90="90th percentile",
        step_ms_p95="95th percentile",
    ),
    Metric(
        name="step_ms_p99",
        unit="ms",
        description="99th percentile",
        heading="p99",
        meaning="the 99th percentile of the iterations",
        format="time",
    ),
    *_plain(
        "double",
        "ms",
        step_ms_min="minimum",
        step_ms_max="maximum",
        step_ms_std="standard deviation",
        step_ms_ci_low="95 % interval of the median, low end",
        step_ms_ci_high="95 % interval of the median, high end",
        step_ms_repeat_std="of the repeats' medians",
    ),
    *_plain("double", "", autocorrelation="of successive step times"),
    Metric(
        name="throughput",
        unit="samples/s",
        description="of all ranks; since version 5 by the mean",
        heading="samples/s",
        meaning="all {ranks} together",
    ),
    *_plain("double", "ms", skew_ms_p50="slowest less fastest rank, median"),
    *_plain("int64", "", slowest_rank="rank that is slower than the others"),
    *_plain(
        "bool",
        "",
        host_bound="the GPU waits for the host",
        stable="the level stays; null: too few steps",
        throttled="clocks were held down",
    ),
    *_plain("list<string>", "", throttle_reasons="why, as NVML names it"),
    *_plain("double", "MHz", sm_clock_mhz_p50="median while timed, slowest device"),
    Metric(
        name="peak_mem_allocated_bytes",
        unit="bytes",
        description="by tensors, largest rank",
        kind="int64",
        over_ranks="max",
        heading="GiB",
        meaning="peak memory allocated on the device that needs most",
        format="gib",
    ),
    Metric(
        name="peak_mem_reserved_bytes",
        unit="bytes",
        description="by torch's allocator, largest rank",
        kind="int64",
        over_ranks="max",
    ),
    Metric(
        name="first_step_ms",
        unit="ms",
        description="first step after the build, slowest rank",
        heading="first",
        meaning="the first step after the workload was built, on the slowest rank",
        format="time",
    ),
    Metric(
        name="compiled_step_ms",
        unit="ms",
        description="first step after torch.compile, slowest rank",
        heading="compiled",
        meaning="the first step after the last compiling one, on the slowest rank",
        format="time",
    ),
    Metric(
        name="new_processes",
        description="they had run no point before: a first step is cold",
        kind="bool",
    ),
    Metric(
        name="alloc_retries",
        description="allocator ran out in the timed steps, largest rank",
        kind="int64",
        over_ranks="max",
    ),
    Metric(
        name="device_allocs",
        description="cudaMalloc calls in the timed steps, largest rank",
        kind="int64",
        over_ranks="max",
    ),
    Metric(
        name="transports",
        description="ways of the bytes between ranks, as NCCL names them",
        kind="list<string>",
    ),
    Metric(
        name="nccl_choices",
        description="what NCCL ran for collectives, by its log",
        kind="list<string>",
        heading="NCCL ran",
        meaning="algorithm and protocol of the collectives of a step, by NCCL's own log",
        format="choices",
    ),
    *_plain("list<string>", "", attention_kernels="of torch's, those that a step ran"),
    *_plain("list<string>", "", models_by_rank="models of the devices, in rank order"),
    *_plain("double", "ms", local_step_ms="step without communication"),
    _part(
        "compute_ms",
        "forward and backward pass",
        "compute",
        "the device's forward and backward pass, with DDP's work on gradients",
    ),
    *_plain("double", "ms", comm_ms="collectives from start to end"),
    _part(
        "comm_exposed_ms",
        "step less the slowest rank's local step",
        "comm",
        "the step beyond the slowest rank's own, communication that nothing hides",
    ),
    _part(
        "straggler_ms",
        "slowest rank's local step less the others'",
        "late",
        "how much longer the slowest rank's own step is than the others'; it is in the other parts",
    ),
    *_plain(
        "double",
        "ms",
        straggler_error_ms="standard error of straggler_ms",
        straggler_device_ms="part of straggler_ms on the device",
        late_in_turn_ms="cost of ranks that are late in turn",
        hooked_step_ms="step with timed communication",
        local_step_drift_ms="later local steps less first ones",
        wait_ms="for the slowest rank",
    ),
    _part("data_ms", "waiting for the next batch", "data", "the host waits for the next batch"),
    _part("optimizer_ms", "optimizer step", "optim", "the optimizer"),
    _part("host_gap_ms", "device idle, the host is late", "idle", "the device waits for the host"),
    *_plain(
        "list<double>",
        "ms",
        local_step_ms_by_rank="median local step, in rank order",
        device_ms_by_rank="its work on the device, in rank order",
    ),
    *_plain(
        "list<double>",
        "ms",
        wall_unsynced_ms_by_rank="host clock around a step, not waited for",
        wall_synced_ms_by_rank="the same, waited for",
    ),
    *_plain("double", "ms", local_copy_ms="copies for collectives, in local_step_ms"),
    *_plain("map<string,int64>", "", comm_calls="collectives a step by kind, largest rank"),
    *_plain("map<string,int64>", "bytes", comm_bytes="their messages, as nccl-tests counts"),
    *_plain("map<string,double>", "GB/s", comm_busbw_gb_s="inside the step, by kind"),
    _memory_part(
        "parameters",
        "params",
        "at the peak, with buffers",
        "parameters and buffers of the model",
    ),
    _memory_part("gradients", "grads", "there at the peak", "gradients that are there then"),
    _memory_part("optimizer", "state", "state of optimizers", "the optimizer's state"),
    _memory_part(
        "activations",
        "acts",
        "added by the step, temporary too",
        "activations, and what else the step adds",
    ),
    _memory_part(
        "other", "other", "at the start of the step", "what else was there before: data, buckets"
    ),
    Metric(
        name="mem_estimate_bytes",
        unit="bytes",
        description="of the peak, from the settings, before it ran",
        kind="int64",
        heading="estimate",
        meaning="what was estimated of the peak before the point ran, from its settings alone",
        format="gib",
    ),
    *_plain("map<string,string>", "", methods="column -> how it was measured"),
    Metric(
        name="flops_per_step",
        unit="FLOP",
        description="of one device and optimizer step",
        over_ranks="max",
    ),
    Metric(
        name="achieved_tflops_per_device",
        unit="TFLOP/s",
        description="FLOPs over step time",
        heading="TFLOP/s",
        meaning="of one device",
    ),
    *_plain("double", "TFLOP/s", gemm_tflops_per_device="of large matrix products, sustained"),
    Metric(
        name="burst_tflops_per_device",
        unit="TFLOP/s",
        description="first 30 ms of the warm-up",
        heading="burst",
        meaning="TFLOP/s in the first 30 ms of the warm-up, before a power limit acts",
    ),
    Metric(
        name="mfu_pct",
        unit="%",
        description="of the datasheet's peak",
        heading="MFU",
        meaning="TFLOP/s as a share of the datasheet's dense peak",
        format="percent",
    ),
    Metric(
        name="mfu_6n_pct",
        unit="%",
        description="of the peak, by 6 N and attention a token",
        heading="MFU 6N",
        meaning="as MFU, by 6 operations for each of all parameters and by attention, per token",
        format="percent",
    ),
    Metric(
        name="gemm_share_pct",
        unit="%",
        description="achieved over gemm",
        heading="%GEMM",
        meaning="TFLOP/s as a share of what large matrix products reach on this device",
        format="percent",
    ),
    Metric(
        name="algbw_gb_s",
        unit="GB/s",
        description="size over time, as nccl-tests",
        heading="algbw GB/s",
        meaning="bytes over step time, as nccl-tests counts them",
    ),
    Metric(
        name="busbw_gb_s",
        unit="GB/s",
        description="bus bandwidth, as nccl-tests",
        heading="busbw GB/s",
        meaning="algbw times the operation's factor, as nccl-tests counts it",
    ),
    Metric(
        name="memory_gb_s",
        unit="GB/s",
        description="read and written, per device",
        heading="memory GB/s",
        meaning="bytes read and written over step time",
    ),
    Metric(name="energy_j", unit="J", description="all devices, timed steps", over_ranks="sum"),
    *_plain("double", "J", energy_j_error="of it, ±"),
    *_plain("list<int64>", "samples", share_by_rank="of a step, where shares are uneven"),
    *_plain(
        "list<double>",
        "ms",
        own_step_ms_by_rank="alone with its share, before; null: no share",
        fixed_ms_by_rank="of a step, by a probe of the device alone",
        fixed_ms_error_by_rank="standard error of it",
    ),
    *_plain(
        "list<double>",
        "samples/s",
        speed_by_rank="of further samples, by the probe",
        speed_error_by_rank="standard error of it",
    ),
    *_plain("list<double>", "", slow_ratio_by_rank="measured, of emulated devices; null: none"),
    *_plain(
        "double",
        "ms",
        exchange_ms="what an exchange adds to a balanced step",
        predicted_step_ms="longest own step and the exchange",
    ),
    *_plain("double", "samples", crossover_batch="global; above it by_speed beats fast"),
    Metric(
        name="gradient_error",
        description="to one process over all samples, relative",
        over_ranks="max",
    ),
)
# What the reports compute against the baseline point; no columns of `points`.
DERIVED: tuple[Metric, ...] = (
    Metric(
        name="scatter",
        description="standard deviation of the samples of one start over their mean",
        heading="scatter",
        meaning="standard deviation of the samples within one start, over their mean",
        format="share",
    ),
    Metric(
        name="speed_up",
        description="throughput over that of the baseline point",
        heading="speed-up",
        meaning="samples/s over those of the baseline ({baseline})",
        format="ratio",
    ),
    Metric(
        name="efficiency",
        description="speed-up over the ratio of ranks, or of what their devices do alone",
        heading="efficiency",
        meaning="speed-up over the ratio of {ranks}",
        format="share",
    ),
)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in (*METRICS, *DERIVED)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What a table of a report shows, in order; `optional`: what is left out first, for room."""

    metrics: tuple[Metric, ...]
    optional: tuple[Metric, ...]


def _show(names: str, *, optional: str) -> Columns:
    return Columns(
        metrics=tuple(BY_NAME[name] for name in names.split()),
        optional=tuple(BY_NAME[name] for name in optional.split()),
    )


# Of points that finish samples, of the others, and of where the step goes. The page has those of
# the first two in one table.
SCALING = _show(
    "scatter throughput speed_up efficiency peak_mem_allocated_bytes first_step_ms "
    "compiled_step_ms",
    optional="compiled_step_ms first_step_ms scatter peak_mem_allocated_bytes efficiency "
    "throughput",
)
RATES = _show(
    "scatter algbw_gb_s busbw_gb_s memory_gb_s achieved_tflops_per_device "
    "burst_tflops_per_device mfu_pct gemm_share_pct nccl_choices",
    optional="gemm_share_pct scatter algbw_gb_s burst_tflops_per_device mfu_pct nccl_choices",
)
PARTS = _show(
    "compute_ms optimizer_ms data_ms host_gap_ms comm_exposed_ms straggler_ms mfu_pct "
    "mfu_6n_pct gemm_share_pct achieved_tflops_per_device",
    optional="achieved_tflops_per_device gemm_share_pct mfu_6n_pct mfu_pct host_gap_ms "
    "straggler_ms",
)
# What the memory is made of when it is largest.
MEMORY = _show(
    "mem_parameters_bytes mem_gradients_bytes mem_optimizer_bytes mem_activations_bytes "
    "mem_other_bytes peak_mem_allocated_bytes mem_estimate_bytes",
    optional="",
)
# What a step comes to: the progress line shows the first that a point has.
MAIN_RATES = tuple(
    BY_NAME[name]
    for name in ("throughput", "busbw_gb_s", "memory_gb_s", "achieved_tflops_per_device")
)


def combine_measurements(
    measurements: Sequence[Measurement], *, typical_ms: float, mean_ms: float
) -> dict[str, Any]:
    """Make the columns that are one value a rank, those of the workload's own metrics included.

    typical_ms, mean_ms: of the point's steps.
    """
    own = {metric: None for one in measurements for metric in one.workload_metrics}
    values = {
        metric: relate_to_step(
            metric.over_step,
            combine_ranks(
                metric.over_ranks or "mean",
                [one.workload_metrics.get(metric) for one in measurements],
            ),
            typical_ms=typical_ms,
            mean_ms=mean_ms,
        )
        for metric in own
    }
    return {
        **{
            metric.name: combine_ranks(
                metric.over_ranks, [getattr(one, metric.name) for one in measurements]
            )
            for metric in METRICS
            if metric.over_ranks
        },
        "workload_metrics": {one.name: v for one, v in values.items() if v is not None} or None,
        "workload_headings": {metric.name: metric.title for metric in own} or None,
    }


def workload_metrics(rows: Iterable[Row]) -> tuple[Metric, ...]:
    """List the metrics that the workloads of these points declare themselves, by their rows."""
    found: dict[str, Metric] = {}
    for row in rows:
        headings, methods = (_mapping(row.get(name)) for name in ("workload_headings", "methods"))
        for name in _mapping(row.get("workload_metrics")):
            heading = headings.get(name, name)
            text = methods.get(name, heading)
            found.setdefault(name, Metric(name=name, heading=heading, description=text))
    return tuple(found.values())


def value_of(row: Row, metric: Metric) -> Any:
    """Look up a metric in a row of a report; None where the row has none."""
    is_column = BY_NAME.get(metric.name) is metric
    return row[metric.name] if is_column else _mapping(row.get("workload_metrics")).get(metric.name)


def _mapping(cell: Any) -> Mapping[str, Any]:
    """Take the map of a cell; empty for null."""
    return cell if isinstance(cell, Mapping) else {}
