"""The store in which the ranks of a group meet, as a process of its own.

So the driver loads no torch, and what torch writes of a rank that has died is nobody's business.
"""

from __future__ import annotations

import select
import subprocess
import sys
from contextlib import suppress

from raybench.errors import ClusterError
from raybench.records import Group

_RUN_STORE = "from raybench.cluster.processes.store import main; main()"
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 2.0


class StoreProcess:
    """A store at this address of this host; it loads while the workers do."""

    def __init__(self, address: str) -> None:
        self._address, self._port = address, 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", _RUN_STORE, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def has_ended(self) -> bool:
        """Whether it can serve nobody any more."""
        return self._process.poll() is not None

    def endpoint(self) -> tuple[str, int]:
        """Address and port that a rank connects to. Raises ClusterError where there is no store."""
        assert self._process.stdout is not None
        if not self._port:
            ready, _, _ = select.select([self._process.stdout], [], [], _START_TIMEOUT_S)
            self._port = int((ready and self._process.stdout.readline()) or 0)
        if not self._port:
            raise ClusterError(f"the rendezvous store at {self._address} does not start")
        return self._address, self._port

    def tell_abort(self, group: Group) -> None:
        """Let its members end this group on their own: one of them has failed."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is gone, and with it all groups
            print(group.name, file=self._process.stdin, flush=True)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate(timeout=_END_TIMEOUT_S)


def main() -> None:
    """Serve a store and say at which port; each line that comes is the name of a broken group."""
    from raybench.worker.rendezvous import StoreHost

    host = StoreHost(sys.argv[1])
    address, port = host.endpoint()
    print(port, flush=True)
    for line in sys.stdin:
        host.tell_abort(Group(name=line.strip(), store_address=address, store_port=port))
