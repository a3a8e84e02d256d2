"""The table `summary`: one row a point over all rounds and attempts, with what is asked most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from raybench.records import Status
from raybench.records.metric import Column


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
