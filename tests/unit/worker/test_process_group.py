"""The process group of a worker, its store, the interface that gloo uses, and NCCL's log."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from raybench.job.model import Measure
from raybench.records.task import GroupSpec, Task
from raybench.worker import process_group
from tests.unit.fakes import ALONE, make_point

TASK = Task(point=make_point(), settings=Measure(warmup=1, iterations=1))


@pytest.fixture
def groups():
    store = process_group.serve_store("127.0.0.1")
    yield [
        GroupSpec(name=f"group-{number}", store_address=store.host, store_port=store.port)
        for number in range(4)
    ]
    del store


@pytest.fixture
def ours():
    made = process_group.ProcessGroup(torch.device("cpu"))
    yield made
    made.leave()


def test_the_end_of_an_earlier_group_is_ignored(ours, groups):
    for group in groups:
        ours.join(TASK, ALONE, group)
    time.sleep(0.3)  # the thread of the first has heard of its end
    assert not any(map(ours.is_broken, groups))


def test_an_ended_group_is_not_joined_again(ours, groups):
    for group in groups[:3]:
        ours.join(TASK, ALONE, group)
    store = dist.TCPStore(groups[2].store_address, groups[2].store_port)
    process_group.break_group(store, groups[2])
    while not ours.is_broken(groups[2]):
        time.sleep(0.01)
    for group in groups[:3]:
        with pytest.raises(process_group.GroupGoneError):
            ours.join(TASK, ALONE, group)
    ours.join(TASK, ALONE, groups[3])


def test_a_group_ended_while_joining_allows_the_next(ours, groups, monkeypatch):
    def form(*given, **named):
        assert ours.take_down(timeout_s=5.0)
        usual(*given, **named)

    usual = dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", form)
    with pytest.raises(process_group.GroupGoneError):
        ours.join(TASK, ALONE, groups[0])
    assert not dist.is_initialized()
    monkeypatch.undo()
    ours.join(TASK, ALONE, groups[1])
    assert dist.is_initialized()


@pytest.mark.parametrize(
    ("chosen", "address", "expected"),
    [
        ("", "127.0.0.1", "lo"),
        ("eth7", "127.0.0.1", "eth7"),
        ("", "192.0.2.77", ""),
        ("", "2001:db8::7", ""),
    ],
    ids=["found", "the user's", "no interface", "IPv6"],
)
def test_gloo_uses_the_interface_of_the_node_address(monkeypatch, chosen, address, expected):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    process_group.choose_interface(address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == expected


LINE = "vm:1:2 [0] NCCL INFO Channel 00/0 : {sender}[0] -> {receiver}[1] via {way}\n"


@pytest.fixture(autouse=True)
def no_log(monkeypatch):
    monkeypatch.delenv("NCCL_DEBUG", raising=False)


def test_the_nccl_log_of_the_user_is_unchanged(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    log = process_group.NcclLogFile()
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


def test_nccl_choices_and_routes_are_read_from_log():
    log = process_group.NcclLogFile(lambda: nccl.read_again)
    with pytest.raises(TimeoutError), log.record():
        raise TimeoutError  # before NCCL is used
    with log.record():
        nccl = FakeNccl()
        nccl.file.write(LINE.format(sender=0, receiver=1, way="P2P/CUMEM/read"))
    assert log.choices(nccl.run) == ("AllReduce 4096 B: RING LL, 2 channels",)
    assert "NCCL_DEBUG" not in os.environ
    nccl.run()  # that is logged no more
    nccl.file.write(LINE.format(sender=1, receiver=0, way="SHM/direct/direct"))
    assert nccl.subsystems == "INIT,NET"
    assert log.routes() == ("P2P/CUMEM", "SHM/direct")
    with log.record():  # of the next group, whose ways alone are told
        assert "NCCL_DEBUG_FILE" not in os.environ
        nccl.file.write(LINE.format(sender=0, receiver=1, way="P2P/IPC"))
    nccl.file.close()
    assert log.routes() == ("P2P/IPC",)


def test_a_failed_step_restores_the_nccl_log():
    log = process_group.NcclLogFile(lambda: nccl.read_again)
    with log.record():
        nccl = FakeNccl()
    with pytest.raises(ZeroDivisionError):
        log.choices(lambda: 1 / 0)
    assert nccl.subsystems == "INIT,NET"
    nccl.file.close()


def test_steps_run_even_without_an_nccl_log():
    steps: list[int] = []
    without = process_group.NcclLogFile(lambda: None)
    assert without.routes() == ()
    with without.record():
        pass
    assert without.choices(lambda: steps.append(1)) == ()
    assert process_group.NcclLogFile().choices(lambda: steps.append(2)) == ()
    assert steps == [1, 2]
