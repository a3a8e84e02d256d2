"""How a workload can change each setting of its process, and how the next one would see it."""

import os
import random
import signal
from collections.abc import Callable

import numpy as np
import torch
from torch import backends
from torch.utils.data._utils import signal_handling

matmul = backends.cuda.matmul


def _fp32_precision() -> None:
    torch.set_float32_matmul_precision("medium")
    backends.cudnn.allow_tf32 = True
    matmul.fp32_precision = "tf32"


def _handle(*_: object) -> None: ...


def _leave_a_signal_pending() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    signal.raise_signal(signal.SIGUSR2)


# By the name of the setting.
STATE_CHANGES: dict[str, Callable[[], object]] = {
    "interval timer": lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 60, 60),
    "signal handler": lambda: signal.signal(signal.SIGUSR1, _handle),
    "signal mask": _leave_a_signal_pending,
    "environment": lambda: os.environ.update(NCCL_P2P_DISABLE="1", HOME="/nowhere"),
    "working directory": lambda: os.chdir("/"),
    "default device": lambda: torch.set_default_device("meta"),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "autocast on cpu": lambda: torch.autocast("cpu", dtype=torch.float16).__enter__(),
    "autocast dtype on cpu": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "autocast on cuda": lambda: torch.set_autocast_enabled("cuda", True),
    "autocast dtype on cuda": lambda: torch.set_autocast_dtype("cuda", torch.bfloat16),
    "autocast cache": lambda: torch.set_autocast_cache_enabled(False),
    "autocast nesting": lambda: torch.autocast("cpu").__enter__(),
    "cuDNN enabled": lambda: setattr(backends.cudnn, "enabled", False),
    "cuDNN benchmark": lambda: setattr(backends.cudnn, "benchmark", True),
    "cuDNN deterministic": lambda: setattr(backends.cudnn, "deterministic", True),
    **{
        f"cuBLAS {name}": lambda name=name: setattr(matmul, name, not getattr(matmul, name))
        for name in (
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
            "allow_fp16_accumulation",
        )
    },
    "DataLoader _SIGCHLD_handler_set": lambda: setattr(
        signal_handling, "_SIGCHLD_handler_set", not signal_handling._SIGCHLD_handler_set
    ),
    "flash attention": lambda: backends.cuda.enable_flash_sdp(False),
    "memory-efficient attention": lambda: backends.cuda.enable_mem_efficient_sdp(False),
    "math attention": lambda: backends.cuda.enable_math_sdp(False),
    "cuDNN attention": lambda: backends.cuda.enable_cudnn_sdp(False),
    "torch._dynamo.config": lambda: setattr(torch._dynamo.config, "recompile_limit", 3),
    "torch._functorch.config": lambda: setattr(torch._functorch.config, "debug_partitioner", True),
    "torch._inductor.config": lambda: setattr(torch._inductor.config, "max_autotune", True),
    "torch.compiler.config": lambda: setattr(torch.compiler.config, "cache_key_tag", "mine"),
}
# Those that are not put back, but set before each build of a workload.
SET_BEFORE_EACH_BUILD: dict[str, Callable[[], object]] = {
    "fp32 precision": _fp32_precision,
    "random numbers": lambda: (random.random(), np.random.rand(), torch.rand(1)),
}


def seen() -> dict[str, object]:
    """What a workload can see of all this by public means, and what it computes with it."""
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "signals": (
            signal.getsignal(signal.SIGUSR1),
            signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            signal.getitimer(signal.ITIMER_VIRTUAL),
        ),
        "tensor": (torch.empty(1).dtype, torch.empty(1).device, torch.is_grad_enabled()),
        "threads": torch.get_num_threads(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "matmul": (
            torch.get_float32_matmul_precision(),
            matmul.allow_tf32,
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction,
        ),
        "tf32": (backends.fp32_precision, matmul.fp32_precision, backends.cudnn.fp32_precision),
        "attention": (backends.cuda.flash_sdp_enabled(), backends.cuda.math_sdp_enabled()),
        "compiler": torch._dynamo.config.recompile_limit,
        "random": (torch.rand(3).tolist(), np.random.rand(), random.random()),
    }
