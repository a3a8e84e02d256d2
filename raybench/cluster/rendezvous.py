"""Where the ranks of a group find each other: one TCP store for the whole run.

It lives in a process of its own, so it outlives any rank, and the system picks its port, so
nothing races for one.
"""

from __future__ import annotations

from torch.distributed import TCPStore  # type: ignore[attr-defined]


class StoreHost:
    """Holds the store; the port is free as long as this process lives."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)

    def endpoint(self) -> tuple[str, int]:
        """Address and port that a rank connects to."""
        return self._address, self._store.port
