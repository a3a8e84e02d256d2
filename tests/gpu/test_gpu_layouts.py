"""Compiled layouts on two GPUs, with the code that torch generates for them, beside one GPU."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from layout_ranks import difference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
# In fp64, in which generated code may add up in another order.
ALMOST_EXACT = 1e-10
LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP": {"activation_checkpointing": "full"},
    "FSDP": {"dp_shard": 2, "activation_checkpointing": "selective"},
    "TP": {"tp": 2, "activation_checkpointing": "full"},
    "CP": {"cp": 2, "activation_checkpointing": "full"},
}


def be_rank(rank: int, folder: str) -> None:
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


def test_compiled_layouts_compute_on_two_gpus_what_one_does(tmp_path):
    mp.spawn(be_rank, args=(str(tmp_path),), nprocs=2)
    found = {name: float((tmp_path / f"{name}-0").read_text()) for name in LAYOUTS}
    print(found)
    assert max(found.values()) < ALMOST_EXACT
