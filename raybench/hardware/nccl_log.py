"""NCCL's own log lines parsed: the routes between ranks, and the algorithms it chose. Pure.

The lines are those of the subsystems INIT, NET, P2P, SHM and TUNING, as NCCL 2.18 to 2.30 write
them. A plug-in is a network by its own name: that for EFA calls itself AWS Libfabric, later
Libfabric.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_ROUTE = re.compile(
    r"(?P<sender>\d+)\[[^\]]*\] -> (?P<receiver>\d+)\[[^\]]*\](?: \[(?:send|receive)\])? via "
    r"(?P<way>\S.*?)\s*$"
)
_NETWORK = re.compile(r"NET/(?P<name>[^/]+)/(?P<device>\d+)(?:\((?P<proxy>\d+)\))?(?P<rest>.*)")
# `[0]eth0:10.0.0.1<0>` of sockets, `[1]mlx5_1:1/RoCE` of adapters.
_INTERFACE = re.compile(r"\[(\d+)\]([^\s:]+):(\S+?)<")
_ADAPTER = re.compile(r"\[\d+\]([^\s:]+):\d+/(\w+)")
# `AllReduce: 67108864 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..23}`, by rank 0.
_CHOICE = re.compile(
    r"NCCL INFO (?P<operation>\w+): (?P<size>\d+) Bytes -> Algo (?P<algorithm>\w+) "
    r"proto (?P<protocol>\w+) channel\{Lo\.\.Hi\}=\{(?P<low>\d+)\.\.(?P<high>\d+)\}"
)
_NVLS = re.compile(r"NVLS multicast support is (not )?available")
_NVLS_CHANNELS = re.compile(r"(\d+) nvls channels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way from one rank to another. kind: P2P, SHM, NET or another word of NCCL.

    detail: such as CUMEM or IPC of P2P. network: Socket, IB or the name of a plug-in; device: the
    number of its device. gpu_direct: the adapter reads and writes the GPU's memory itself.
    """

    sender: int
    receiver: int
    kind: str
    detail: str = ""
    network: str = ""
    device: int | None = None
    gpu_direct: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLog:
    """What the log of one rank says.

    interfaces: name and address of those for sockets, by number. adapters: name of each InfiniBand
    adapter, and IB or RoCE. has_nvls: the switch reduces; None: unknown.
    """

    routes: tuple[Route, ...] = ()
    interfaces: tuple[tuple[str, str], ...] = ()
    adapters: tuple[tuple[str, str], ...] = ()
    has_nvls: bool | None = None


def parse(lines: Iterable[str]) -> NcclLog:
    """Parse the lines of one rank; lines that say nothing of transports are ignored."""
    kept = [line for line in lines if "NCCL" in line]
    routes = (_route(found) for found in map(_ROUTE.search, kept) if found)
    return NcclLog(
        routes=tuple(dict.fromkeys(routes)),
        interfaces=_listed("NET/Socket : Using", _INTERFACE, kept),
        adapters=_listed("NET/IB : Using", _ADAPTER, kept),
        has_nvls=_has_nvls("\n".join(kept)),
    )


def choices(lines: Iterable[str]) -> Iterator[str]:
    """Yield what NCCL ran for each collective, as `AllReduce 4096 B: RING LL, 2 channels`."""
    for found in filter(None, map(_CHOICE.search, lines)):
        channels = int(found["high"]) - int(found["low"]) + 1
        yield (
            f"{found['operation']} {found['size']} B: {found['algorithm']} {found['protocol']}, "
            f"{channels} channel{'s' * (channels > 1)}"
        )


def describe(route: Route, log: NcclLog) -> str:
    """Return a route in words: `P2P/CUMEM`, `NET/IB mlx5_0 (RoCE), GPUDirect`."""
    if route.kind != "NET":
        return "/".join(filter(None, (route.kind, route.detail)))
    direct = ", GPUDirect" if route.gpu_direct else ""
    return f"NET/{route.network}{_device(route, log)}{direct}"


def _device(route: Route, log: NcclLog) -> str:
    """Return the interface or the adapter of a route in words; "" where it is unknown."""
    if (place := route_interface(route, log)) is not None:
        return f" on {place[0]} ({place[1]})"
    if route.network == "IB" and route.device is not None and route.device < len(log.adapters):
        name, kind = log.adapters[route.device]
        return f" on {name} ({kind})"
    return "" if route.device is None else f" on device {route.device}"


def route_interface(route: Route, log: NcclLog) -> tuple[str, str] | None:
    """Return name and address of the interface of a route by sockets; None for any other route."""
    if route.network != "Socket" or route.device is None or route.device >= len(log.interfaces):
        return None
    return log.interfaces[route.device]


def _route(found: re.Match[str]) -> Route:
    sender, receiver, way = int(found["sender"]), int(found["receiver"]), found["way"]
    if network := _NETWORK.fullmatch(way):
        return Route(
            sender=sender,
            receiver=receiver,
            kind="NET",
            network=network["name"],
            device=int(network["device"]),
            gpu_direct="GDRDMA" in network["rest"],
        )
    kind, _, detail = way.partition("/")
    return Route(sender=sender, receiver=receiver, kind=kind, detail=detail.partition("/")[0])


def _listed(lead: str, each: re.Pattern[str], lines: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the devices in the first line that contains `lead`, in their order."""
    line = next((line for line in lines if lead in line), "")
    return tuple((found[-2], found[-1]) for found in each.findall(line))


def _has_nvls(text: str) -> bool | None:
    """Return whether NVLS is used: supported by the devices, and given channels. None: unknown."""
    supported, channels = _NVLS.search(text), _NVLS_CHANNELS.search(text)
    if supported is None and channels is None:
        return None
    is_refused = supported is not None and supported[1] is not None
    return not is_refused and (channels is None or int(channels[1]) > 0)
