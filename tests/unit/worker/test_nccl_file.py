"""The log of NCCL in a worker: on while a group is formed, and without a trace behind."""

import os
from pathlib import Path

import pytest

from raybench.worker.process_group import NcclFile

LINE = "vm:1:2 [0] NCCL INFO Channel 00/0 : {sender}[0] -> {receiver}[1] via {way}\n"


@pytest.fixture(autouse=True)
def no_log(monkeypatch):
    monkeypatch.delenv("NCCL_DEBUG", raising=False)


def test_the_ways_are_those_of_the_last_group():
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


def test_a_log_that_the_user_has_switched_on_stays_as_it_is(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    log = NcclFile()
    with log.record():
        assert "NCCL_DEBUG_FILE" not in os.environ
        assert os.environ["NCCL_DEBUG"] == "WARN"
    assert log.routes() == ()


class FakeNccl:
    """Opens the file that its variables name, as NCCL does when it reads them."""

    def __init__(self) -> None:
        self.read()

    def read(self) -> None:
        self.subsystems = os.environ["NCCL_DEBUG_SUBSYS"]
        self.file = Path(os.environ["NCCL_DEBUG_FILE"]).open("w", buffering=1)  # noqa: SIM115

    def read_again(self) -> None:
        self.file.close()
        self.read()

    def run(self) -> None:
        if "TUNING" in self.subsystems:
            self.file.write(CHOICE)


CHOICE = (
    "vm:1:2 [0] NCCL INFO AllReduce: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}\n" * 2
)


def test_a_step_tells_what_nccl_ran_and_the_ways_stay_known():
    log = NcclFile(lambda: nccl.read_again)
    with log.record():
        nccl = FakeNccl()
        nccl.file.write(LINE.format(sender=0, receiver=1, way="P2P/CUMEM/read"))
    assert log.choices(nccl.run) == ("AllReduce 4096 B: RING LL, 2 channels",)
    assert "NCCL_DEBUG" not in os.environ
    nccl.run()  # that is logged no more
    nccl.file.write(LINE.format(sender=1, receiver=0, way="SHM/direct/direct"))
    assert nccl.subsystems == "INIT,NET"
    assert log.routes() == ("P2P/CUMEM", "SHM/direct")
    with log.record():
        nccl.file.write(LINE.format(sender=0, receiver=1, way="P2P/IPC"))
    nccl.file.close()
    assert log.routes() == ("P2P/IPC",)


def test_a_step_that_fails_leaves_the_log_as_it_was():
    log = NcclFile(lambda: nccl.read_again)
    with log.record():
        nccl = FakeNccl()
    with pytest.raises(ZeroDivisionError):
        log.choices(lambda: 1 / 0)
    assert nccl.subsystems == "INIT,NET"
    nccl.file.close()


def test_the_step_runs_where_nccl_tells_nothing_because_others_take_part_in_it():
    steps: list[int] = []
    without = NcclFile(lambda: None)
    assert without.routes() == ()
    with without.record():
        pass
    assert without.choices(lambda: steps.append(1)) == ()
    assert NcclFile().choices(lambda: steps.append(2)) == ()
    assert steps == [1, 2]
