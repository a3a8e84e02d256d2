"""A training script that times itself, for script_parity.py; torchrun starts it."""

import argparse
import json
import os
import socket
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
    options.add_argument("--times", type=Path, help="where to write the steps of each rank")
    options.add_argument("--turns", help="a socket by which the script is told to go on")
    options.add_argument("--slice", type=int, default=50, help="steps of a turn")
    options.add_argument("--name", default="")
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
    turns = _Turns(chosen.turns, f"{chosen.name} {rank}") if chosen.turns else None
    marks = []
    for step in range(chosen.warmup + chosen.steps + 1):
        if turns and step % chosen.slice == 0:
            if on_gpu:
                torch.cuda.synchronize()
            turns.wait()
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
    if chosen.times:
        chosen.times.with_suffix(f".{rank}").write_text(json.dumps(step_ns))
    dist.destroy_process_group()


class _Turns:
    """Says that its last turn has ended, and waits for the next; for good when nobody is there."""

    def __init__(self, path: str, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._socket.sendall(f"{name}\n".encode())
        self._are_over = False

    def wait(self) -> None:
        if not self._are_over:
            self._socket.sendall(b".")
            self._are_over = not self._socket.recv(1)


def _mark(on_gpu: bool):
    if not on_gpu:
        return time.perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


if __name__ == "__main__":
    main()
