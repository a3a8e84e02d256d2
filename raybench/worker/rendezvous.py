"""Where the ranks of a group find each other: one TCP store for the whole run.

It lives in a process of its own, so it outlives any rank, and the system picks its port, so
nothing races for one.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raybench.records import Group
from raybench.worker.process_group import BROKEN, abort_key

_SIOCGIFADDR = 0x8915


class StoreHost:
    """Holds the store; the port is free as long as this process lives."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._store = serve_store(address)

    def endpoint(self) -> tuple[str, int]:
        """Address and port that a rank connects to."""
        return self._address, self._store.port

    def tell_abort(self, group: Group) -> None:
        """Let its members end this group on their own: one of them has failed."""
        self._store.set(abort_key(group), BROKEN)


def serve_store(address: str) -> TCPStore:
    """Return a store served on this address alone, on a port that the system picks.

    It is served as long as the object lives.
    """
    # A listener of our own: TCPStore's would be open on every network of this host.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=2048)
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def choose_interface(address: str) -> None:
    """Let gloo use the network interface that has `address`, unless the user chose one.

    gloo takes the address that this host's own name resolves to. That is a loopback address on
    many hosts (Debian and Ubuntu write 127.0.1.1 into /etc/hosts), so that no other host can
    connect, and on hosts with several networks it may be one that the others do not reach. They
    all reach the address by which Ray knows this node.

    NCCL does not go by the name, and leaves loopback out by itself. Which interfaces it takes is
    a part of what is measured (without InfiniBand it uses several at once), and torchrun leaves
    it alone too: where its choice is wrong, the user sets NCCL_SOCKET_IFNAME.
    """
    if not os.environ.get("GLOO_SOCKET_IFNAME") and (name := _interface_of(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _interface_of(address: str) -> str | None:
    """Find the interface whose first IPv4 address this is; None for IPv6 and behind a NAT."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, request)
            except OSError:
                # This interface has no IPv4 address.
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
