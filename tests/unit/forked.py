"""Scripts in processes of their own, forked from one that has imported torch already."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
from multiprocessing.connection import Connection

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "raybench.worker.state"])


def run_script(script: str) -> str:
    """Run a script that may use `torch`; what it prints. It must not fail."""
    reader, writer = _SERVER.Pipe(duplex=False)
    process = _SERVER.Process(target=_run, args=(script, writer))
    process.start()
    writer.close()
    printed = ""
    with contextlib.suppress(EOFError):
        printed = reader.recv()
    process.join()
    reader.close()
    assert process.exitcode == 0, printed
    return printed


def _run(script: str, writer: Connection) -> None:
    import torch

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(script, {"torch": torch})
    writer.send(printed.getvalue())
