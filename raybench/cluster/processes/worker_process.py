"""A worker as a process: it has one device, and answers one task after the other.

python -m raybench.cluster.processes.worker_process    what it is to be comes by stdin, a pickle
"""

from __future__ import annotations

import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from raybench.cluster import DeviceKind, reaper
from raybench.cluster.processes.channel import BROKEN, Door


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """What a new worker is to be. token: by which the driver knows it. address: of its node."""

    door: Door
    token: str
    kind: DeviceKind
    index: int
    node_id: str
    address: str
    search_path: str


def main() -> None:
    """Be a worker until the driver lets it go. Its WorkerOrder comes by stdin, a pickle."""
    reaper.reap_orphans_of_worker()
    order: WorkerOrder = pickle.load(sys.stdin.buffer)
    serve(order)


def serve(order: WorkerOrder) -> None:
    """Say which device this is, then answer tasks until the driver is gone."""
    if order.search_path not in sys.path:
        sys.path.insert(0, order.search_path)
    connection = order.door.enter(order.token)
    from raybench.worker.rendezvous import choose_interface
    from raybench.worker.worker import Worker

    choose_interface(order.address)
    worker = Worker(order.kind, order.index)
    connection.send(worker.identity(node_id=order.node_id, address=order.address))
    with suppress(*BROKEN):  # the driver has ended
        _answer(connection, worker)


def _answer(connection: Connection, worker: object) -> None:
    from raybench.worker.worker import Worker

    assert isinstance(worker, Worker)
    while True:
        task, place, group = connection.recv()
        connection.send(worker.run(task, place, group))
