"""What every unit test needs."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The same cases each time, however slow the machine is: what `make test` says of a commit must not
# depend on luck. New ones are looked for with --hypothesis-profile=default.
settings.register_profile("gate", derandomize=True, deadline=None)
settings.load_profile("gate")


@pytest.fixture(autouse=True)
def _interrupts_as_before() -> Iterator[None]:
    """The command line, called in this process, leaves SIGINT to the system at its end."""
    usual = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, usual)
