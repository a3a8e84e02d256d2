"""Which modules a point visits on its way from the job file to the report on the terminal.

    python -m benchmarks.modules_of_a_point

One point of `mlp` is swept by the command line in this process, with a worker of this process in
the place of Ray's, and reported. A module counts where one of its functions is called; what it
only does when it is imported does not count. What Ray's side would add is not seen.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from unittest.mock import patch

from raybench import cli
from tests.local_cluster import this_process

JOB = """\
version: 1
name: one_point
workload: {kind: mlp, hidden: 32, layers: 2}
matrix: {batch_size: [8]}
measure: {warmup: 2, iterations: 6, max_seconds: 1}
"""


def main() -> None:
    # A worker of this process instead of Ray; nor is it asked whether a Ray is there.
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("raybench.sweep.runner.connect", lambda *_, **__: this_process()),
        patch("raybench.sweep.runner.starts_private", lambda *_: True),
    ):
        path = Path(folder, "one_point.yaml")
        path.write_text(JOB)
        called = modules_called(lambda: sweep(path))
    print(*sorted(called), f"{len(called)} modules from the job file to the report", sep="\n")


def sweep(path: Path) -> None:
    """Sweep and report; what is printed is dropped. Raises RuntimeError where the point failed."""
    words = ["sweep", str(path), "--device", "cpu", "-o", str(path.parent / "results")]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = cli.raybench.main(words, standalone_mode=False)
    if code or "1 of 1 point ok" not in printed.getvalue():
        raise RuntimeError(f"the sweep ended with {code}: {printed.getvalue()}")


def modules_called(run: Callable[[], None]) -> set[str]:
    """Collect the modules of raybench of which a function is called meanwhile, in any thread."""
    called: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        is_new = event == "call" and name.startswith("raybench") and name not in called
        if is_new and not is_imported(frame):
            called.add(name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return called


def is_imported(frame: FrameType | None) -> bool:
    """Whether the call is part of the import of a module of raybench."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "<module>" and name.startswith("raybench"):
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    main()
