"""What all tests need."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

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
