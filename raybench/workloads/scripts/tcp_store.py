"""A TCP store that this process serves on one address."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def serve_store(address: str) -> TCPStore:
    """Serve a store at this address, on a port that the system picks, while the store lives."""
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
