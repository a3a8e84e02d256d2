"""How data travels, and how fast, by the first all_reduce and the transport probe. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from raybench.conversion import NS_PER_S
from raybench.hardware.hosts import is_inner
from raybench.hardware.nccl_log import NcclLog, Route, parse
from raybench.health.environment_facts import (
    EnvironmentFacts,
    Fault,
    environment_test,
    fault,
    judge_fact,
)
from raybench.health.suite import CONNECT_TEST, NETWORK_TEST, TRANSPORT_TEST
from raybench.health.verdicts import Judgement
from raybench.records.conditions import Condition, FactValue
from raybench.records.devices import Subject, Verdict
from raybench.records.judgement import (
    Command,
    CommandKind,
    Problem,
    ProblemKind,
    Reason,
    ReasonKind,
)
from raybench.records.record import Record
from raybench.records.status import Status
from raybench.workloads.pairs import GlooPeer, read_gloo_peers

_SLOW_START_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankRoute:
    """A route, and the rank that reported it."""

    rank: int
    route: Route


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankTransports:
    """The transports that a rank reported."""

    log: NcclLog
    peers: tuple[GlooPeer, ...]


def judge_first_collective(facts: EnvironmentFacts, record: Record) -> Iterator[Judgement]:
    """Yield whether the devices can communicate, how long they took to connect, and how fast.

    Args:
        record: of the first all_reduce of the workers.
    """
    test = environment_test(CONNECT_TEST, "s")
    hosts = facts.host_names
    if record.status is not Status.OK:
        rank = record.error_rank
        problem = Problem(
            kind=ProblemKind.NO_COLLECTIVE,
            names=() if rank is None else (facts.subjects[rank].name,),
            status=record.status,
            detail=record.error_message or "",
        )
        reason = Reason(kind=ReasonKind.PROBLEMS, problems=(problem,))
        kind = CommandKind.CHECK_LOUDLY if len(hosts) == 1 else CommandKind.SHOW_NETWORK
        command = Command(kind=kind, hosts=hosts)
        defect = Fault(reason=reason, command=command, verdict=Verdict.BAD)
        yield judge_fact(test, facts.cluster, None, defect)
        return
    measured = record.measurements
    # Set-up and first step of the slowest rank: the first all_reduce opens the connections.
    first_s = max(
        (of_rank.setup_s or 0.0) + sum(of_rank.repetitions[0].warmup.step_ns[:1]) / NS_PER_S
        for of_rank in measured
    )
    slow = fault(
        Condition.SLOW_CONNECTION, _choose_interface(facts), value=first_s, limit=_SLOW_START_S
    )
    yield judge_fact(test, facts.cluster, first_s, slow if first_s > _SLOW_START_S else None)
    step_ns = max(statistics.median(of_rank.step_ns) for of_rank in measured)
    bytes_on_bus = (measured[0].message_bytes or 0) * (measured[0].busbw_factor or 0.0)
    yield judge_fact(environment_test("all_reduce", "GB/s"), facts.cluster, bytes_on_bus / step_ns)


def _choose_interface(facts: EnvironmentFacts) -> Command:
    variable = "NCCL_SOCKET_IFNAME" if facts.is_cuda else "GLOO_SOCKET_IFNAME"
    kind = CommandKind.CHOOSE_INTERFACE
    return Command(kind=kind, names=(variable,), hosts=facts.host_names)


def judge_transports(facts: EnvironmentFacts, record: Record) -> Iterator[Judgement]:
    """Yield how data travels within each node, and between nodes.

    Args:
        record: of the transport probe on all devices.
    """
    ranks = [_read_rank(measured.output) for measured in record.measurements]
    test = environment_test(TRANSPORT_TEST)
    if not any(rank.log.routes or rank.peers for rank in ranks):
        messages = [record.error_message] if record.error_message else []
        command = Command(kind=CommandKind.CHECK_LOUDLY)
        defect = fault(Condition.NO_ROUTES, command, names=messages)
        yield judge_fact(test, facts.cluster, None, defect)
        return
    if not facts.is_cuda:
        yield _gloo(facts, ranks)
        return
    within: dict[str, list[_RankRoute]] = {}
    between: list[_RankRoute] = []
    for rank, transports in enumerate(ranks):
        for route in transports.log.routes:
            start = facts.devices[route.sender].node_id
            end = facts.devices[route.receiver].node_id
            routes = within.setdefault(start, []) if start == end else between
            routes.append(_RankRoute(rank=rank, route=route))
    for node_id, routes in within.items():
        yield _within_node(facts, facts.node(node_id), routes)
    nvls = {rank.log.has_nvls for rank in ranks} - {None}
    if within and nvls:
        yield judge_fact(environment_test("NVLS"), facts.cluster, float(True in nvls))
    if between:
        yield from _between_nodes(facts, between)


def _read_rank(output: str) -> _RankTransports:
    """Return what `TransportProbe` printed on one rank."""
    return _RankTransports(log=parse(output.splitlines()), peers=read_gloo_peers(output))


def _within_node(
    facts: EnvironmentFacts, node: Subject, rank_routes: Sequence[_RankRoute]
) -> Judgement:
    """Return the judgement of the transports on a node: GPUs should read each other's memory."""
    transports = _transports(facts, rank_routes)
    is_direct = {rank_route.route.kind for rank_route in rank_routes} == {"P2P"}
    command = Command(kind=CommandKind.SHOW_PEERS, hosts=(node.name,))
    names = [transport.name for transport in transports]
    defect = fault(Condition.NO_PEER_ACCESS, command, names=names)
    test = environment_test(TRANSPORT_TEST, "transports")
    return judge_fact(test, node, len(transports), None if is_direct else defect, transports)


