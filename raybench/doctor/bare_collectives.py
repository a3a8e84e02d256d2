"""all_reduces of some sizes timed by a plain loop under torchrun, for parity over nodes.

    python -m torch.distributed.run --standalone --nproc-per-node=2 \
        -m raybench.doctor.bare_collectives '{"device": "cpu", "steps": [[4096, 10, 100]], ...}'

steps: bytes, untimed and timed all_reduces. indexes: the device of each local rank, on GPUs.
output: the file for the answer of rank 0: by size the step time over all ranks in milliseconds.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raybench.stats.summary import step_time

# As raybench does: shorter steps are timed several at a time.
_LEAST_MS = 1.0
_MOST_INNER = 1000


def main() -> None:
    """Time all sizes; rank 0 writes one JSON object."""
    spec: dict[str, Any] = json.loads(sys.argv[1])
    device = torch.device("cpu")
    if spec["device"] == "cuda":
        device = torch.device("cuda", spec["indexes"][int(os.environ["LOCAL_RANK"])])
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    answer = {str(step[0]): _time(device, *step) for step in spec["steps"]}
    if dist.get_rank() == 0:
        Path(spec["output"]).write_text(json.dumps(answer), encoding="utf-8")
    # Nobody leaves before the answer is written: torchrun would stop the others.
    dist.barrier()
    sys.stderr.flush()
    # As the bare step: gloo's destructors may abort the process.
    os._exit(0)


def _time(device: torch.device, size_bytes: int, warmup: int, iterations: int) -> float:
    """Return the step time in milliseconds, over ranks and iterations as raybench takes it.

    One number, however many ranks there are: what a process writes is kept in part only.
    """
    buffer = torch.zeros(size_bytes // 4, device=device)
    first_ms = statistics.median(_block(buffer, 1, warmup))
    inner = torch.tensor([min(_MOST_INNER, max(1, round(_LEAST_MS / first_ms)))], device=device)
    dist.broadcast(inner, 0)
    own = _block(buffer, int(inner.item()), iterations)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return step_time(told)


def _block(buffer: torch.Tensor, inner: int, count: int) -> list[float]:
    dist.barrier()
    if buffer.device.type == "cpu":
        return [_host_ms(buffer, inner) for _ in range(count)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        for _ in range(inner):
            dist.all_reduce(buffer)
        event.record()
    torch.cuda.synchronize()
    pairs = itertools.pairwise(events)
    return [start.elapsed_time(end) / inner for start, end in pairs]


def _host_ms(buffer: torch.Tensor, inner: int) -> float:
    start_s = time.perf_counter()
    for _ in range(inner):
        dist.all_reduce(buffer)
    return 1e3 * (time.perf_counter() - start_s) / inner


if __name__ == "__main__":
    main()
