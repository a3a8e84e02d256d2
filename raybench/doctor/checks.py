"""All checks that need no work of the devices, in the order in which they are printed. Pure."""

from __future__ import annotations

from collections.abc import Callable

from raybench.doctor import gpu_checks, variables, worker_checks
from raybench.doctor.facts import Check, Facts

_Rule = Callable[[Facts], Check]

_ALL: tuple[_Rule, ...] = (
    worker_checks.devices,
    worker_checks.identity,
    worker_checks.versions,
    worker_checks.other_sweeps,
    worker_checks.niceness,
    worker_checks.threads,
    worker_checks.disk,
    worker_checks.shared_memory,
)
_GPU: tuple[_Rule, ...] = (
    gpu_checks.clocks,
    gpu_checks.throttling,
    gpu_checks.power,
    gpu_checks.temperature,
    gpu_checks.ecc,
    gpu_checks.mig,
    gpu_checks.persistence,
    gpu_checks.pcie,
    gpu_checks.nvlink,
    gpu_checks.other_processes,
)


def examine(facts: Facts) -> list[Check]:
    """The checks of at least one device; those of GPUs where there are any."""
    rules = (*_ALL, *(_GPU if facts.is_cuda else ()))
    return [
        *(rule(facts) for rule in rules),
        variables.variables(facts),
        variables.differences(facts),
        *variables.traps(facts),
    ]
