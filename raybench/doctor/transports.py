"""Checks of the way of bytes between devices and between nodes, by what NCCL or gloo prints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from raybench.doctor.checks import Check, Facts, Verdict, active_nvlinks
from raybench.hardware.nccl_log import NcclLog, Route, parse
from raybench.job.model import Measure, Span
from raybench.job.point import Point, Precision
from raybench.records import Answer, Device, Failure, Measurement, Task
from raybench.report.formatting import some
from raybench.report.plain_text import counted

_WORKLOAD = "raybench.workloads.pairs:TransportProbe"
_SETTINGS = Measure(
    warmup=Span(min=1, max=1),
    iterations=Span(min=1, max=1),
    max_seconds=1.0,
    timeout_s=120.0,
    breakdown=False,
)
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
class RankTransports:
    """What one rank printed.

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


def probe_task(world_size: int) -> Task:
    """Return the task by which every rank prints the way of its bytes, for `judge`."""
    point = Point(
        workload=_WORKLOAD,
        params={},
        world_size=world_size,
        precision=Precision.FP32,
        batch_size=None,
        global_batch_size=None,
        scaling=None,
    )
    return Task(point=point, settings=_SETTINGS, precisions=None)


def judge(facts: Facts, answers: Sequence[Answer]) -> list[Check]:
    """Return the check of routes within nodes, then that between nodes, where there are any.

    answers: to `probe_task`, by rank. One check "unknown" where a rank failed or none printed its
    routes; one check on CPU workers, of gloo's interfaces.
    """
    if failure := next((one for one in answers if isinstance(one, Failure)), None):
        return [_unknown(f"rank {failure.rank}: {failure.message}")]
    ranks = [read_rank(one.output) for one in answers if isinstance(one, Measurement)]
    if not any(rank.log.routes or rank.peers for rank in ranks):
        return [_unknown("the ranks printed nothing of it")]
    if not facts.is_cuda:
        return [_gloo(facts.devices, ranks)]
    within: list[_RankRoute] = []
    between: list[_RankRoute] = []
    for rank, told in enumerate(ranks):
        for route in told.log.routes:
            ends = (facts.devices[end].node_id for end in (route.sender, route.receiver))
            (within if len(set(ends)) == 1 else between).append((rank, route))
    checks = [_within(facts.devices, ranks, within)] if within else []
    return [*checks, _between(ranks, between)] if between else checks


def read_rank(output: str) -> RankTransports:
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


def _unknown(why: str) -> Check:
    """Return the warning that the transport is not known."""
    return Check(
        name="transport",
        verdict=Verdict.WARN,
        found=f"unknown: {why}",
        advice="run one collective with NCCL_DEBUG=INFO and look for `via` in what it prints",
    )


def _within(
    devices: Sequence[Device], ranks: Sequence[RankTransports], routes: Sequence[_RankRoute]
) -> Check:
    """Return the check of the routes within nodes; it warns unless all are peer to peer."""
    is_direct = {route.kind for _, route in routes} == {"P2P"}
    medium = ", NVLink" if is_direct and all(map(active_nvlinks, devices)) else ""
    nvls = {rank.log.has_nvls for rank in ranks} - {None}
    switch = f"; NVLS {'on' if True in nvls else 'off'}" if nvls else ""
    advice = "" if is_direct else _NO_PEERS
    return _check("transport, node", routes, f"{medium}{switch}", advice)


def _between(ranks: Sequence[RankTransports], routes: Sequence[_RankRoute]) -> Check:
    """Return the check of the routes between nodes; it warns where there are hints."""
    networks = {route.network for _, route in routes} - {""}
    counts = sorted({rank.log.adapter_count for rank in ranks} - {0})
    more = ""
    if counts and "IB" in networks:
        least, most = counts[0], counts[-1]
        count = f"{least} to {most} adapters" if least != most else counted(least, "adapter")
        more = f"; {count} a rank"
    return _check("transport, network", routes, more, "; ".join(_hints(ranks, routes, networks)))


def _hints(
    ranks: Sequence[RankTransports], routes: Sequence[_RankRoute], networks: Set[str]
) -> Iterator[str]:
    """Yield what to do about the routes between nodes; nothing where they are as they should be.

    networks: those of the routes, in NCCL's words.
    """
    adapters = sorted({name for rank in ranks for name in rank.adapters})
    if "Socket" in networks and adapters:
        yield f"TCP although {some(adapters)} is there: {_NO_ADAPTER}"
    inner = sorted({route.interface for _, route in routes if _INNER.match(route.interface)})
    if inner:
        yield (
            f"{some(inner)} leads to no other host, or by a detour: set NCCL_SOCKET_IFNAME to the "
            "interface of the cluster's network (ip -br address)"
        )
    by_adapter = [route for _, route in routes if route.network not in ("", "Socket")]
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
    if any(route.kind != "NET" for _, route in routes):
        yield "nodes of Ray are on one host here: this is no network between hosts"


def _check(name: str, routes: Sequence[_RankRoute], more: str, advice: str) -> Check:
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
    return Check(
        name=name,
        verdict=Verdict.WARN if advice else Verdict.OK,
        found=f"{some(ways)}{more}",
        advice=advice,
        details={"ranks_by_way": ranks_by_way},
    )


def _gloo(devices: Sequence[Device], ranks: Sequence[RankTransports]) -> Check:
    """Return the check of the interfaces between CPU workers.

    It warns where workers of several hosts use one that leads to no other host.
    """
    is_one_host = len({(device.host, device.address) for device in devices}) == 1
    found = sorted({f"{name} ({address})" for rank in ranks for name, address, _ in rank.peers})
    outward = (name for rank in ranks for name, here, there in rank.peers if here != there)
    inner = set(filter(_INNER.match, outward))
    advice = ""
    if inner and not is_one_host:
        advice = (
            f"{some(sorted(inner))} leads to no other host: set GLOO_SOCKET_IFNAME to the "
            "interface of the cluster's network (ip -br address)"
        )
    return Check(
        name="transport",
        verdict=Verdict.WARN if advice else Verdict.OK,
        found=f"gloo over TCP on {some(found)}",
        advice=advice,
        details={"interfaces": found},
    )
