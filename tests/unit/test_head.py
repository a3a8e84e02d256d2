from __future__ import annotations

import socket
import time

import pytest

from raybench.cluster.ray_connection import Head
from raybench.errors import ClusterError


def test_a_head_that_has_just_answered_and_died_is_found_gone_before_an_actor_is_replaced():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        head = Head(address)
        head.check(afresh=True)
    head.check()
    started_s = time.monotonic()
    with pytest.raises(ClusterError, match=f"at {address} is gone"):
        head.check(afresh=True)
    assert time.monotonic() < started_s + 3
    assert head.is_gone


def test_a_head_that_missed_one_call_is_there(monkeypatch):
    answers = iter([False, True])
    monkeypatch.setattr(Head, "_listens", lambda _: next(answers))
    assert not Head("127.0.0.1:1").is_gone
