"""What all tests need."""

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.cluster_contract")

# Tests run sweeps side by side with other tests, and beside a user's: each process of pytest has
# its own folder of device locks. Set here, so that all that is started has it.
_LOCKS = tempfile.mkdtemp(prefix="raybench-test-locks-")
os.environ["RAYBENCH_LOCK_DIR"] = _LOCKS

# A shell without job control starts what it puts in the background with SIGINT ignored, and all
# that is started from there inherits it. Tests interrupt the sweeps that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _locks_are_removed() -> Iterator[None]:
    yield
    shutil.rmtree(_LOCKS, ignore_errors=True)


# What takes seconds to start, and is started once in each process that runs one of its files: the
# cluster of the integration tests, and the server that forks ranks.
_SHARED = {"cluster": r"\bthree_(nodes|workers)\b", "forked ranks": r"^from forked import"}


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Keep a file in one process, and in one all files that share what takes seconds to start.

    Not by --dist loadgroup, which pytest-xdist 3.8 does not do with pytest 9.2.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByShared(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::")[0]
            return _shared(config.rootpath / path) or path

    return ByShared(config, log)


@cache
def _shared(file: Path) -> str | None:
    text = file.read_text(encoding="utf-8")
    found = (name for name, sign in _SHARED.items() if re.search(sign, text, re.MULTILINE))
    return next(found, None)
