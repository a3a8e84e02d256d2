"""A parser of NCCL's log: the routes between ranks, and the algorithms that NCCL chose.

It reads the lines of the subsystems INIT, NET, P2P and SHM of NCCL 2.18 to 2.30, and of TUNING from
2.24 on. A plug-in appears as a network with its own name; the plug-in for EFA is called AWS
Libfabric, in later versions Libfabric.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_ROUTE = re.compile(
    r"(?P<sender>\d+)\[[^\]]*\] -> (?P<receiver>\d+)\[[^\]]*\](?: \[(?:send|receive)\])? via "
    r"(?P<transport>\S.*?)\s*$"
)
_NETWORK = re.compile(r"NET/(?P<name>[^/]+)/(?P<device>\d+)(?:\((?P<proxy>\d+)\))?(?P<rest>.*)")
# Sockets: `[0]eth0:10.0.0.1<0>`.
_INTERFACE = re.compile(r"\[\d+\]([^\s:]+):(\S+?)<")
# An adapter: `[1]mlx5_1:1/RoCE`; NCCL 2.30 appends rail and plane to the port. NCCL 2.20 to 2.22
# write adapters that form one device as `[0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE}`.
_IB_DEVICE = re.compile(r"\[\d+\](?:=\{.*?\}|\S+)")
_ADAPTER = re.compile(r"([^\s:\]]+):\d+[:\d]*/(\w+)")
# Written by rank 0: `AllReduce: 67108864 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..23}`.
_ALGORITHM_CHOICE = re.compile(
    r"NCCL INFO (?P<operation>\w+): (?P<size>\d+) Bytes -> Algo (?P<algorithm>\w+) "
    r"proto (?P<protocol>\w+) channel\{Lo\.\.Hi\}=\{(?P<low>\d+)\.\.(?P<high>\d+)\}"
)
_NVLS = re.compile(r"NVLS multicast support is (not )?available")
_NVLS_CHANNELS = re.compile(r"(\d+) nvls channels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How NCCL sends from one rank of a communicator to another."""

    sender: int
    receiver: int
    # P2P, SHM, NET or another transport of NCCL.
    kind: str
    # Such as CUMEM or IPC for P2P.
    detail: str = ""
    # For NET: Socket, IB or the name of a plug-in.
    network: str = ""
    # For sockets, the name of the network interface; "" if unknown.
    interface: str = ""
    # For NET, the interface or adapter in words, as `mlx5_0 (RoCE)` or `device 1`.
    place: str = ""
    # Whether the adapter reads and writes the memory of the GPU itself.
    gpu_direct: bool = False

    @property
    def words(self) -> str:
        """The route in words, as `P2P/CUMEM` or `NET/IB on mlx5_0 (RoCE), GPUDirect`."""
        if self.kind != "NET":
            return "/".join(filter(None, (self.kind, self.detail)))
        place = f" on {self.place}" if self.place else ""
        return f"NET/{self.network}{place}{', GPUDirect' if self.gpu_direct else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLog:
    """What the NCCL log of one rank says about transports."""

    # Without duplicates.
    routes: tuple[Route, ...] = ()
    # Number of InfiniBand and RoCE adapters that NCCL uses.
    adapter_count: int = 0
    # Whether NCCL can reduce in the NVLink switch (NVLS); None: unknown.
    has_nvls: bool | None = None


def parse(lines: Iterable[str]) -> NcclLog:
    """Return the transports in the log of one rank; other lines are ignored."""
    nccl_lines = [line for line in lines if "NCCL" in line]

    # (name, kind) of the adapters that form each device, such as ("mlx5_0", "RoCE").
    ib_list = _device_list(nccl_lines, "IB")
    adapters = [_ADAPTER.findall(device) for device in _IB_DEVICE.findall(ib_list)]
    ib_devices = []
    for members in adapters:
        if members:
            names = "+".join(name for name, _ in members)
            _, kind = members[0]
            ib_devices.append((names, kind))
    interfaces = _INTERFACE.findall(_device_list(nccl_lines, "Socket"))
    networks = {"Socket": interfaces, "IB": ib_devices}

    matches = map(_ROUTE.search, nccl_lines)
    routes = [_route(match, networks) for match in matches if match]
    return NcclLog(
        routes=tuple(dict.fromkeys(routes)),
        adapter_count=sum(map(len, adapters)),
        has_nvls=_has_nvls("\n".join(nccl_lines)),
    )


def _device_list(lines: Iterable[str], network: str) -> str:
    """Return the text of the first line that lists the devices of a network; "" without a line."""
    for line in lines:
        _, _, devices = line.partition(f"NET/{network} : Using")
        if devices:
            return devices
    return ""


def _has_nvls(text: str) -> bool | None:
    """Return whether the devices support NVLS and NCCL gives it channels; None if unknown."""
    support, channels = _NVLS.search(text), _NVLS_CHANNELS.search(text)
    conditions = []
    if support:
        # The group is "not " if NVLS is not available.
        conditions.append(support[1] is None)
    if channels:
        conditions.append(int(channels[1]) > 0)
    return all(conditions) if conditions else None


def choices(lines: Iterable[str]) -> Iterator[str]:
    """Yield the algorithm of each collective in rank 0's log: `Reduce 4 B: RING LL, 1 channel`."""
    for line in lines:
        match = _ALGORITHM_CHOICE.search(line)
        if match is None:
            continue
        channels = int(match["high"]) - int(match["low"]) + 1
        yield (
            f"{match['operation']} {match['size']} B: {match['algorithm']} {match['protocol']}, "
            f"{channels} channel{'s' * (channels > 1)}"
        )


def _route(match: re.Match[str], networks: Mapping[str, Sequence[tuple[str, str]]]) -> Route:
    """Return the route of a match of `_ROUTE`.

    Args:
        networks: network -> (name, address or kind) of each device; the log counts devices from 0.
    """
    sender, receiver, transport = int(match["sender"]), int(match["receiver"]), match["transport"]
    network = _NETWORK.fullmatch(transport)
    if network is None:  # a transport without network, such as `P2P/CUMEM`
        kind, _, detail = transport.partition("/")
        return Route(sender=sender, receiver=receiver, kind=kind, detail=detail.partition("/")[0])
    name, number = network["name"], int(network["device"])
    devices = networks.get(name, ())
    device, address_or_kind = devices[number] if number < len(devices) else ("", "")
    return Route(
        sender=sender,
        receiver=receiver,
        kind="NET",
        network=name,
        interface=device if name == "Socket" else "",
        place=f"{device} ({address_or_kind})" if device else f"device {number}",
        gpu_direct="GDRDMA" in network["rest"],
    )
