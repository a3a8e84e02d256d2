"""The answer of `raybench doctor`: the facts are checked, then the devices are tried together.

They do an all_reduce, then a collective in other processes, which print what NCCL or gloo tell.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from raybench.cluster.point_end import cause_of
from raybench.doctor.checks import Check, Facts, Verdict, active_nvlinks, check_facts, judge
from raybench.errors import ClusterError
from raybench.hardware.nccl_log import NcclLog, Route, parse
from raybench.job.model import Measure, Span
from raybench.job.point import Point, Precision
from raybench.records import environment
from raybench.records.code import code_of
from raybench.records.device import Device
from raybench.records.measurement import Failure, Measurement, RankAnswer
from raybench.records.task import Task
from raybench.report.formatting import counted, some, span

if TYPE_CHECKING:
    from raybench.cluster import Cluster

# Shows a text as long as the block lasts.
Phase = Callable[[str], AbstractContextManager[object]]
Tell = Callable[[str], None]

_MIB = 2**20
_ALL_REDUCE_BYTES = {"cuda": 256 * _MIB, "cpu": 64 * _MIB}
_TRANSPORT_PROBE = "raybench.workloads.pairs:TransportProbe"
_SETTINGS = Measure(
    warmup=Span(min=5, max=5),
    iterations=20,
    max_seconds=10.0,
    timeout_s=120.0,
    breakdown=False,
)
_SLOW_START_S = 10.0
_NS_PER_S = 1e9
_SAID = re.compile(r"^raybench: (\w+) ?(.*)$")
# Interfaces that other hosts do not reach, or by a detour.
_INNER = re.compile(r"lo$|docker|br-|virbr|veth|cni|flannel|podman")
_NO_PEERS = (
    "devices of one node do not reach each other's memory: data goes through the host; look at "
    "NCCL_P2P_DISABLE and NCCL_P2P_LEVEL, at `nvidia-smi topo -p2p r`, and in a virtual machine or "
    "with ACS on at the IOMMU"
)
_NO_ADAPTER = (
    "look at NCCL_IB_DISABLE, NCCL_IB_HCA and NCCL_NET, for libibverbs and /dev/infiniband in the "
    "container, and for EFA at the plug-in aws-ofi-nccl"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The answer. cluster: in words. environment: variables of this process that change times."""

    cluster: str
    facts: Facts
    checks: tuple[Check, ...]
    environment: Mapping[str, str]


def open_cluster(
    address: str, device: Literal["auto", "cuda", "cpu"], end: Tell, log: Tell
) -> Cluster:
    """Return a cluster without workers yet, joined or started; the caller closes it.

    It shares its devices with other sweeps; from `start` on, a sweep that does not share them waits
    or is refused. Parameters, and the handler of SIGTERM, as of `raybench.cluster.connect`. Raises
    ClusterError where there is no cluster, or no GPU for cuda; UsageError for a bad address.
    """
    from raybench.cluster import ClusterRequest, connect
    from raybench.cluster.device_reservation import ReservationTerms, this_process

    terms = ReservationTerms(holder=this_process("raybench doctor"), shared=True)
    # A private Ray on CPUs gets a worker for each core.
    cores = environment.usable_cores()
    request = ClusterRequest(address=address, device=device, devices_wanted=cores, terms=terms)
    return connect(request, end=end, log=log)


