"""One point by plain torchrun: the same workload class, timed by a loop that is not raybench's.

    torchrun --nproc-per-node=2 tests/benchmarks/bare_point.py '{"workload": "mlp", ...}'

Prints one JSON object on rank 0: the median over iterations of the slowest rank's step, in ms, and
how long warm-up and samples took, in s.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

from raybench import registry
from raybench.plan import Precision
from raybench.workloads import precision
from raybench.workloads.base import Context


def main() -> None:
    point = json.loads(sys.argv[1])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = point["device"] == "cuda"
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    mode = Precision(point["precision"])
    precision.apply(mode)
    context = Context(
        device=device,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        batch_size=point["batch_size"],
        precision=mode,
    )
    workload = registry.load(point["workload"])(context, **point["params"])
    started_s = time.perf_counter()
    for _ in range(point["warmup"]):
        workload.step()
    step_ms = _cuda_steps(workload, point) if cuda else _host_steps(workload, point)
    iterations_s = time.perf_counter() - started_s
    slowest = torch.tensor(step_ms, device=device)
    if world_size > 1:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        median = statistics.median(slowest.tolist())
        print(json.dumps({"step_ms_p50": median, "iterations_s": iterations_s}), flush=True)
    if world_size > 1:
        dist.destroy_process_group()
    # With gloo, one such process in ten or so aborts in the destructors of torch 2.13 ("terminate
    # called without an active exception"): leave without them.
    os._exit(0)


def _cuda_steps(workload, point) -> list[float]:
    torch.cuda.synchronize()
    pairs = []
    for _ in range(point["iterations"]):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        workload.step()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _host_steps(workload, point) -> list[float]:
    step_ms = []
    for _ in range(point["iterations"]):
        start_s = time.perf_counter()
        workload.step()
        step_ms.append(1e3 * (time.perf_counter() - start_s))
    return step_ms


if __name__ == "__main__":
    main()
