"""Find and import the class of a workload, built in or of the user."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from raybench.errors import UsageError, brief
from raybench.job.problems import say_unknown

BUILTIN: Mapping[str, str] = {
    "collective": "raybench.workloads.collective:Collective",
    "dit": "raybench.workloads.dit:Dit",
    "function": "raybench.workloads.functions:Function",
    "gemm": "raybench.workloads.kernels:Gemm",
    "grouped_collective": "raybench.workloads.collective:GroupedCollective",
    "host_copy": "raybench.workloads.kernels:HostCopy",
    "host_timed_transformer": "raybench.workloads.transformer:HostTimedTransformer",
    "launch": "raybench.workloads.kernels:Launch",
    "linear": "raybench.workloads.networks:Linear",
    "memory": "raybench.workloads.kernels:Memory",
    "mlp": "raybench.workloads.networks:Mlp",
    "pairs": "raybench.workloads.pairs:Pairs",
    "resnet50": "raybench.workloads.networks:ResNet",
    "same_bits": "raybench.workloads.kernels:SameBits",
    "script": "raybench.workloads.scripts:Script",
    "smoke": "raybench.workloads.networks:Smoke",
    "transformer": "raybench.workloads.transformer:Transformer",
}


def load_workload(kind: str) -> type:
    """Import the module of a workload and return its class.

    Puts the current directory first into `sys.path`, as `python -m` does.

    Args:
        kind: a built-in workload, or package.module:Class. The class needs a method `step`; its
            base does not matter.

    Raises:
        UsageError: the module cannot be imported, or has no such class with a method `step`.
    """
    module_name, class_name = module_and_class(kind)
    try:
        current_folder = str(Path.cwd())
        if current_folder not in sys.path:
            sys.path.insert(0, current_folder)
        # The module may print while it is imported, but stdout is for results (`plan --json`).
        with redirect_stdout(sys.stderr):
            module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # A user's module may raise anything, SystemExit included.
        raise UsageError(f"cannot import module {module_name!r}: {brief(error)}") from error
    with usage_errors(kind):
        workload_class = getattr(module, class_name, None)
        if not inspect.isclass(workload_class):
            classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
            raise UsageError(f"module {module_name!r}: {say_unknown('class', class_name, classes)}")
        step = getattr(workload_class, "step", None)
        if not callable(step) or getattr(step, "__isabstractmethod__", False):
            raise UsageError(f"{kind} has no method step(), which does one iteration")
        return workload_class


def module_and_class(kind: str) -> tuple[str, str]:
    """Return the names of a workload's module and class; imports nothing.

    Args:
        kind: see `load_workload`.

    Raises:
        UsageError: `kind` is neither a built-in workload nor package.module:Class.
    """
    target = BUILTIN.get(kind, kind)
    if ":" not in target:
        message = say_unknown("workload", kind, BUILTIN)
        hint = "" if message.endswith("?") else "; or your own as package.module:Class"
        raise UsageError(message + hint)
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", target):
        raise UsageError(f"a workload of your own is package.module:Class, given {kind!r}")
    module_name, _, class_name = target.partition(":")
    return module_name, class_name


@contextmanager
def usage_errors(subject: str) -> Iterator[None]:
    """Turn an exception inside the `with` block into a UsageError of one line: SUBJECT, reason."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{subject} cannot be read: {brief(error)}") from error
