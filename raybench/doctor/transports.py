"""Checks of the way of bytes between devices and between nodes, by what NCCL or gloo prints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from raybench.doctor.facts import Check, Facts, Verdict, count_noun, join_names
from raybench.doctor.gpu_checks import nvlinks
from raybench.hardware.nccl_log import NcclLog, Route, describe, parse, route_interface
from raybench.job.model import Measure, Span
from raybench.job.point import Point, Precision
from raybench.records import Answer, Device, Failure, Measurement, Task

_WORKLOAD = "raybench.workloads.transport_probe:TransportProbe"
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
_UNLIMITED = "unlimited"
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

    adapters: the RDMA adapters of its host. memlock: bytes that may be locked, or `unlimited`.
    peers: gloo's connections as (interface, own address, address of the other).
    """

    log: NcclLog
    adapters: tuple[str, ...] = ()
    memlock: str = ""
    peers: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """The routes of all ranks within nodes, or between nodes.

    ways: the ranks that use each way, by its words. interfaces: those that sockets use.
    """

    ways: Mapping[str, Sequence[int]] = field(default_factory=dict)
    routes: Sequence[Route] = ()
    interfaces: Sequence[str] = ()

    @property
    def kinds(self) -> set[str]:
        """Return the kinds of the routes in NCCL's words."""
        return {route.kind for route in self.routes}

    @property
    def networks(self) -> set[str]:
        """Return the networks of the routes in NCCL's words; empty where none is over a network."""
        return {route.network for route in self.routes if route.network}


def probe_task(world_size: int) -> Task:
    """Return the task of all workers."""
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
    """Return the checks of the workers' answers, those between nodes last.

    One check "unknown" where a rank failed or none printed its routes.
    """
    if failure := next((one for one in answers if isinstance(one, Failure)), None):
        return [_unknown(f"rank {failure.rank}: {failure.message}")]
    ranks = [read_rank(one.output) for one in answers if isinstance(one, Measurement)]
    if not any(rank.log.routes or rank.peers for rank in ranks):
        return [_unknown("the ranks printed nothing of it")]
    if not facts.is_cuda:
        return [_gloo(facts.devices, ranks)]
    within, between = (_see(facts.devices, ranks, is_within=one) for one in (True, False))
    checks = [_within(facts.devices, ranks, within)] if within.routes else []
    if between.routes:
        found = f"{_list(between)}{_adapter_count(ranks, between)}"
        advice = "; ".join(_hints(ranks, between))
        checks.append(_check("transport, network", found, advice, between))
    return checks


def read_rank(output: str) -> RankTransports:
    """Parse what a rank printed: the lines of `TransportProbe`, and NCCL's log."""
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
    return Check(
        name="transport",
        verdict=Verdict.WARN,
        found=f"unknown: {why}",
        advice="run one collective with NCCL_DEBUG=INFO and look for `via` in what it prints",
    )


def _see(devices: Sequence[Device], ranks: Sequence[RankTransports], *, is_within: bool) -> _Seen:
    """Return the routes within nodes, or those between nodes, of all ranks."""
    ways: dict[str, list[int]] = {}
    routes: list[Route] = []
    interfaces: dict[str, None] = {}
    for rank, told in enumerate(ranks):
        for route in told.log.routes:
            nodes = {devices[end].node_id for end in (route.sender, route.receiver)}
            if (len(nodes) == 1) != is_within:
                continue
            routes.append(route)
            owners = ways.setdefault(describe(route, told.log), [])
            owners += [rank] if rank not in owners else []
            if (place := route_interface(route, told.log)) is not None:
                interfaces[place[0]] = None
    return _Seen(ways=ways, routes=routes, interfaces=tuple(interfaces))


def _within(devices: Sequence[Device], ranks: Sequence[RankTransports], seen: _Seen) -> Check:
    is_direct = seen.kinds == {"P2P"}
    medium = ", NVLink" if is_direct and all(map(nvlinks, devices)) else ""
    nvls = {rank.log.has_nvls for rank in ranks} - {None}
    switch = f"; NVLS {'on' if True in nvls else 'off'}" if nvls else ""
    advice = "" if is_direct else _NO_PEERS
    return _check("transport, node", f"{_list(seen)}{medium}{switch}", advice, seen)


def _hints(ranks: Sequence[RankTransports], seen: _Seen) -> Iterator[str]:
    """Yield what to do about the way between nodes; nothing where it is as it should be."""
    adapters = sorted({name for rank in ranks for name in rank.adapters})
    if "Socket" in seen.networks and adapters:
        yield f"TCP although {join_names(adapters)} is there: {_NO_ADAPTER}"
    inner = sorted(name for name in seen.interfaces if _INNER.match(name))
    if inner:
        yield (
            f"{join_names(inner)} leads to no other host, or by a detour: set NCCL_SOCKET_IFNAME "
            "to the interface of the cluster's network (ip -br address)"
        )
    if seen.networks - {"Socket"}:
        yield from _rdma_hints(ranks, seen)
    if seen.kinds - {"NET"}:
        yield "nodes of Ray are on one host here: this is no network between hosts"


def _rdma_hints(ranks: Sequence[RankTransports], seen: _Seen) -> Iterator[str]:
    if not all(route.gpu_direct for route in seen.routes if route.network not in ("", "Socket")):
        yield (
            "GPUDirect RDMA is off, so data goes through the host's memory: load nvidia-peermem, "
            "or use a kernel and driver with DMA-BUF; look at NCCL_NET_GDR_LEVEL"
        )
    limits = sorted({rank.memlock for rank in ranks} - {"", _UNLIMITED})
    if limits:
        yield (
            f"memory that may be locked is limited to {join_names(limits)} bytes, and RDMA needs "
            "more: start with --ulimit memlock=-1, or raise it for slurmd or kubelet"
        )


def _adapter_count(ranks: Sequence[RankTransports], seen: _Seen) -> str:
    counts = sorted({len(rank.log.adapters) for rank in ranks if rank.log.adapters})
    if not counts or "IB" not in seen.networks:
        return ""
    least, most = counts[0], counts[-1]
    count = f"{least} to {most} adapters" if least != most else count_noun(least, "adapter")
    return f"; {count} a rank"


def _list(seen: _Seen) -> str:
    ways = [
        f"{way} of {count_noun(len(owners), 'rank')}" if len(seen.ways) > 1 else way
        for way, owners in sorted(seen.ways.items())
    ]
    return join_names(ways)


def _check(name: str, found: str, advice: str, seen: _Seen) -> Check:
    return Check(
        name=name,
        verdict=Verdict.WARN if advice else Verdict.OK,
        found=found,
        advice=advice,
        details={"ranks_by_way": {way: list(owners) for way, owners in seen.ways.items()}},
    )


def _gloo(devices: Sequence[Device], ranks: Sequence[RankTransports]) -> Check:
    """Return the check of the interfaces that connect CPU workers."""
    is_one_host = len({(device.host, device.address) for device in devices}) == 1
    found = sorted({f"{name} ({address})" for rank in ranks for name, address, _ in rank.peers})
    outward = (name for rank in ranks for name, here, there in rank.peers if here != there)
    inner = set(filter(_INNER.match, outward))
    advice = ""
    if inner and not is_one_host:
        advice = (
            f"{join_names(sorted(inner))} leads to no other host: set GLOO_SOCKET_IFNAME to the "
            "interface of the cluster's network (ip -br address)"
        )
    return Check(
        name="transport",
        verdict=Verdict.WARN if advice else Verdict.OK,
        found=f"gloo over TCP on {join_names(found)}",
        advice=advice,
        details={"interfaces": found},
    )
