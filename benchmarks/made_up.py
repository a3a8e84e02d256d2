"""Devices, measurements and telemetry that are made up, for benchmarks of what is around them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

from raybench.records.device import Device
from raybench.records.devices import DeviceSample
from raybench.records.measurement import Breakdown, Measurement, Repetition, Samples
from raybench.records.status import RunStatus
from raybench.results.tables import Run

START = datetime(2026, 11, 22, tzinfo=UTC)
WARMUP, INSTRUMENTED = 5, 20


def devices(nodes: int, per_node: int = 8) -> tuple[Device, ...]:
    """Make devices with all that a real worker says of itself, variables and versions included."""
    environment = {f"NCCL_VARIABLE_{number}": "a value as long as usual" for number in range(20)}
    return tuple(
        Device(
            kind="cuda",
            node_id=f"{node:056x}",
            host=f"node-{node:04d}",
            address=f"10.{node // 256}.{node % 256}.1",
            index=index,
            uuid=f"GPU-{node:08x}-0000-0000-0000-{index:012x}",
            name="simulated",
            topology="NV18 to all",
            process_id=1000 + index,
            cpu_count=192,
            niceness=0,
            omp_num_threads=1,
            versions={"torch": "2.11.0", "ray": "2.60.0", "nccl": "2.28.9"},
            environment=environment,
        )
        for node in range(nodes)
        for index in range(per_node)
    )


def measurement(rank: int, timed: int = 30) -> Measurement:
    """Make what a rank answers; its steps differ from those of others."""
    return Measurement(
        rank=rank,
        repetitions=(Repetition(warmup=steps(rank, WARMUP), timed=steps(rank, timed)),),
        items_per_step=64,
        setup_s=0.1,
        peak_mem_allocated_bytes=3 * 10**9,
        flops_per_step=2.1e12,
        gemm_tflops=700.0,
        transports=("NET/IB on mlx5_0 (IB), GPUDirect", "P2P/CUMEM"),
        breakdown=Breakdown(
            local_ms=(milliseconds(rank, INSTRUMENTED // 2),) * 2,
            device_ms=7.5,
            optimizer_ms=0.4,
            hooked_ms=milliseconds(rank, INSTRUMENTED),
            comm_ms=milliseconds(rank, INSTRUMENTED),
            tail_ms=milliseconds(rank, INSTRUMENTED),
        ),
    )


def steps(rank: int, count: int) -> Samples:
    step_ns = tuple(8_000_000 + (7919 * (rank + 31 * step)) % 80_000 for step in range(count))
    start_ns = tuple(8_040_000 * step for step in range(count))
    return Samples(start_ns=start_ns, step_ns=step_ns, host_ns=step_ns)


def milliseconds(rank: int, count: int) -> tuple[float, ...]:
    return tuple(8 + (7919 * (rank + 31 * step) % 800) / 10_000 for step in range(count))


def telemetry(devices: Sequence[Device], seconds: Iterable[int]) -> Iterator[DeviceSample]:
    """Make a sample of each device for each second after START."""
    for second in seconds:
        for device in devices:
            yield DeviceSample(
                node_id=device.node_id,
                index=device.index,
                uuid=device.uuid,
                time=START + timedelta(seconds=second),
                sm_clock_mhz=1980 - second % 200,
                power_w=512.3 + second % 100,
                temperature_c=51.0,
                memory_used_bytes=5 * 10**9,
            )


def run(run_id: str, points: int, started_at: datetime = START) -> Run:
    """Make a finished run."""
    return Run(
        run_id=run_id,
        job_name="simulated",
        job_text="version: 1\n",
        job_sha256="0" * 64,
        argv=("raybench",),
        status=RunStatus.OK,
        started_at=started_at,
        finished_at=started_at,
        points_total=points,
        baseline={"world_size": 1},
        cluster="none",
        host="node-0000",
        versions={},
        environment={},
        tags={},
    )
