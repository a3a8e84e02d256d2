"""The process group of a worker, its store, and the interface that gloo uses."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from raybench.job.model import Measure
from raybench.records import Group, RankInfo, Task
from raybench.worker.process_group import (
    GroupGoneError,
    ProcessGroup,
    choose_interface,
    serve_store,
)
from tests.unit.fakes import make_point

ALONE = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0)
TASK = Task(point=make_point(), settings=Measure(warmup=1, iterations=1))


@pytest.fixture
def groups():
    store = serve_store("127.0.0.1")
    yield [
        Group(name=f"group-{number}", store_address=store.host, store_port=store.port)
        for number in range(2)
    ]
    del store


@pytest.fixture
def ours():
    made = ProcessGroup(torch.device("cpu"))
    yield made
    made.leave()


def test_the_end_of_an_earlier_group_is_not_taken_for_that_of_the_present_one(ours, groups):
    for group in groups:
        ours.join(TASK, ALONE, group)
    time.sleep(0.3)  # the thread of the first has heard of its end
    assert [ours.is_broken(group) for group in groups] == [False, False]


def test_a_group_that_is_ended_while_it_is_formed_is_not_in_the_way_of_the_next(
    ours, groups, monkeypatch
):
    def form(*given, **named):
        assert ours.take_down(timeout_s=5.0)
        usual(*given, **named)

    usual = dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", form)
    with pytest.raises(GroupGoneError):
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
def test_gloo_gets_the_interface_of_the_nodes_address_unless_the_user_chose_one(
    monkeypatch, chosen, address, expected
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    choose_interface(address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == expected
