"""What NCCL's own log lines say of the way that bytes go between ranks. Pure: text in, values out.

The lines are those of the subsystems INIT, NET, P2P and SHM, as NCCL 2.18 to 2.30 write them. A
plug-in is a network by its own name: that for EFA calls itself AWS Libfabric, later Libfabric.
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
_NVLS = re.compile(r"NVLS multicast support is (not )?available")
_NVLS_CHANNELS = re.compile(r"(\d+) nvls channels")
_VERSION = re.compile(r"NCCL version ([\w.+-]+)")
_GPU_DIRECT = re.compile(r"GPU Direct RDMA (Enabled|Disabled) for HCA")
_WARNING = re.compile(r"NCCL WARN (.+)")
_OFI = ("libfabric", "ofi")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way from one rank to another. kind: P2P, SHM, NET or another word of NCCL.

    detail: how, as in CUMEM or IPC of P2P. network: Socket, IB or that of a plug-in; device: which
    of its devices. gpu_direct: the adapter reads and writes the GPU's memory itself.
    """

    sender: int
    receiver: int
    kind: str
    detail: str = ""
    network: str = ""
    device: int | None = None
    gpu_direct: bool = False

    @property
    def is_ofi(self) -> bool:
        """Whether it goes by libfabric, as with EFA."""
        return any(word in self.network.lower() for word in _OFI)


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLog:
    """What the log of one rank says.

    interfaces: of sockets, by number, with the address. adapters: of InfiniBand, each with IB or
    RoCE. gpu_direct: None where nothing is said of it. has_nvls: the switch reduces; None: unknown.
    """

    version: str = ""
    routes: tuple[Route, ...] = ()
    interfaces: tuple[tuple[str, str], ...] = ()
    adapters: tuple[tuple[str, str], ...] = ()
    gpu_direct: bool | None = None
    has_nvls: bool | None = None
    warnings: tuple[str, ...] = ()


def parse(lines: Iterable[str]) -> NcclLog:
    """Read the lines of one rank; those that say nothing of transports are left out."""
    kept = [line for line in lines if "NCCL" in line]
    text = "\n".join(kept)
    version, gpu_direct = _VERSION.search(text), _GPU_DIRECT.findall(text)
    return NcclLog(
        version=version[1] if version else "",
        routes=tuple(dict.fromkeys(_routes(kept))),
        interfaces=_listed("NET/Socket : Using", _INTERFACE, kept),
        adapters=_listed("NET/IB : Using", _ADAPTER, kept),
        gpu_direct="Enabled" in gpu_direct if gpu_direct else None,
        has_nvls=_has_nvls(text),
        warnings=tuple(dict.fromkeys(found[1] for found in map(_WARNING.search, kept) if found)),
    )


def _routes(lines: Iterable[str]) -> Iterator[Route]:
    for line in lines:
        if found := _ROUTE.search(line):
            yield _route(int(found["sender"]), int(found["receiver"]), found["way"])


def _route(sender: int, receiver: int, way: str) -> Route:
    if found := _NETWORK.fullmatch(way):
        return Route(
            sender=sender,
            receiver=receiver,
            kind="NET",
            network=found["name"],
            device=int(found["device"]),
            gpu_direct="GDRDMA" in found["rest"],
        )
    kind, _, detail = way.partition("/")
    return Route(sender=sender, receiver=receiver, kind=kind, detail=detail.partition("/")[0])


def _listed(lead: str, each: re.Pattern[str], lines: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Find the devices that a line lists, in their order."""
    line = next((line for line in lines if lead in line), "")
    return tuple((found[-2], found[-1]) for found in each.findall(line))


def _has_nvls(text: str) -> bool | None:
    """Whether it is used: supported by the devices, and given channels."""
    supported, channels = _NVLS.search(text), _NVLS_CHANNELS.search(text)
    if supported is None and channels is None:
        return None
    is_refused = supported is not None and supported[1] is not None
    return not is_refused and (channels is None or int(channels[1]) > 0)
