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

# Tests run sweeps beside each other and beside a user's, so each process of pytest has its own
# device locks and Ray sessions. Set before Ray is imported; all child processes inherit it. The
# path is short because a socket's path has at most 107 bytes, of which Ray takes most.
_OWN = Path(tempfile.mkdtemp(prefix="rbtest-", dir="/tmp"))
# Ray writes a cluster's address to this file, and a user's sweep would read it there and join.
(_OWN / "ray").mkdir()
(_OWN / "ray" / "ray_current_cluster").symlink_to(os.devnull)
os.environ["RAY_TMPDIR"] = str(_OWN)
os.environ["RAYBENCH_LOCK_DIR"] = str(_OWN / "locks")
# `--address auto` must not join a cluster that a user has on this host.
os.environ["RAY_ADDRESS"] = "local"

# A shell without job control starts what it puts in the background with SIGINT ignored, and all
# that is started from there inherits it. Tests interrupt the sweeps that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_folder_is_removed() -> Iterator[None]:
    yield
    shutil.rmtree(_OWN, ignore_errors=True)


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
