"""A training script that times itself, for script_parity.py; torchrun starts it."""

import argparse
import json
import os
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--hidden", type=int, default=64)
    options.add_argument("--layers", type=int, default=24)
    options.add_argument("--batch-size", type=int, default=64)
    options.add_argument("--warmup", type=int, default=20)
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--times", type=Path, required=True)
    options.add_argument("--gate", type=Path, help="a file that lets the first step begin")
    chosen = options.parse_args()
    on_gpu = torch.cuda.is_available()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    hidden = chosen.hidden
    layers = [nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU()) for _ in range(chosen.layers)]
    model = nn.Sequential(*layers).to(device)
    model = DistributedDataParallel(model, device_ids=[local_rank] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(chosen.batch_size, hidden, device=device)
    if chosen.gate:
        _wait_at(chosen.gate, rank)
    marks = []
    for step in range(chosen.warmup + chosen.steps + 1):
        if step == chosen.warmup and on_gpu:
            dist.barrier()
        optimizer.zero_grad(set_to_none=True)
        model(inputs).square().mean().backward()
        optimizer.step()
        if step >= chosen.warmup:
            marks.append(_mark(on_gpu))
    if on_gpu:
        torch.cuda.synchronize()
        step_ns = [round(a.elapsed_time(b) * 1e6) for a, b in pairwise(marks)]
    else:
        step_ns = [b - a for a, b in pairwise(marks)]
    chosen.times.with_suffix(f".{rank}").write_text(json.dumps(step_ns))
    dist.destroy_process_group()


def _wait_at(gate: Path, rank: int) -> None:
    gate.with_suffix(f".{rank}").touch()
    while not gate.exists():
        time.sleep(0.05)


def _mark(on_gpu: bool):
    if not on_gpu:
        return time.perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


if __name__ == "__main__":
    main()
