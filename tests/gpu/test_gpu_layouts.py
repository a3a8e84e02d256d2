"""Compiled layouts on two GPUs, with the code that torch generates for them, beside one GPU."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from layout_ranks import difference

from tests.gpu.gpus import TWO_GPUS

pytestmark = TWO_GPUS
# In fp64, in which generated code may add up in another order.
ALMOST_EXACT = 1e-10
LAYOUTS = {
    "DDP": {"activation_checkpointing": "full"},
    "FSDP": {"dp_shard": 2, "activation_checkpointing": "selective"},
    "TP": {"tp": 2, "activation_checkpointing": "full"},
    "CP": {"cp": 2, "activation_checkpointing": "full"},
}


def be_rank(rank, folder):
    torch.cuda.set_device(rank)
    torch.set_default_dtype(torch.float64)
    for number, (name, options) in enumerate(LAYOUTS.items()):
        dist.init_process_group(
            "nccl",
            init_method=f"file://{folder}/store-{number}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=60),
        )
        found = difference(rank, 2, {"compile": True, "device": f"cuda:{rank}", **options})
        Path(folder, f"{name}-{rank}").write_text(repr(found))
        dist.destroy_process_group()


def test_two_compiled_gpus_compute_what_one_does(tmp_path):
    mp.spawn(be_rank, args=(str(tmp_path),), nprocs=2)
    found = {name: float((tmp_path / f"{name}-0").read_text()) for name in LAYOUTS}
    print(found)
    assert max(found.values()) < ALMOST_EXACT
