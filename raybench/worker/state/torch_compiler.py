"""What torch.compile remembers in a process: its settings, compiled code, its helpers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
import torch.distributions

from raybench.worker.state.setting import Setting, attribute

# torch._dynamo has loaded them all.
_CONFIGS = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")


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
