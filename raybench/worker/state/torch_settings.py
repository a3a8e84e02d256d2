"""What torch, its compiler and a CUDA device remember for a process, and a workload can change.

TF32 and its like on a GPU are missing: `precision.apply` sets them for each point.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch.distributions
import torch.nn.modules.module
import torch.optim
import torch.utils._device
import torch.utils._python_dispatch as dispatch
from torch import backends, overrides

from raybench.worker.state.process_settings import Setting, attribute, mapping

_C: Any = torch._C  # much of it is missing from torch's types
_autograd: Any = torch._C._autograd
_overrides: Any = overrides
_GLOBAL_HOOKS = "_global_"
# torch._dynamo has loaded them all.
_CONFIGS = (
    "torch._dynamo.config",
    "torch._functorch.config",
    "torch._inductor.config",
    "torch.compiler.config",
)
# torch's allocator takes memory for small blocks from the device in segments of 2 MiB.
_SMALL_SEGMENT_BYTES = 2 * 2**20
_MIB = 2**20


def torch_settings() -> tuple[Setting, ...]:
    """Those that this version of torch has."""
    return tuple(
        setting
        for setting in (
            *_defaults(),
            *_autograd_modes(),
            *_autocast(),
            *_backends(),
            *_attention(),
            *_hooks(),
            *compiler_settings(),
        )
        if _is_there(setting)
    )


def inherit_onednn_precision() -> None:
    """Let the precisions of oneDNN follow the general one again, which the point's mode sets."""
    for operation in ("all", "matmul", "conv", "rnn"):
        _C._set_fp32_precision_setter("mkldnn", operation, "none")


def _is_there(setting: Setting) -> bool:
    try:
        setting.read()
    except AttributeError:
        return False
    return True


def _defaults() -> Iterator[Setting]:
    # First: under a mode any function of torch may do anything.
    yield Setting("default device and function modes", _function_modes, _set_function_modes)
    yield Setting("dispatch modes", _dispatch_modes, _set_dispatch_modes)
    # Before the default dtype, which it sets too.
    yield Setting("default tensor type", _C._get_default_device, _set_default_tensor_type)
    yield Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield Setting("intra-op threads", torch.get_num_threads, torch.set_num_threads)
    yield Setting("inter-op threads", torch.get_num_interop_threads, None)
    yield Setting(
        "deterministic algorithms",
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    )
    yield attribute(
        "filling of empty tensors", torch.utils.deterministic, "fill_uninitialized_memory"
    )
    yield Setting("repeated warnings", torch.is_warn_always_enabled, torch.set_warn_always)
    yield Setting("flushing of denormal numbers", _flushes_denormal, torch.set_flush_denormal)
    yield Setting("print options", _print_options, _set_print_options)
    yield Setting(
        "sharing strategy",
        torch.multiprocessing.get_sharing_strategy,
        torch.multiprocessing.set_sharing_strategy,
    )


def _print_options() -> dict[str, Any]:
    return dict(vars(torch._tensor_str.PRINT_OPTS))


def _set_print_options(before: dict[str, Any]) -> None:
    vars(torch._tensor_str.PRINT_OPTS).update(before)


def _autograd_modes() -> Iterator[Setting]:
    # It ends with the object that began it, which somebody still holds.
    yield Setting("inference mode", torch.is_inference_mode_enabled, None)
    yield Setting("grad mode", torch.is_grad_enabled, _C._set_grad_enabled)
    yield Setting("forward grad mode", _C._is_fwd_grad_enabled, _C._set_fwd_grad_enabled)
    yield Setting("view replay", _C._is_view_replay_enabled, _C._set_view_replay_enabled)
    yield Setting(
        "multithreaded backward", _C._is_multithreading_enabled, _C._set_multithreading_enabled
    )
    yield Setting(
        "anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda before: torch.set_anomaly_enabled(*before),
    )
    yield Setting("torch profiler", _autograd._profiler_enabled, None)