def diagnose(cluster: Cluster, phase: Phase) -> Diagnosis:
    """Start a worker on every device, and return the results of all checks; takes seconds.

    It takes minutes where a rank hangs. cluster: not started before; its workers run until the
    caller closes it. phase: given a text, returns a context that shows it meanwhile. Raises
    ClusterError where the start leaves no device, and where the cluster is gone. If the start fails
    with devices there, or the all_reduce fails, one failed check, "collective", stands for all that
    compute on them.
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
        missing=cluster.capacity - len(cluster.devices),
        versions=environment.package_versions(),
        refusal=refusal,
        others=cluster.other_sweeps,
        states=() if refusal else cluster.read_device_facts(),
    )
    return Diagnosis(
        cluster=cluster.description,
        facts=facts,
        checks=(*check_facts(facts), *_try_devices(cluster, facts, phase)),
        environment=environment.variables_that_matter(),
    )


def _try_devices(cluster: Cluster, facts: Facts, phase: Phase) -> list[Check]:
    """Run an all_reduce and then the transport probe on all devices; return their checks.

    The checks of transports come first. One check "collective" alone: a failure where raybench
    refuses the devices or the all_reduce fails on any rank, ok where there is one device.
    """
    if facts.refusal:
        advice = f"raybench measures nothing here: {facts.refusal}"
        return [judge("collective", "not run", advice, Verdict.FAIL)]
    count = len(facts.devices)
    if count == 1:
        return [judge("collective", "none: there is one device", "")]
    all_reduce = _task(
        "collective",
        count,
        operation="all_reduce",
        size_bytes=_ALL_REDUCE_BYTES[facts.devices[0].kind],
        dtype="float32",
    )
    with phase(f"all_reduce over {count} devices"):
        answers = cluster.run(all_reduce, range(count))
    if cause := cause_of(answers):
        return [
            judge(
                "collective",
                f"rank {cause.rank} on {facts.devices[cause.rank].host}: {cause.error_type}: "
                f"{cause.message}",
                "nothing that communicates can be measured: read the whole error in --json; run "
                "again with NCCL_DEBUG=WARN on GPUs; look at the network between the nodes and at "
                "the variables above",
                Verdict.FAIL,
                rank=cause.rank,
                error_type=cause.error_type,
                detail=cause.detail,
            )
        ]
    measured = [answer for answer in answers if isinstance(answer, Measurement)]
    with phase(f"transports between {count} devices"):
        probed = cluster.run(_task(_TRANSPORT_PROBE, count), range(count))
    return [*judge_transports(facts, probed), *_judge_all_reduce(measured)]


def _task(workload: str, world_size: int, **params: str | int) -> Task:
    """Return the task to time 20 steps of a workload in fp32, after 5 for warming up."""
    point = Point(
        workload=workload,
        params=params,
        world_size=world_size,
        precision=Precision.FP32,
        batch_size=None,
        global_batch_size=None,
        scaling=None,
    )
    code = code_of("raybench.workloads")  # a sweep refuses nodes with another
    return Task(point=point, settings=_SETTINGS, precisions=None, code=code)


def _judge_all_reduce(measured: Sequence[Measurement]) -> list[Check]:
    """Return the check of the time to form the group, and that which shows the bus bandwidth.

    The group is formed by the set-up and the first call; over 10 s for that are a warning. The
    bandwidth follows from the median step of the slowest rank. measured: of all ranks.
    """
    first_s = max(
        (one.setup_s or 0.0) + one.repetitions[0].warmup.step_ns[0] / _NS_PER_S for one in measured
    )
    advice = (
        "slow to connect: look at name resolution, and at interfaces that the other nodes do not "
        "reach (NCCL_SOCKET_IFNAME)"
    )
    size_bytes, factor = measured[0].message_bytes, measured[0].busbw_factor
    assert size_bytes is not None
    assert factor is not None
    step_s = max(statistics.median(one.step_ns) for one in measured) / _NS_PER_S
    algbw = size_bytes / step_s / 1e9
    return [
        judge(
            "first collective",
            f"{first_s:.2f} s to form the group of {len(measured)} and finish one all_reduce",
            advice if first_s > _SLOW_START_S else "",
            first_collective_s=first_s,
        ),
        judge(
            "all_reduce",
            f"{size_bytes // _MIB} MiB, payload right, {step_s * 1e3:.3g} ms: "
            f"busbw {algbw * factor:.4g} GB/s",
            "",
            size_bytes=size_bytes,
            step_ms=step_s * 1e3,
            algbw_gb_s=algbw,
            busbw_gb_s=algbw * factor,
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTransports:
    """The transports and limits that one rank printed.

    adapters: the RDMA adapters of its host. memlock: bytes that may be locked, or `unlimited`;
    empty where it is not told. peers: gloo's connections as (interface, own address, address of
    the other).
    """

    log: NcclLog
    adapters: tuple[str, ...] = ()
    memlock: str = ""
    peers: tuple[tuple[str, str, str], ...] = ()


# A route, and the rank that printed it.
_RankRoute = tuple[int, Route]


def judge_transports(facts: Facts, answers: Sequence[RankAnswer]) -> list[Check]:
    """Return the checks of how data travels: within nodes, then between nodes.

    Each is left out if no route is of its kind. On CPU workers there is one check, of gloo's
    interfaces. If a rank failed, or none printed a route, the one check is a warning, "unknown".
    answers: to the transport probe, one per rank; rank i ran on `facts.devices[i]`.
    """
    failure = next((one for one in answers if isinstance(one, Failure)), None)
    ranks = [_read_rank(one.output) for one in answers if isinstance(one, Measurement)]
    if failure or not any(rank.log.routes or rank.peers for rank in ranks):
        why = f"rank {failure.rank}: {failure.message}" if failure else "the ranks printed no route"
        advice = "run one collective with NCCL_DEBUG=INFO and look for `via` in what it prints"
        return [judge("transport", f"unknown: {why}", advice)]
    if not facts.is_cuda:
        return [_judge_gloo(facts.devices, ranks)]
    within: list[_RankRoute] = []
    between: list[_RankRoute] = []
    for rank, told in enumerate(ranks):
        for route in told.log.routes:
            ends = (facts.devices[end].node_id for end in (route.sender, route.receiver))
            (within if len(set(ends)) == 1 else between).append((rank, route))
    checks = []
    if within:
        is_direct = {route.kind for _, route in within} == {"P2P"}
        medium = ", NVLink" if is_direct and all(map(active_nvlinks, facts.devices)) else ""
        nvls = {rank.log.has_nvls for rank in ranks} - {None}
        switch = f"; NVLS {'on' if True in nvls else 'off'}" if nvls else ""
        advice = "" if is_direct else _NO_PEERS
        checks.append(_judge_routes("transport, node", within, f"{medium}{switch}", advice))
    if between:
        counts = sorted({rank.log.adapter_count for rank in ranks} - {0})
        has_ib = any(route.network == "IB" for _, route in between)
        count = span(*map(str, (counts[0], counts[-1]))) if counts and has_ib else ""
        more = f"; adapters a rank: {count}" if count else ""
        advice = "; ".join(_hints(ranks, [route for _, route in between]))
        checks.append(_judge_routes("transport, network", between, more, advice))
    return checks


def _read_rank(output: str) -> RankTransports:
    """Return what a rank printed: the lines of `TransportProbe`, and NCCL's log."""
    lines = output.splitlines()
    said: dict[str, list[str]] = {}
    for found in filter(None, map(_SAID.match, lines)):
        said.setdefault(found[1], []).append(found[2])
    adapters = said.get("adapters", [""])[-1]
    peers = (words.split() for words in said.get("gloo", []))
    return RankTransports(
        log=parse(lines),
        adapters=tuple(filter(None, adapters.split(","))),
        memlock=said.get("memlock", [""])[-1],
        peers=tuple((one[0], one[1], one[2]) for one in peers if len(one) == 3),
    )


