"""The answer of `raybench doctor`: the facts are checked, then the devices are tried together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from raybench.cluster.point_end import cause_of
from raybench.doctor import transports
from raybench.doctor.checks import Check, Facts, Verdict, check_facts
from raybench.errors import ClusterError
from raybench.job.model import Measure, Span
from raybench.job.point import Point, Precision
from raybench.records import Answer, Measurement, Task
from raybench.records.environment import package_versions, usable_cores, variables_that_matter
from raybench.report.formatting import counted

if TYPE_CHECKING:
    from raybench.cluster import Cluster

# Shows a text as long as the block lasts.
Phase = Callable[[str], AbstractContextManager[object]]

_MIB = 2**20
_ALL_REDUCE_BYTES = {"cuda": 256 * _MIB, "cpu": 64 * _MIB}
_ALL_REDUCE_SETTINGS = Measure(
    warmup=Span(min=5, max=5),
    iterations=Span(min=20, max=20),
    max_seconds=10.0,
    timeout_s=120.0,
    breakdown=False,
)
_SLOW_START_S = 10.0
_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Doctor's answer. cluster: in words. environment: the variables of this process."""

    cluster: str
    facts: Facts
    checks: tuple[Check, ...]
    environment: Mapping[str, str]

    @property
    def has_failed(self) -> bool:
        """Return whether any check failed."""
        return any(check.verdict is Verdict.FAIL for check in self.checks)


def open_cluster(
    address: str, device: Literal["auto", "cuda", "cpu"], end: Callable[[str], None]
) -> Cluster:
    """Return a cluster that other sweeps may use too; the caller closes it.

    end: is called with the reason when the cluster cannot be used any more. Raises ClusterError
    where there is no cluster.
    """
    from raybench.cluster import connect
    from raybench.cluster.device_reservation import ReservationTerms, this_process

    terms = ReservationTerms(holder=this_process("raybench doctor"), shared=True)
    # A private Ray on CPUs gets a worker for each core.
    return connect(address, device, usable_cores(), end=end, terms=terms)


def diagnose(cluster: Cluster, phase: Phase) -> Diagnosis:
    """Return the results of all checks, with a worker started on every device; takes seconds.

    phase: shows a text while a part of it runs. Raises ClusterError where no worker starts. Where
    raybench refuses the devices, the checks that need their work are left out.
    """
    refusal = ""
    with phase(f"starting {counted(cluster.capacity, 'worker')}"):
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
    return Diagnosis(
        cluster=cluster.description,
        facts=facts,
        checks=(*check_facts(facts), *_try_devices(cluster, facts, phase)),
        environment=variables_that_matter(),
    )


def _try_devices(cluster: Cluster, facts: Facts, phase: Phase) -> list[Check]:
    """Run an all_reduce and then the transport probe on all devices; return their checks.

    The transports come first; they are left out where the all_reduce failed. One check "collective"
    where raybench refuses the devices, or where there is one device.
    """
    if facts.refusal:
        advice = f"raybench measures nothing here: {facts.refusal}"
        return [Check(name="collective", verdict=Verdict.FAIL, found="not run", advice=advice)]
    count = len(facts.devices)
    if count == 1:
        return [Check(name="collective", verdict=Verdict.OK, found="none: there is one device")]
    with phase(f"all_reduce over {count} devices"):
        answers = cluster.run(_all_reduce_task(facts), range(count))
    if failed := _failed_collective(answers):
        return [failed]
    measured = [answer for answer in answers if isinstance(answer, Measurement)]
    with phase(f"transports between {count} devices"):
        probed = cluster.run(transports.probe_task(count), range(count))
    return [*transports.judge(facts, probed), _first_collective(measured), _bandwidth(measured)]


def _all_reduce_task(facts: Facts) -> Task:
    """Return the all_reduce over all devices: 256 MiB on GPUs, 64 MiB on CPU workers."""
    size_bytes = _ALL_REDUCE_BYTES[facts.devices[0].kind]
    point = Point(
        workload="collective",
        params={"operation": "all_reduce", "size_bytes": size_bytes, "dtype": "float32"},
        world_size=len(facts.devices),
        precision=Precision.FP32,
        batch_size=None,
        global_batch_size=None,
        scaling=None,
    )
    return Task(point=point, settings=_ALL_REDUCE_SETTINGS)


def _failed_collective(answers: Sequence[Answer]) -> Check | None:
    """Return the check that names the rank that made the all_reduce fail; None where none did."""
    cause = cause_of(answers)
    if cause is None:
        return None
    return Check(
        name="collective",
        verdict=Verdict.FAIL,
        found=f"rank {cause.rank}: {cause.error_type}: {cause.message}",
        advice="nothing that communicates can be measured: read the whole error in --json; run "
        "again with NCCL_DEBUG=WARN on GPUs; look at the network between the nodes and at the "
        "variables above",
        details={"rank": cause.rank, "error_type": cause.error_type, "detail": cause.detail},
    )


def _first_collective(measured: Sequence[Measurement]) -> Check:
    """Return the check of the time to form the group, with NCCL's set-up in the first call."""
    first_s = max(
        (one.setup_s or 0.0) + one.repetitions[0].warmup.step_ns[0] / _NS_PER_S for one in measured
    )
    is_slow = first_s > _SLOW_START_S
    advice = (
        "slow to connect: look at name resolution, and at interfaces that the other nodes do not "
        "reach (NCCL_SOCKET_IFNAME)"
    )
    return Check(
        name="first collective",
        verdict=Verdict.WARN if is_slow else Verdict.OK,
        found=f"{first_s:.2f} s to form the group of {len(measured)} and finish one all_reduce",
        advice=advice if is_slow else "",
        details={"first_collective_s": first_s},
    )


def _bandwidth(measured: Sequence[Measurement]) -> Check:
    """Return the check that shows the bus bandwidth, by the median step of the slowest rank."""
    size_bytes, factor = measured[0].message_bytes, measured[0].busbw_factor
    assert size_bytes is not None
    assert factor is not None
    step_s = max(statistics.median(one.step_ns) for one in measured) / _NS_PER_S
    algbw = size_bytes / step_s / 1e9
    return Check(
        name="all_reduce",
        verdict=Verdict.OK,
        found=f"{size_bytes // _MIB} MiB, payload right, {step_s * 1e3:.3g} ms: "
        f"busbw {algbw * factor:.4g} GB/s",
        details={
            "size_bytes": size_bytes,
            "step_ms": step_s * 1e3,
            "algbw_gb_s": algbw,
            "busbw_gb_s": algbw * factor,
        },
    )