def _autocast() -> Iterator[Setting]:
    for device_type in ("cpu", "cuda"):
        yield Setting(
            f"autocast on {device_type}",
            partial(torch.is_autocast_enabled, device_type),
            partial(torch.set_autocast_enabled, device_type),
        )
        yield Setting(
            f"autocast dtype on {device_type}",
            partial(torch.get_autocast_dtype, device_type),
            partial(torch.set_autocast_dtype, device_type),
        )
    yield Setting(
        "autocast cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    )
    yield Setting("autocast nesting", _autocast_nesting, _set_autocast_nesting)


def _backends() -> Iterator[Setting]:
    for name in ("enabled", "benchmark", "benchmark_limit", "deterministic", "depthwise_kernel"):
        yield attribute(f"cuDNN {name}", backends.cudnn, name)
    for name in ("enabled", "deterministic"):
        yield attribute(f"oneDNN {name}", backends.mkldnn, name)
    for name in ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction"):
        public = attribute(f"cuBLAS {name}", backends.cuda.matmul, f"allow_{name}")
        # The public attribute takes, but does not tell, whether split-K is allowed.
        yield public._replace(read=getattr(_C, f"_get_cublas_allow_{name}"))
    yield attribute("cuBLAS fp16 accumulation", backends.cuda.matmul, "allow_fp16_accumulation")
    for name in ("linalg", "blas"):
        library = getattr(backends.cuda, f"preferred_{name}_library")
        yield Setting(f"preferred {name} library", library, library)
    yield Setting("NNPACK", _C._get_nnpack_enabled, _C._set_nnpack_enabled)
    yield attribute("opt_einsum", backends.opt_einsum, "enabled")
    yield attribute("quantized engine", backends.quantized, "engine")


def choose_attention_order(device: torch.device) -> None:
    """Let torch choose the order in which it tries its attention kernels, once in a process.

    It does so when it first chooses a kernel: cuDNN's come first on some devices. In a point that
    would be a change, which is put back, and torch would not choose again for the next point.
    """
    if device.type == "cuda":
        query = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16, device=device)
        torch._fused_sdp_choice(query, query, query)


def _attention() -> Iterator[Setting]:
    cuda = backends.cuda
    yield Setting("flash attention", cuda.flash_sdp_enabled, cuda.enable_flash_sdp)
    yield Setting(
        "memory-efficient attention", cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp
    )
    yield Setting("math attention", cuda.math_sdp_enabled, cuda.enable_math_sdp)
    yield Setting("cuDNN attention", cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp)
    yield Setting(
        "reduced precision in math attention",
        cuda.fp16_bf16_reduction_math_sdp_allowed,
        cuda.allow_fp16_bf16_reduction_math_sdp,
    )
    yield Setting("order of attention", _C._get_sdp_priority_order, _C._set_sdp_priority_order)
    mha = backends.mha
    yield Setting("attention fast path", mha.get_fastpath_enabled, mha.set_fastpath_enabled)


def _hooks() -> Iterator[Setting]:
    """Hooks on every module, every optimizer and every saved tensor of the process."""
    # torch.optim hides its module of this name.
    for module in (torch.nn.modules.module, sys.modules["torch.optim.optimizer"]):
        for name, value in vars(module).items():
            if name.startswith(_GLOBAL_HOOKS):
                is_mapping = isinstance(value, dict)
                yield mapping(name, value) if is_mapping else attribute(name, module, name)
    yield Setting("saved-tensor hooks", _tensor_hooks, _drop_saved_tensor_hooks)
    yield Setting(
        "ban of saved-tensor hooks",
        _autograd._saved_tensors_hooks_get_disabled_error_message,
        _set_ban_of_saved_tensor_hooks,
    )


def _set_default_tensor_type(device_type: str) -> None:
    assert device_type == "cpu", "the worker itself never sets another"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and the only way back
        _C._set_default_tensor_type(torch.FloatTensor)


def _function_modes() -> tuple[list[Any], Any, Any]:
    """Read the stack, and the default device: a function mode that is kept in two more places."""
    return (
        _overrides._get_current_function_mode_stack(),
        torch.utils._device.CURRENT_DEVICE,
        getattr(_default_device(), "device_context", None),
    )


def _set_function_modes(before: tuple[list[Any], Any, Any]) -> None:
    stack, torch.utils._device.CURRENT_DEVICE, _default_device().device_context = before
    while _overrides._get_current_function_mode_stack():
        _overrides._pop_mode()
    for mode in stack:
        _overrides._push_mode(mode)


def _default_device() -> Any:
    return torch._GLOBAL_DEVICE_CONTEXT


def _dispatch_modes() -> list[Any]:
    return dispatch._get_current_dispatch_mode_stack()


def _set_dispatch_modes(before: list[Any]) -> None:
    while dispatch._get_current_dispatch_mode_stack():
        dispatch._pop_mode()
    for mode in before:
        dispatch._push_mode(mode)


def _flushes_denormal() -> bool:
    return sys.float_info.min * 0.5 == 0.0


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _set_autocast_nesting(before: int) -> None:
    while _autocast_nesting() > before:
        torch.autocast_decrement_nesting()
    # Autocast itself drops its copies of weights when the outermost block ends.
    torch.clear_autocast_cache()


