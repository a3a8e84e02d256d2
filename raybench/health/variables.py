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

    @property
    def is_of_gpus(self) -> bool:
        """Whether CPU workers ignore the variable."""
        return not self.name.startswith("TORCH_DISTRIBUTED")

    @property
    def needs_nvlink(self) -> bool:
        """Whether a machine without NVLink may need the variable."""
        return self.name.startswith("NCCL_P2P")


def _row(
    name: str,
    is_costly: Callable[[str], bool],
    verdict: Verdict = Verdict.NOTE,
    *,
    is_between_nodes: bool = False,
) -> CostlyVariable:
    return CostlyVariable(
        name=name, is_costly=is_costly, verdict=verdict, is_between_nodes=is_between_nodes
    )


COSTLY_VARIABLES = (
    _row("NCCL_P2P_DISABLE", _is_enabled, Verdict.BAD),
    _row("NCCL_P2P_LEVEL", _is_any_of("LOC", "0"), Verdict.BAD),
    _row("NCCL_SHM_DISABLE", _is_enabled),
    _row("NCCL_IB_DISABLE", _is_enabled, Verdict.BAD, is_between_nodes=True),
    _row("NCCL_DEBUG", _is_any_of("INFO", "TRACE")),
    _row("NCCL_ALGO", bool),
    _row("NCCL_PROTO", bool),
    _row("NCCL_MAX_NCHANNELS", bool),
    _row("NCCL_MAX_CTAS", bool),
    _row("CUDA_LAUNCH_BLOCKING", _is_enabled, Verdict.BAD),
    _row("CUDA_DEVICE_MAX_CONNECTIONS", _is_any_of("1")),
    _row("CUDA_VISIBLE_DEVICES", _is_unsorted),
    _row("PYTORCH_NO_CUDA_MEMORY_CACHING", bool, Verdict.BAD),
    _row("TORCH_NCCL_BLOCKING_WAIT", _is_enabled),
    _row("TORCH_NCCL_ENABLE_TIMING", _is_enabled),
    _row("TORCH_DISTRIBUTED_DEBUG", _is_any_of("DETAIL"), Verdict.BAD),
    _row("NVIDIA_TF32_OVERRIDE", bool),
)
