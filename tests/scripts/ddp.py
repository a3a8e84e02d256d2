"""A plain DistributedDataParallel script, as PyTorch's tutorial writes it."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--accumulation", type=int, default=1)
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    layers = [nn.Linear(args.hidden, args.hidden) for _ in range(args.layers)]
    model = DistributedDataParallel(
        nn.Sequential(*layers).to(device), device_ids=[local_rank] if on_gpu else None
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    inputs = torch.randn(args.batch_size, args.hidden, device=device)
    for _ in range(args.steps):
        optimizer.zero_grad()
        for micro_step in range(args.accumulation):
            model.require_backward_grad_sync = micro_step == args.accumulation - 1
            loss = model(inputs).square().mean() / args.accumulation
            loss.backward()
        optimizer.step()
        scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
