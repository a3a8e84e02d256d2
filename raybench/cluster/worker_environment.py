"""The variables that make a worker's process like one of torchrun's."""

from __future__ import annotations

import os

from raybench.records.environment import variables_that_matter

# Not CUDA_: those say which devices and which files this host has.
_FORWARDED = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "MKL_", "NVIDIA_TF32_")
# Over sockets NCCL notices a dead peer by itself, and torch's watchdog of the survivors then waits
# for 60 s, writes what it has recorded, and ends the process. Without these three it only notes it.
_SURVIVE_A_PEER = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}


def worker_environment() -> dict[str, str]:
    """Collect the variables of a worker, whatever starts it, on whichever node."""
    return {
        **_SURVIVE_A_PEER,
        # As srun does: a variable set for the sweep is meant for the workers, on every node.
        **{
            name: value
            for name, value in variables_that_matter().items()
            if name.startswith(_FORWARDED)
        },
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
