"""NCCL's own log lines parsed: the routes between ranks, and the algorithms it chose. Pure.

The lines are those of the subsystems INIT, NET, P2P, SHM and TUNING, as NCCL 2.18 to 2.30 write
them, TUNING as from 2.24 on. A plug-in is a network by its own name: that for EFA calls itself AWS
Libfabric, later Libfabric.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_ROUTE = re.compile(
    r"(?P<sender>\d+)\[[^\]]*\] -> (?P<receiver>\d+)\[[^\]]*\](?: \[(?:send|receive)\])? via "
    r"(?P<way>\S.*?)\s*$"
)
_NETWORK = re.compile(r"NET/(?P<name>[^/]+)/(?P<device>\d+)(?:\((?P<proxy>\d+)\))?(?P<rest>.*)")
# `[0]eth0:10.0.0.1<0>` of sockets.
_INTERFACE = re.compile(r"\[\d+\]([^\s:]+):(\S+?)<")
# `[1]mlx5_1:1/RoCE` of an adapter, since 2.30 with rail and plane after the port, and of several
# that are one device for NCCL 2.20 to 2.22 `[0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE}`.
_IB_DEVICE = re.compile(r"\[\d+\](?:=\{.*?\}|\S+)")
_ADAPTER = re.compile(r"([^\s:\]]+):\d+[:\d]*/(\w+)")
# `AllReduce: 67108864 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..23}`, by rank 0.
_CHOICE = re.compile(
    r"NCCL INFO (?P<operation>\w+): (?P<size>\d+) Bytes -> Algo (?P<algorithm>\w+) "
    r"proto (?P<protocol>\w+) channel\{Lo\.\.Hi\}=\{(?P<low>\d+)\.\.(?P<high>\d+)\}"
)
_NVLS = re.compile(r"NVLS multicast support is (not )?available")
_NVLS_CHANNELS = re.compile(r"(\d+) nvls channels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way from one rank to another, by their numbers in the communicator.

    kind: P2P, SHM, NET or another word of NCCL. detail: such as CUMEM or IPC of P2P. network:
    Socket, IB or the name of a plug-in; empty unless the kind is NET. interface: name of the
    interface of sockets; empty where it is not known. place: the interface or the adapter in words,
    as `mlx5_0 (RoCE)`, or `device 1` where its name is not known; empty unless the kind is NET.
    gpu_direct: the adapter reads and writes the GPU's memory itself.
    """

    sender: int
    receiver: int
    kind: str
    detail: str = ""
    network: str = ""
    interface: str = ""
    place: str = ""
    gpu_direct: bool = False

    @property
    def words(self) -> str:
        """Return the route in words: `P2P/CUMEM`, or `NET/IB on mlx5_0 (RoCE), GPUDirect`."""
        if self.kind != "NET":
            return "/".join(filter(None, (self.kind, self.detail)))
        place = f" on {self.place}" if self.place else ""
        return f"NET/{self.network}{place}{', GPUDirect' if self.gpu_direct else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLog:
    """What the NCCL log of one rank says about transports.

    routes: without repeats. adapter_count: InfiniBand and RoCE adapters that NCCL uses; 0 where it
    tells of none. has_nvls: NCCL can reduce in the NVLink switch (NVLS); None: unknown.
    """

    routes: tuple[Route, ...] = ()
    adapter_count: int = 0
    has_nvls: bool | None = None


def parse(lines: Iterable[str]) -> NcclLog:
    """Return the transports that the lines of one rank tell of; other lines are ignored."""
    kept = [line for line in lines if "NCCL" in line]
    text = "\n".join(kept)
    # Supported by the devices, and given channels.
    supported, channels = _NVLS.search(text), _NVLS_CHANNELS.search(text)
    nvls = [supported[1] is None] if supported else []
    nvls += [int(channels[1]) > 0] if channels else []
    used = {"Socket": "", "IB": ""}
    for name in used:
        told = (line.partition(f"NET/{name} : Using")[2] for line in kept)
        used[name] = next(filter(None, told), "")
    adapters = [_ADAPTER.findall(device) for device in _IB_DEVICE.findall(used["IB"])]
    merged = [("+".join(name for name, _ in ports), ports[0][1]) for ports in adapters if ports]
    networks = {"Socket": _INTERFACE.findall(used["Socket"]), "IB": merged}
    routes = [_route(found, networks) for found in map(_ROUTE.search, kept) if found]
    return NcclLog(
        routes=tuple(dict.fromkeys(routes)),
        adapter_count=sum(map(len, adapters)),
        has_nvls=all(nvls) if nvls else None,
    )


def choices(lines: Iterable[str]) -> Iterator[str]:
    """Yield what NCCL ran, as `Reduce 4 B: RING LL, 1 channel`, for each line that tells it.

    In their order, repeats too. NCCL writes such lines on rank 0 of a group only.
    """
    for found in filter(None, map(_CHOICE.search, lines)):
        channels = int(found["high"]) - int(found["low"]) + 1
        yield (
            f"{found['operation']} {found['size']} B: {found['algorithm']} {found['protocol']}, "
            f"{channels} channel{'s' * (channels > 1)}"
        )


def _route(found: re.Match[str], networks: Mapping[str, Sequence[tuple[str, str]]]) -> Route:
    """Return the route of one line. found: a match of `_ROUTE`.

    networks: by name of the network its devices in the order of their numbers, each as its name,
    and its address or kind.
    """
    sender, receiver, way = int(found["sender"]), int(found["receiver"]), found["way"]
    network = _NETWORK.fullmatch(way)
    if network is None:
        kind, _, detail = way.partition("/")
        return Route(sender=sender, receiver=receiver, kind=kind, detail=detail.partition("/")[0])
    name, number = network["name"], int(network["device"])
    devices = networks.get(name, ())
    device, more = devices[number] if number < len(devices) else ("", "")
    return Route(
        sender=sender,
        receiver=receiver,
        kind="NET",
        network=name,
        interface=device if name == "Socket" else "",
        place=f"{device} ({more})" if device else f"device {number}",
        gpu_direct="GDRDMA" in network["rest"],
    )
