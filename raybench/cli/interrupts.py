"""Ctrl-C where it must wait a moment, and SIGTERM as one Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_held_back() -> Iterator[None]:
    """Hold an interrupt back until the block is done; a second one goes through at once.

    Ray's native code crashes the process at its exit when `ray.init` has been interrupted.
    """
    came: list[int] = []
    usual = signal.getsignal(signal.SIGINT)

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if came:
        raise KeyboardInterrupt


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Take SIGTERM, as batch systems send it, for an interrupt.

    `ray.init` sets a handler of its own, which exits with 15: enter this after it.
    """
    usual = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)
