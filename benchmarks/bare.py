"""Steps timed by a plain loop: what the numbers of raybench are held against.

    python -m torch.distributed.run --standalone --nproc-per-node=2 benchmarks/bare.py SPEC.json

Nothing of `raybench.measure` is used. A step that trains is built from the same workload class as
in raybench; an all_reduce is that of torch. `benchmarks.parity` writes the specification:

device: cuda or cpu. indexes: the device of each local rank, on GPUs. steps: workload, params and
batch_size of each. warmup, iterations: untimed and timed steps. output: the file for the answer of
rank 0, where there is one.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raybench.job import registry
from raybench.job.point import Precision
from raybench.records.environment import variables_that_matter
from raybench.stats.summary import median_step
from raybench.workloads.base import Context, apply_precision

# As in raybench, shorter steps are timed several at a time.
_LEAST_MS, _MOST_INNER = 1.0, 1000


def main() -> None:
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    device, uuid = torch.device("cpu"), ""
    if spec["device"] == "cuda":
        device = torch.device("cuda", spec["indexes"][local_rank])
        torch.cuda.set_device(device)
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    apply_precision(Precision.FP32)
    of_rank, seconds = [], 0.0
    for step in spec["steps"]:
        act = step_of(step, device, rank, local_rank, world_size)
        started_s = time.perf_counter()
        of_rank.append(times_ms(act, spec, device))
        seconds += time.perf_counter() - started_s
    own = (of_rank, uuid)
    ranks: list[Any] = [own]
    if world_size > 1:
        ranks *= world_size
        dist.all_gather_object(ranks, own)
    if rank == 0 and "output" in spec:
        answer = {
            # The median over iterations of the slowest rank's step.
            "step_ms": [
                median_step([times[place] for times, _ in ranks])
                for place in range(len(spec["steps"]))
            ],
            "seconds": seconds,
            "uuids": [uuid for _, uuid in ranks],
            "environment": variables_that_matter() | {"niceness": str(os.nice(0))},
        }
        Path(spec["output"]).write_text(json.dumps(answer), encoding="utf-8")
    if world_size > 1:
        # Nobody leaves before the answer is written: torchrun would stop the others.
        dist.barrier()
    sys.stderr.flush()
    # With gloo, one such process in ten or so aborts in the destructors of torch 2.13 ("terminate
    # called without an active exception"): leave without them.
    os._exit(0)


def step_of(
    step: dict[str, Any], device: torch.device, rank: int, local_rank: int, world_size: int
) -> Callable[[], Any]:
    """Return what does one step."""
    params = {name: value for name, value in step["workload"].items() if name != "kind"}
    if step["workload"]["kind"] == "collective":
        buffer = torch.zeros(params["size_bytes"] // 4, device=device)
        return lambda: dist.all_reduce(buffer)
    context = Context(
        device=device,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        batch_size=step["batch_size"],
        precision=Precision.FP32,
    )
    workload = registry.load_workload(step["workload"]["kind"])(context, **params)
    own: Callable[[], Any] = workload.step
    return own


def times_ms(step: Callable[[], Any], spec: dict[str, Any], device: torch.device) -> list[float]:
    """Return the times of this rank's steps; of short ones each is the mean of several."""
    warm_ms = statistics.median(block_ms(step, 1, spec["warmup"], device))
    inner = torch.tensor([min(_MOST_INNER, max(1, round(_LEAST_MS / warm_ms)))], device=device)
    if dist.is_initialized():
        dist.broadcast(inner, 0)
        dist.barrier()
    return block_ms(step, int(inner.item()), spec["iterations"], device)


def block_ms(step: Callable[[], Any], inner: int, count: int, device: torch.device) -> list[float]:
    if device.type == "cpu":
        stamps_s = [time.perf_counter()]
        for _ in range(count):
            for _ in range(inner):
                step()
            stamps_s.append(time.perf_counter())
        return [1e3 * (end - start) / inner for start, end in itertools.pairwise(stamps_s)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        for _ in range(inner):
            step()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / inner for start, end in itertools.pairwise(events)]


if __name__ == "__main__":
    main()
