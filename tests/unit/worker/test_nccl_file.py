"""The log of NCCL in a worker: on while a group is formed, and without a trace behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raybench.worker.nccl_file import NcclFile

LINE = "vm:1:2 [0] NCCL INFO Channel 00/0 : {sender}[0] -> {receiver}[1] via {way}\n"


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_DEBUG", raising=False)


def test_the_ways_are_those_of_the_last_group() -> None:
    log = NcclFile()
    with log.record():
        path = Path(os.environ["NCCL_DEBUG_FILE"])
        nccl = path.open("w", buffering=1)
        nccl.write(LINE.format(sender=0, receiver=1, way="P2P/CUMEM/read"))
    assert "NCCL_DEBUG" not in os.environ
    assert log.routes() == ("P2P/CUMEM",)
    with log.record():
        assert "NCCL_DEBUG_FILE" not in os.environ
        nccl.write(LINE.format(sender=0, receiver=1, way="SHM/direct/direct"))
    nccl.close()
    assert log.routes() == ("SHM/direct",)


def test_a_log_that_the_user_has_switched_on_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    log = NcclFile()
    with log.record():
        assert "NCCL_DEBUG_FILE" not in os.environ
        assert os.environ["NCCL_DEBUG"] == "WARN"
    assert log.routes() == ()


def test_variables_beside_the_switch_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "COLL")
    with NcclFile().record():
        assert os.environ["NCCL_DEBUG_SUBSYS"] == "INIT,NET"
    assert os.environ["NCCL_DEBUG_SUBSYS"] == "COLL"


def test_nothing_is_known_before_there_was_a_group() -> None:
    assert NcclFile().routes() == ()
