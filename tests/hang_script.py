"""A training script that hangs as the workload Hanging does, as a user would start it."""

import argparse
import os

import torch
import torch.distributed as dist

from raybench.workloads.base import Context
from tests.hang_workloads import Hanging


def main() -> None:
    options = argparse.ArgumentParser()
    for name, kind in (
        *(("way", str), ("hanging-rank", int), ("at-step", int)),
        *(("number", int), ("pause-s", float)),
    ):
        options.add_argument(f"--{name}", type=kind, required=True)
    given = vars(options.parse_args())
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    world_size = int(os.environ["WORLD_SIZE"])
    place = {"rank": rank, "world_size": world_size, "local_rank": local_rank}
    hanging = Hanging(Context(device=device, **place, batch_size=1), **given)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device=device))], lr=0.1)
    while True:
        hanging.step()
        optimizer.step()


if __name__ == "__main__":
    main()
