"""What every unit test needs."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from commands import command
from hypothesis import settings

__all__ = ["command"]  # a fixture

# The same cases each time, however slow the machine is: what `make test` says of a commit must not
# depend on luck. New ones are looked for with --hypothesis-profile=default.
settings.register_profile("gate", derandomize=True, deadline=None)
settings.load_profile("gate")


# Before torch is imported: with a thread for each core, tests beside each other wait for threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    """Freeze what was imported, as a worker does: points collect garbage several times."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _earlier_imports_are_frozen() -> None:
    """Freeze what tests before have imported, too."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the end of the interpreter collect it: nanobind complains of what is left."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _interrupts_as_before() -> Iterator[None]:
    """The command line, called in this process, leaves SIGINT to the system at its end."""
    usual = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, usual)
