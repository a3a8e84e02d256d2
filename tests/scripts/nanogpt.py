"""The training loop of a small GPT in one file, with variables, rates and data as nanoGPT has."""

import math
import os
import tempfile
import time
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

out_dir = tempfile.mkdtemp()
eval_interval, log_interval = 50, 10
gradient_accumulation_steps = 4
batch_size, block_size, n_layer, n_head, n_embd, vocab_size = 2, 32, 2, 2, 32, 64
learning_rate, min_lr, warmup_iters, lr_decay_iters = 6e-4, 6e-5, 20, 10_000
grad_clip = 1.0

ddp = int(os.environ.get("RANK", -1)) != -1 and int(os.environ["WORLD_SIZE"]) > 1
device_type = "cuda" if torch.cuda.is_available() else "cpu"
device = device_type
if ddp:
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    if device_type == "cuda":
        device = f"cuda:{int(os.environ['LOCAL_RANK'])}"
        torch.cuda.set_device(device)
    gradient_accumulation_steps //= dist.get_world_size()
master_process = int(os.environ.get("RANK", "0")) == 0
torch.manual_seed(1337)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, n_embd)
        self.positions = nn.Embedding(block_size, n_embd)
        layer = nn.TransformerEncoderLayer(n_embd, n_head, 4 * n_embd, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, n_layer)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        at = torch.arange(idx.shape[1], device=idx.device)
        mask = nn.Transformer.generate_square_subsequent_mask(len(at), device=idx.device)
        logits = self.head(self.blocks(self.tokens(idx) + self.positions(at), mask))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


path = f"{out_dir}/train.bin"
np.random.default_rng(0).integers(vocab_size, size=10_000, dtype=np.uint16).tofile(path)


def get_batch():
    data = np.memmap(path, dtype=np.uint16, mode="r")
    at = torch.randint(len(data) - block_size - 1, (batch_size,))
    rows = np.stack([data[i : i + block_size + 1] for i in at]).astype(np.int64)
    x, y = torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])
    if device_type == "cuda":
        return (t.pin_memory().to(device, non_blocking=True) for t in (x, y))
    return x.to(device), y.to(device)


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / (lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler(device_type, enabled=False)
ctx = torch.autocast(device_type, torch.bfloat16) if device_type == "cuda" else nullcontext()
raw_model = model
if ddp:
    model = DistributedDataParallel(model)

x, y = get_batch()
iter_num, t0 = 0, time.time()
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0 and master_process:
        torch.save({"model": raw_model.state_dict(), "iter": iter_num}, f"{out_dir}/ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            _, loss = model(x, y)
            loss = loss / gradient_accumulation_steps
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    t1 = time.time()
    if iter_num % log_interval == 0 and master_process:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}, time {(t1 - t0) * 1000:.2f}ms")
    iter_num, t0 = iter_num + 1, t1