def _hints(ranks: Sequence[RankTransports], routes: Sequence[Route]) -> Iterator[str]:
    """Yield what to do about the routes between nodes; nothing where they are as they should be."""
    adapters = sorted({name for rank in ranks for name in rank.adapters})
    if adapters and any(route.network == "Socket" for route in routes):
        yield f"TCP although {some(adapters)} is there: {_NO_ADAPTER}"
    inner = sorted({route.interface for route in routes if _INNER.match(route.interface)})
    if inner:
        yield (
            f"{some(inner)} leads to no other host, or by a detour: set NCCL_SOCKET_IFNAME to the "
            "interface of the cluster's network (ip -br address)"
        )
    by_adapter = [route for route in routes if route.network not in ("", "Socket")]
    if not all(route.gpu_direct for route in by_adapter):
        yield (
            "GPUDirect RDMA is off, so data goes through the host's memory: load nvidia-peermem, "
            "or use a kernel and driver with DMA-BUF; look at NCCL_NET_GDR_LEVEL"
        )
    limits = sorted({rank.memlock for rank in ranks} - {"", "unlimited"})
    if by_adapter and limits:
        yield (
            f"memory that may be locked is limited to {some(limits)} bytes, and RDMA needs more: "
            "start with --ulimit memlock=-1, or raise it for slurmd or kubelet"
        )
    if any(route.kind != "NET" for route in routes):
        yield "nodes of Ray are on one host here: this is no network between hosts"


def _judge_routes(name: str, routes: Sequence[_RankRoute], more: str, advice: str) -> Check:
    """Return the check that shows each way of the routes; it warns where there is advice.

    more: is shown after the ways.
    """
    ranks_by_way: dict[str, list[int]] = {}
    for rank, route in routes:
        owners = ranks_by_way.setdefault(route.words, [])
        owners += [rank] if rank not in owners else []
    ways = [
        f"{way} of {counted(len(owners), 'rank')}" if len(ranks_by_way) > 1 else way
        for way, owners in sorted(ranks_by_way.items())
    ]
    return judge(name, f"{some(ways)}{more}", advice, ranks_by_way=ranks_by_way)


def _judge_gloo(devices: Sequence[Device], ranks: Sequence[RankTransports]) -> Check:
    """Return the check of the interfaces between CPU workers.

    It warns where workers of several hosts use one that leads to no other host.
    """
    is_one_host = len({(device.host, device.address) for device in devices}) == 1
    found = sorted({f"{name} ({address})" for rank in ranks for name, address, _ in rank.peers})
    outward = (name for rank in ranks for name, here, there in rank.peers if here != there)
    inner = sorted(set(filter(_INNER.match, outward)))
    advice = (
        f"{some(inner)} leads to no other host: set GLOO_SOCKET_IFNAME to the interface of the "
        "cluster's network (ip -br address)"
    )
    return judge(
        "transport",
        f"gloo over TCP on {some(found)}",
        advice if inner and not is_one_host else "",
        interfaces=found,
    )
