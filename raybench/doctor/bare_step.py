"""One step timed by a plain loop under torchrun: what raybench's numbers are held against.

    python -m torch.distributed.run --standalone --nproc-per-node=2 -m raybench.doctor.bare_step \
        '{"workload": "mlp", ..., "output": "FILE.json"}'

The workload is built as raybench builds it; nothing of `raybench.measure` is used.
`raybench.doctor.torchrun` says what goes in and what comes out.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raybench.job import registry
from raybench.job.point import Precision
from raybench.records.environment import variables_that_matter
from raybench.workloads import precision
from raybench.workloads.base import Context, Workload

Spec = dict[str, Any]


def main() -> None:
    """Time the step; rank 0 writes one JSON object."""
    spec: Spec = json.loads(sys.argv[1])
    device = _enter_device(spec)
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    workload = _build(spec, device, world_size)
    started_s = time.perf_counter()
    for _ in range(spec["warmup"]):
        workload.step()
    time_steps = _cuda_steps_ms if device.type == "cuda" else _host_steps_ms
    step_ms = time_steps(workload, spec["iterations"])
    iterations_s = time.perf_counter() - started_s
    slowest = torch.tensor(step_ms, device=device)
    owners = [_owner(device)]
    if world_size > 1:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        owners = [""] * world_size
        dist.all_gather_object(owners, _owner(device))
    if int(os.environ["RANK"]) == 0:
        answer = {
            "step_ms_p50": statistics.median(slowest.tolist()),
            "iterations_s": iterations_s,
            "devices": owners,
            "environment": variables_that_matter(),
            "niceness": os.nice(0),
        }
        Path(spec["output"]).write_text(json.dumps(answer), encoding="utf-8")
    if world_size > 1:
        # Nobody leaves before the answer is written: torchrun would stop the others.
        dist.barrier()
        dist.destroy_process_group()
    sys.stderr.flush()
    # With gloo, one such process in ten or so aborts in the destructors of torch 2.13 ("terminate
    # called without an active exception"): leave without them.
    os._exit(0)


def _enter_device(spec: Spec) -> torch.device:
    if spec["device"] == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", spec["indexes"][int(os.environ["LOCAL_RANK"])])
    torch.cuda.set_device(device)
    return device


def _owner(device: torch.device) -> str:
    """Read the device's UUID as NVML writes it; of a CPU nothing."""
    if device.type == "cpu":
        return ""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _build(spec: Spec, device: torch.device, world_size: int) -> Workload:
    mode = Precision(spec["precision"])
    precision.apply(mode)
    context = Context(
        device=device,
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        local_rank=int(os.environ["LOCAL_RANK"]),
        batch_size=spec["batch_size"],
        precision=mode,
    )
    workload: Workload = registry.load(spec["workload"])(context, **spec["params"])
    return workload


def _cuda_steps_ms(workload: Workload, iterations: int) -> list[float]:
    starts, ends = (
        [torch.cuda.Event(enable_timing=True) for _ in range(iterations)]  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    torch.cuda.synchronize()
    for start, end in zip(starts, ends, strict=True):
        start.record()
        workload.step()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def _host_steps_ms(workload: Workload, iterations: int) -> list[float]:
    step_ms = []
    for _ in range(iterations):
        start_s = time.perf_counter()
        workload.step()
        step_ms.append(1e3 * (time.perf_counter() - start_s))
    return step_ms


if __name__ == "__main__":
    main()
