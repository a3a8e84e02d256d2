"""The checks of `raybench doctor` in the order of its output; the last ones need the devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

from raybench.doctor import (
    collective,
    gpu_checks,
    transports,
    variables,
    worker_checks,
)
from raybench.doctor.facts import Check, Diagnosis, Facts, Verdict, count_noun
from raybench.errors import ClusterError
from raybench.records.environment import package_versions, usable_cores, variables_that_matter

if TYPE_CHECKING:
    from raybench.cluster import Cluster

# Shows a text as long as the block lasts.
Phase = Callable[[str], AbstractContextManager[object]]
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
    gpu_checks.memory,
    gpu_checks.errors,
    gpu_checks.mig,
    gpu_checks.persistence,
    gpu_checks.pcie,
    gpu_checks.nvlink,
    gpu_checks.other_processes,
)


def open_cluster(
    address: str, device: Literal["auto", "cuda", "cpu"], end: Callable[[str], None]
) -> Cluster:
    """Return a cluster that other sweeps may use too. Raises ClusterError where there is none."""
    from raybench.cluster import connect
    from raybench.cluster.device_reservation import ReservationTerms, this_process

    terms = ReservationTerms(holder=this_process("raybench doctor"), shared=True)
    # A private Ray on CPUs gets a worker for each core.
    return connect(address, device, usable_cores(), end=end, terms=terms)


def diagnose(cluster: Cluster, phase: Phase) -> Diagnosis:
    """Return the result of all checks on all workers. Raises ClusterError where no worker starts.

    Where raybench refuses the devices, the checks that need their work are left out.
    """
    refusal = ""
    with phase(f"starting {count_noun(cluster.capacity, 'worker')}"):
        try:
            cluster.start(cluster.capacity, "pack")
        except ClusterError as error:
            if not cluster.devices:
                raise
            refusal = str(error)
    facts = Facts(
        devices=cluster.devices,
        versions=package_versions(),
        refusal=refusal,
        others=cluster.other_sweeps,
        states=() if refusal else cluster.read_device_facts(),
    )
    checks = [*check_facts(facts), *_try_devices(cluster, facts, phase)]
    return Diagnosis(
        cluster=cluster.description,
        facts=facts,
        checks=tuple(checks),
        environment=variables_that_matter(),
    )


def check_facts(facts: Facts) -> list[Check]:
    """Return the checks that need no work of the devices, in order.

    facts: of one device or more. The checks of GPUs are left out where no worker owns one; each
    variable that costs something adds a check.
    """
    rules = (*_ALL, *(_GPU if facts.is_cuda else ()))
    return [
        *(rule(facts) for rule in rules),
        variables.variables(facts),
        variables.differences(facts),
        *variables.costly_variables(facts),
    ]


def _try_devices(cluster: Cluster, facts: Facts, phase: Phase) -> list[Check]:
    """Return the checks for which the devices do something: transports, then an all_reduce."""
    if skipped := collective.not_run(facts):
        return [skipped]
    count = len(facts.devices)
    with phase(f"all_reduce over {count} devices"):
        task = collective.all_reduce(facts.devices[0].kind, count)
        checks = collective.judge(cluster.run(task, range(count)))
    if any(check.verdict is Verdict.FAIL for check in checks):
        return checks
    with phase(f"transports between {count} devices"):
        answers = cluster.run(transports.probe_task(count), range(count))
        return [*transports.judge(facts, answers), *checks]
