"""How a workload can change each setting of its process, and how the next one would see it."""

from __future__ import annotations

import ctypes
import gc
import importlib.abc
import locale
import logging
import multiprocessing
import os
import platform
import resource
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.modules.module as modules
from torch import backends
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

optimizers = sys.modules["torch.optim.optimizer"]


class Finder(importlib.abc.MetaPathFinder):
    """Finds nothing."""


def _nothing(*arguments: object) -> None:
    return None


def _kept_hooks() -> None:
    torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t).__enter__()


def _no_saved_tensor_hooks() -> None:
    torch._C._autograd._saved_tensors_hooks_disable("not here")


def _quietly(change: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        change()


def _timer() -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, 3600)


# By the name of the setting.
STATE_CHANGES: dict[str, Callable[[], object]] = {
    "garbage collector switch": lambda: gc.disable() if gc.isenabled() else gc.enable(),
    "garbage collector threshold": lambda: gc.set_threshold(7, 8, 9),
    "garbage collector debugging": lambda: gc.set_debug(gc.DEBUG_UNCOLLECTABLE),
    "garbage collector callbacks": lambda: gc.callbacks.append(_nothing),
    "environment": lambda: os.environ.update(NCCL_P2P_DISABLE="1", HOME="/nowhere"),
    "working directory": lambda: os.chdir("/"),
    "sys.path": lambda: sys.path.insert(0, "/nowhere"),
    "warning filters": lambda: warnings.simplefilter("ignore"),
    "logging": lambda: logging.root.setLevel(1),
    "signal handlers": lambda: signal.signal(signal.SIGUSR2, _nothing),
    "interval timers": _timer,
    "recursion limit": lambda: sys.setrecursionlimit(4321),
    "thread switch interval": lambda: sys.setswitchinterval(0.123),
    "trace function": lambda: sys.settrace(_nothing),
    "trace function of new threads": lambda: threading.settrace(_nothing),
    "profile function": lambda: sys.setprofile(_nothing),
    "profile function of new threads": lambda: threading.setprofile(_nothing),
    "CPU affinity": lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    "umask": lambda: os.umask(0o077),
    "timer slack": lambda: ctypes.CDLL(None).prctl(29, ctypes.c_ulong(50_000_000), 0, 0, 0),
    "resource limits": lambda: resource.setrlimit(
        resource.RLIMIT_NOFILE,
        (
            resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1,
            resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        ),
    ),
    "I/O priority": lambda: ctypes.CDLL(None).syscall(
        {"x86_64": 251, "aarch64": 30}[platform.machine()], 1, 0, 2 << 13 | 7
    ),
    "socket timeout": lambda: socket.setdefaulttimeout(3.0),
    "import hooks": lambda: sys.meta_path.insert(0, Finder()),
    "exception hook": lambda: setattr(sys, "excepthook", _nothing),
    "limit of digits in integers": lambda: sys.set_int_max_str_digits(10_000),
    "numpy print options": lambda: np.set_printoptions(precision=2),
    "stack size of new threads": lambda: threading.stack_size(1 << 20),
    "locale": lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8"),
    "print options": lambda: torch.set_printoptions(precision=2),
    # torch.compile switches them off in the whole process.
    "checks of distributions": lambda: torch.distributions.Distribution.set_default_validate_args(
        not torch.distributions.Distribution._validate_args
    ),
    "multiprocessing start method": lambda: multiprocessing.set_start_method("spawn", force=True),
    "numpy error handling": lambda: np.seterr(all="raise"),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "intra-op threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "filling of empty tensors": lambda: setattr(
        torch.utils.deterministic, "fill_uninitialized_memory", False
    ),
    "repeated warnings": lambda: torch.set_warn_always(True),
    "flushing of denormal numbers": lambda: torch.set_flush_denormal(True),
    "sharing strategy": lambda: torch.multiprocessing.set_sharing_strategy("file_system"),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "forward grad mode": lambda: torch._C._set_fwd_grad_enabled(False),
    "view replay": lambda: torch._C._set_view_replay_enabled(True),
    "multithreaded backward": lambda: torch.autograd.set_multithreading_enabled(False),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "autocast on cpu": lambda: torch.autocast("cpu", dtype=torch.float16).__enter__(),
    "autocast dtype on cpu": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "autocast on cuda": lambda: torch.set_autocast_enabled("cuda", True),
    "autocast dtype on cuda": lambda: torch.set_autocast_dtype("cuda", torch.bfloat16),
    "autocast cache": lambda: torch.set_autocast_cache_enabled(False),
    "autocast nesting": lambda: torch.autocast("cpu").__enter__(),
    "cuDNN enabled": lambda: setattr(backends.cudnn, "enabled", False),
    "cuDNN benchmark": lambda: setattr(backends.cudnn, "benchmark", True),
    "cuDNN deterministic": lambda: setattr(backends.cudnn, "deterministic", True),
    "cuDNN depthwise_kernel": lambda: setattr(backends.cudnn, "depthwise_kernel", "native"),
    "oneDNN enabled": lambda: setattr(backends.mkldnn, "enabled", False),
    "oneDNN deterministic": lambda: setattr(backends.mkldnn, "deterministic", True),
    "cuBLAS fp16_reduced_precision_reduction": lambda: setattr(
        backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "cuBLAS bf16_reduced_precision_reduction": lambda: setattr(
        backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "cuBLAS fp16 accumulation": lambda: setattr(
        backends.cuda.matmul, "allow_fp16_accumulation", True
    ),
    "NNPACK": lambda: torch._C._set_nnpack_enabled(False),
    "opt_einsum": lambda: setattr(backends.opt_einsum, "enabled", not backends.opt_einsum.enabled),
    "quantized engine": lambda: setattr(backends.quantized, "engine", "onednn"),
    "flash attention": lambda: backends.cuda.enable_flash_sdp(False),
    "memory-efficient attention": lambda: backends.cuda.enable_mem_efficient_sdp(False),
    "math attention": lambda: backends.cuda.enable_math_sdp(False),
    "cuDNN attention": lambda: backends.cuda.enable_cudnn_sdp(False),
    "reduced precision in math attention": lambda: backends.cuda.allow_fp16_bf16_reduction_math_sdp(
        True
    ),
    "order of attention": lambda: torch._C._set_sdp_priority_order([2, 1, 0, 3, 4]),
    "attention fast path": lambda: backends.mha.set_fastpath_enabled(False),
    "_global_buffer_registration_hooks": lambda: modules.register_module_buffer_registration_hook(
        _nothing
    ),
    "_global_module_registration_hooks": lambda: modules.register_module_module_registration_hook(
        _nothing
    ),
    "_global_parameter_registration_hooks": lambda: (
        modules.register_module_parameter_registration_hook(_nothing)
    ),
    "_global_backward_pre_hooks": lambda: modules.register_module_full_backward_pre_hook(_nothing),
    "_global_backward_hooks": lambda: modules.register_module_full_backward_hook(_nothing),
    "_global_is_full_backward_hook": lambda: modules.register_module_full_backward_hook(_nothing),
    "_global_forward_pre_hooks": lambda: modules.register_module_forward_pre_hook(_nothing),
    "_global_forward_hooks": lambda: modules.register_module_forward_hook(_nothing),
    "_global_forward_hooks_always_called": lambda: modules.register_module_forward_hook(
        _nothing, always_call=True
    ),
    "_global_forward_hooks_with_kwargs": lambda: modules.register_module_forward_hook(
        _nothing, with_kwargs=True
    ),
    "_global_optimizer_pre_hooks": lambda: optimizers.register_optimizer_step_pre_hook(_nothing),
    "_global_optimizer_post_hooks": lambda: optimizers.register_optimizer_step_post_hook(_nothing),
    "saved-tensor hooks": _kept_hooks,
    "ban of saved-tensor hooks": _no_saved_tensor_hooks,
    "torch.compile stance": lambda: torch.compiler.set_stance("force_eager"),
    "torch._dynamo.config": lambda: setattr(torch._dynamo.config, "recompile_limit", 3),
    "torch._functorch.config": lambda: setattr(torch._functorch.config, "debug_partitioner", True),
    "torch.compiler.config": lambda: setattr(torch.compiler.config, "cache_key_tag", "mine"),
    "torch._inductor.config": lambda: setattr(torch._inductor.config, "max_autotune", True),
    # Last: these two break what is called under them.
    "default device and function modes": lambda: (
        torch.set_default_device("meta"),
        torch.device("cpu").__enter__(),
        TorchFunctionMode().__enter__(),
    ),
    "dispatch modes": lambda: TorchDispatchMode().__enter__(),
}

# Only where torch is built with CUDA can these be changed.
STATE_CHANGES_WITH_CUDA: dict[str, Callable[[], object]] = {
    "default tensor type": lambda: _quietly(
        lambda: torch._C._set_default_tensor_type(torch.cuda.DoubleTensor)
    ),
    "preferred linalg library": lambda: _quietly(
        lambda: torch._C._set_linalg_preferred_backend(torch._C._LinalgBackend.Cusolver)
    ),
    "preferred blas library": lambda: _quietly(
        lambda: torch._C._set_blas_preferred_backend(torch._C._BlasBackend.Cublaslt)
    ),
    "cuDNN benchmark_limit": lambda: setattr(backends.cudnn, "benchmark_limit", 3),
}


def seen() -> dict[str, object]:
    """What a workload can see of all this by public means, and what it computes with it."""
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "modules from": list(sys.path),
        "warnings": list(warnings.filters),
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(gc.callbacks)),
        "python": (sys.getrecursionlimit(), sys.getswitchinterval(), sys.gettrace()),
        "signal": signal.getsignal(signal.SIGUSR2),
        "cores": os.sched_getaffinity(0),
        "tensor": (torch.empty(1).dtype, torch.empty(1).device, torch.is_grad_enabled()),
        "threads": torch.get_num_threads(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "matmul": (
            torch.get_float32_matmul_precision(),
            backends.cuda.matmul.allow_tf32,
            backends.cuda.matmul.fp32_precision,
            backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        ),
        "tf32": [
            switch.fp32_precision
            for switch in (
                backends,
                backends.cudnn,
                backends.cudnn.conv,
                backends.cudnn.rnn,
                backends.mkldnn,
                backends.mkldnn.matmul,
                backends.mkldnn.conv,
                backends.mkldnn.rnn,
            )
        ],
        "attention": (backends.cuda.flash_sdp_enabled(), backends.cuda.math_sdp_enabled()),
        "hooks": (len(modules._global_forward_hooks), len(modules._global_backward_hooks)),
        "random": (torch.rand(3).tolist(), np.random.rand(), __import__("random").random()),
    }
