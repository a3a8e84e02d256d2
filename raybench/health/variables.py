"""Environment variables that change what is measured.

Sources: the lists of environment variables of NCCL (docs.nvidia.com/deeplearning/nccl), of
ProcessGroupNCCL (pytorch.org/docs/stable/torch_nccl_environment_variables.html) and of CUDA
(CUDA C++ Programming Guide, appendix on environment variables).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raybench.records.devices import Verdict

_OFF = ("", "0", "false", "no", "n", "f")


def _is_enabled(value: str) -> bool:
    return value.lower() not in _OFF


def _is_unsorted(value: str) -> bool:
    """Return whether devices are repeated or not ascending: torch then counts them differently."""
    entries = [entry.strip() for entry in value.split(",")]
    numbers = [int(entry) for entry in entries if entry.isdigit()]
    return len(set(entries)) < len(entries) or numbers != sorted(numbers)


def _is_any_of(*values: str) -> Callable[[str], bool]:
    return lambda value: value.upper() in values


@dataclass(frozen=True, slots=True, kw_only=True)
class CostlyVariable:
    """A variable with values that cost time; `report/words/environment.py` says what they cost."""

    name: str
    # Gets the value without blanks at its ends.
    is_costly: Callable[[str], bool]
    verdict: Verdict = Verdict.NOTE
    # Matters only if there are several nodes.
    is_between_nodes: bool = False
    # CPU workers ignore the variable.
    is_of_gpus: bool = True
    # A machine without NVLink may need the variable.
    needs_nvlink: bool = False


COSTLY_VARIABLES = (
    CostlyVariable(
        name="NCCL_P2P_DISABLE", is_costly=_is_enabled, verdict=Verdict.BAD, needs_nvlink=True
    ),
    CostlyVariable(
        name="NCCL_P2P_LEVEL",
        is_costly=_is_any_of("LOC", "0"),
        verdict=Verdict.BAD,
        needs_nvlink=True,
    ),
    CostlyVariable(name="NCCL_SHM_DISABLE", is_costly=_is_enabled),
    CostlyVariable(
        name="NCCL_IB_DISABLE", is_costly=_is_enabled, verdict=Verdict.BAD, is_between_nodes=True
    ),
    CostlyVariable(name="NCCL_DEBUG", is_costly=_is_any_of("INFO", "TRACE")),
    CostlyVariable(name="NCCL_ALGO", is_costly=bool),
    CostlyVariable(name="NCCL_PROTO", is_costly=bool),
    CostlyVariable(name="NCCL_MAX_NCHANNELS", is_costly=bool),
    CostlyVariable(name="NCCL_MAX_CTAS", is_costly=bool),
    CostlyVariable(name="CUDA_LAUNCH_BLOCKING", is_costly=_is_enabled, verdict=Verdict.BAD),
    CostlyVariable(name="CUDA_DEVICE_MAX_CONNECTIONS", is_costly=_is_any_of("1")),
    CostlyVariable(name="CUDA_VISIBLE_DEVICES", is_costly=_is_unsorted),
    CostlyVariable(name="PYTORCH_NO_CUDA_MEMORY_CACHING", is_costly=bool, verdict=Verdict.BAD),
    CostlyVariable(name="TORCH_NCCL_BLOCKING_WAIT", is_costly=_is_enabled),
    CostlyVariable(name="TORCH_NCCL_ENABLE_TIMING", is_costly=_is_enabled),
    CostlyVariable(
        name="TORCH_DISTRIBUTED_DEBUG",
        is_costly=_is_any_of("DETAIL"),
        verdict=Verdict.BAD,
        is_of_gpus=False,
    ),
    CostlyVariable(name="NVIDIA_TF32_OVERRIDE", is_costly=bool),
)