def _tensor_hooks() -> Any:
    return _autograd._top_saved_tensors_default_hooks(True)


def _drop_saved_tensor_hooks(before: None) -> None:
    while _tensor_hooks() is not None:
        _autograd._pop_saved_tensors_default_hooks()


def _set_ban_of_saved_tensor_hooks(before: str | None) -> None:
    if before is None:
        _autograd._saved_tensors_hooks_enable()
    else:
        _autograd._saved_tensors_hooks_disable(before)


def compiler_settings() -> Iterator[Setting]:
    """List the stance of torch.compile, and the configurations of its three layers."""
    eval_frame: Any = torch._dynamo.eval_frame
    # Its first use switches these checks off.
    yield attribute("checks of distributions", torch.distributions.Distribution, "_validate_args")
    yield Setting("torch.compile stance", lambda: eval_frame._stance, eval_frame._set_stance)
    for name in _CONFIGS:
        yield _config(name, sys.modules[name])


def forget_compiled_code() -> None:
    """Drop compiled code, and end the threads and processes that compiled it."""
    # Only then: with CUDA the reset itself imports inductor, 600 modules in each process.
    if not torch._dynamo.utils.counters["frames"]:
        return
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_module: Any = sys.modules.get("torch._inductor.async_compile")
    if compile_module is None:
        return
    compile_module.shutdown_compile_workers()
    threads = compile_module.AsyncCompile.pool
    if threads.cache_info().currsize:
        threads().shutdown()
        threads.cache_clear()


def is_of_compiler(function: Any) -> bool:
    """Whether it stands in the place of another because torch.compile was used."""
    module = getattr(function, "__module__", None)
    is_wrapped = hasattr(function, "_torchdynamo_orig_callable")
    return is_wrapped or (isinstance(module, str) and module.startswith("torch._dynamo."))


def let_compiler_wrap_again() -> None:
    """Let it wrap functions of optimizers and modules anew, which it does once in a process."""
    torch._dynamo.eval_frame.TorchPatcher.patch.cache_clear()
    torch.nn.Module.___needs_generation_tag_patch = True  # type: ignore[attr-defined]


def _config(name: str, config: Any) -> Setting:
    def write(before: dict[str, Any]) -> None:
        now = config.get_config_copy()
        for key, value in before.items():
            if now[key] != value:
                setattr(config, key, value)

    return Setting(name, config.get_config_copy, write)


def device_settings(device: torch.device) -> Iterator[Setting]:
    """Those of a CUDA device; of a CPU there are none."""
    if device.type != "cuda":
        return
    cuda = torch.cuda
    yield Setting("current stream", lambda: cuda.current_stream(device), cuda.set_stream)
    yield Setting("CUDA sync debug mode", cuda.get_sync_debug_mode, cuda.set_sync_debug_mode)
    yield Setting(
        "limit of device memory",
        lambda: cuda.memory.get_per_process_memory_fraction(device),
        lambda before: cuda.memory.set_per_process_memory_fraction(before, device),
    )
    yield Setting("history of device memory", _C._cuda_isHistoryEnabled, _stop_history)
    plans = torch.backends.cuda.cufft_plan_cache[device]
    yield Setting(
        "size of the cuFFT plan cache",
        lambda: plans.max_size,
        lambda before: setattr(plans, "max_size", before),
    )


class DeviceMemory:
    """The caches and the memory of a device as they were when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.release()
        self._reserved_bytes = self._now_bytes()

    def release(self) -> None:
        """Wait for the device, drop what libraries cache on it, give free memory back."""
        if self._device.type != "cuda":
            return
        torch.cuda.synchronize(self._device)
        _C._cuda_clearCublasWorkspaces()
        torch.backends.cuda.cufft_plan_cache[self._device].clear()
        torch.cuda.empty_cache()

    def still_held(self) -> tuple[str, ...]:
        """Name the memory that somebody holds on to, a noun phrase, when there is some."""
        held_bytes = self._now_bytes() - self._reserved_bytes
        if held_bytes <= _SMALL_SEGMENT_BYTES:
            return ()
        return (f"{held_bytes / _MIB:,.0f} MiB of device memory",)

    def _now_bytes(self) -> int:
        # Reserved, not allocated: the pool of a living CUDA graph is no room for others either.
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0


def _stop_history(before: bool) -> None:
    if not before:
        torch.cuda.memory._record_memory_history(enabled=None)