def _between_nodes(
    facts: EnvironmentFacts, rank_routes: Sequence[_RankRoute]
) -> Iterator[Judgement]:
    """Yield judgements of the transports between nodes, their interfaces, and GPUDirect RDMA."""
    cluster, hosts = facts.cluster, facts.host_names
    routes = [rank_route.route for rank_route in rank_routes]
    transports = _transports(facts, rank_routes)
    adapters = sorted({name for host in facts.hosts.values() for name in host.rdma_adapters})
    defect = None
    if adapters and any(route.network == "Socket" for route in routes):
        command = Command(kind=CommandKind.SHOW_RDMA, hosts=hosts)
        defect = fault(Condition.UNUSED_ADAPTERS, command, names=adapters)
    # NCCL uses the network between two hosts, so other routes show nodes of Ray on one host.
    elif any(route.kind != "NET" for route in routes):
        defect = fault(Condition.ONE_HOST, Command(kind=CommandKind.SHOW_RAY))
    test = environment_test(NETWORK_TEST, "transports")
    yield judge_fact(test, cluster, len(transports), defect, transports)
    if interfaces := sorted({route.interface for route in routes if route.interface}):
        used = [FactValue(name=name) for name in interfaces]
        # Such as lo or docker0, which lead to no other host.
        inner = list(filter(is_inner, interfaces))
        yield _interfaces(facts, "interfaces in use", used, inner)
    adapter_routes = [route for route in routes if route.network not in ("", "Socket")]
    if adapter_routes:
        is_direct = all(route.gpu_direct for route in adapter_routes)
        command = Command(kind=CommandKind.LOAD_PEERMEM, hosts=hosts)
        defect = None if is_direct else fault(Condition.NO_GPU_DIRECT, command)
        yield judge_fact(environment_test("GPUDirect RDMA"), cluster, float(is_direct), defect)


def _interfaces(
    facts: EnvironmentFacts, test: str, used: Sequence[FactValue], inner: Sequence[str]
) -> Judgement:
    """Return whether the network interfaces in use lead to other hosts.

    Args:
        test: name of the test.
        used: the interfaces in use, as the report shows them.
        inner: names of interfaces in use that lead to no other host.
    """
    defect = fault(Condition.INNER_INTERFACE, _choose_interface(facts), names=inner)
    fact = environment_test(test, "interfaces")
    return judge_fact(fact, facts.cluster, len(used), defect if inner else None, used)


def _transports(facts: EnvironmentFacts, rank_routes: Sequence[_RankRoute]) -> list[FactValue]:
    """Return the transports of routes in words; several transports with the devices of each."""
    devices_by_transport: dict[str, list[str]] = {}
    for rank_route in rank_routes:
        devices = devices_by_transport.setdefault(rank_route.route.words, [])
        name = facts.subjects[rank_route.rank].name
        if name not in devices:
            devices.append(name)
    is_one = len(devices_by_transport) == 1
    return [
        FactValue(name=transport, subjects=() if is_one else tuple(devices))
        for transport, devices in sorted(devices_by_transport.items())
    ]


def _gloo(facts: EnvironmentFacts, ranks: Sequence[_RankTransports]) -> Judgement:
    """Return the judgement of the interfaces that gloo uses between CPU workers."""
    is_one_host = len({(device.host, device.address) for device in facts.devices}) == 1
    peers = list(chain.from_iterable(rank.peers for rank in ranks))
    # Peers with the same address are on the same host, where an inner interface is right.
    to_hosts = sorted({peer.interface for peer in peers if peer.address != peer.peer_address})
    inner = [] if is_one_host else list(filter(is_inner, to_hosts))
    names = sorted({peer.interface for peer in peers})
    used = [FactValue(name="gloo", value=name) for name in names]
    return _interfaces(facts, TRANSPORT_TEST, used, inner)
