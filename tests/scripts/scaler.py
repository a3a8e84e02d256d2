"""Mixed precision with a GradScaler, clipping and gradient accumulation, alone or by torchrun."""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--accumulation", type=int, default=2)
args = parser.parse_args()

is_ddp = int(os.environ.get("WORLD_SIZE", "1")) > 1
device_type = "cuda" if torch.cuda.is_available() else "cpu"
device = torch.device(device_type)
if is_ddp:
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
if device_type == "cuda":
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)

net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).to(device)
model = DistributedDataParallel(net) if is_ddp else net
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# On a CPU without scaling, which older kernels do not have in half precision.
scaler = torch.amp.GradScaler(device_type, enabled=device_type == "cuda")
dtype = torch.float16 if device_type == "cuda" else torch.bfloat16

while True:
    for micro_step in range(args.accumulation):
        is_last = micro_step == args.accumulation - 1
        with model.no_sync() if is_ddp and not is_last else nullcontext():
            inputs = torch.randn(args.batch_size, 32, device=device)
            labels = torch.randint(8, (args.batch_size,), device=device)
            with torch.autocast(device_type, dtype):
                loss = nn.functional.cross_entropy(model(inputs), labels) / args.accumulation
            scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
