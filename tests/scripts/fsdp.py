"""Layers sharded by fully_shard, with a dtype for the computation."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if on_gpu else "gloo")
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to(device)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
while True:
    model(torch.randn(4, 64, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
