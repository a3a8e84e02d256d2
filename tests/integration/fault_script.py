"""A training script that fails as the workload Faulty does, as a user would start it."""

import argparse
import os

import torch
import torch.distributed as dist

from raybench.workloads.base import Context
from tests.integration.fault_workloads import Faulty


def main() -> None:
    options = argparse.ArgumentParser()
    for name, kind in (("folder", str), ("number", int), ("fault", str), ("faulty-rank", int)):
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
    context = Context(device=device, **place, batch_size=1)
    faulty = Faulty(context, **given)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device=device))], lr=0.1)
    while True:
        faulty.step()
        optimizer.step()


if __name__ == "__main__":
    main()
