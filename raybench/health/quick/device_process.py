"""The child process of one device: `python -m raybench.health.quick.device_process`.

It owns the device, runs the tasks that the check sends, and ends when the check has ended.

    device_process KIND INDEX DESCRIPTOR
"""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import threading
from typing import Any

from raybench.errors import OUT_OF_MEMORY_PHRASES, brief, mentions
from raybench.health.quick.messages import (
    Imported,
    NotStarted,
    RunTask,
    ServeStore,
    Started,
    receive,
    send,
)

# All processes of the check are on one node.
_ADDRESS = "127.0.0.1"


def main(kind: str, index: int, descriptor: int) -> None:
    """Take the device, then answer requests until the check ends."""
    channel = socket.socket(fileno=descriptor)
    _exit_when_closed(channel)
    try:
        worker, serve_store = _start(channel, kind, index)
    except Exception as error:
        is_full = mentions(error, *OUT_OF_MEMORY_PHRASES)
        send(channel, NotStarted(message=brief(error), is_out_of_memory=is_full))
        return
    # The store lives as long as this list.
    stores: list[Any] = []
    while True:
        try:
            request = receive(channel)
        except EOFError:
            # The check has ended, and the thread of `_exit_when_closed` has not seen it yet.
            os._exit(0)
        match request:
            case ServeStore():
                stores.append(serve_store(_ADDRESS))
                send(channel, (stores[-1].host, stores[-1].port))
            case RunTask(task=task, rank=rank, group=group):
                send(channel, worker.run(task, rank, group))


def _start(channel: socket.socket, kind: str, index: int) -> Any:
    """Take the device; return its worker, and the function that serves a rendezvous store."""
    # Garbage collections would take a sixth of the time of the imports.
    gc.disable()
    from raybench.hangs.responder import choose_ras_address
    from raybench.worker.kernel_worker import KernelWorker
    from raybench.worker.process_group import choose_interface, serve_store

    # gloo reads this choice when it forms a process group.
    choose_interface(_ADDRESS)
    # Later garbage collections skip these objects.
    gc.collect()
    gc.freeze()
    gc.enable()
    if kind == "cuda":
        choose_ras_address()
    send(channel, Imported())
    worker = KernelWorker("cuda" if kind == "cuda" else "cpu", index)
    host = socket.gethostname()
    send(channel, Started(device=worker.identity(node_id=host, address=_ADDRESS)))
    return worker, serve_store


def _exit_when_closed(channel: socket.socket) -> None:
    """End this process when the check closes the socket, also in the middle of a task."""

    def watch() -> None:
        # The check never closes half of the socket, so a hang-up means its end.
        poller = select.poll()
        poller.register(channel, select.POLLRDHUP | select.POLLHUP)
        poller.poll()
        os._exit(0)

    threading.Thread(target=watch, name="raybench-quick-end", daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
