"""What every unit test needs."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _interrupts_as_before() -> Iterator[None]:
    """The command line, called in this process, leaves SIGINT to the system at its end."""
    usual = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, usual)
