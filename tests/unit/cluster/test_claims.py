"""How a sweep takes its devices from others: refused, waiting, beside them."""

import itertools
import socket
from dataclasses import replace

import pytest
from fakes import make_device

from raybench.cluster import claims
from raybench.cluster.claims import Claims
from raybench.cluster.device_locks import CPU, Claim, Holder, Terms, this_process
from raybench.errors import DevicesInUseError

OTHER = Holder(
    sweep="s", what="run a-1", user="bob", host="alpha", process_id=7, since="2026-11-22 04:00 UTC"
)


class FakeNodes:
    """Nodes on which others have devices, for as many claims as there are answers."""

    def __init__(self, *answers, problem=""):
        self._answers = itertools.chain(answers, itertools.repeat({}))
        self._problem = problem
        self.shared = []
        self.released = 0

    def claim(self, devices, holder, *, shared):
        self.shared.append(shared)
        return [(devices[0], Claim(others=next(self._answers), problem=self._problem))]

    def release(self, devices):
        self.released += 1


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(claims, "_POLL_S", 0.01)


def terms(**changes):
    return Terms(holder=this_process("run mine-1"), **changes)


def cpus(count=2):
    return [make_device(index=n, kind="cpu", uuid=f"a/{n}") for n in range(count)]


def test_what_another_sweep_has_is_refused_in_one_line_that_says_what_to_type():
    nodes = FakeNodes({CPU: (OTHER,)})
    with pytest.raises(DevicesInUseError) as refused:
        Claims(nodes, terms(), print).hold(cpus())
    who, ways_out = str(refused.value).split("; ")
    assert who.endswith(
        "host-a are used by run a-1 of bob (process 7 on alpha) since " + OTHER.since
    )
    assert "--wait SECONDS" in ways_out
    assert "--shared" in ways_out
    assert "CUDA_VISIBLE_DEVICES" not in ways_out
    assert refused.value.exit_code == 3
    assert (nodes.shared, nodes.released) == ([False], 1)


def test_gpus_are_named_and_others_are_proposed():
    nodes = FakeNodes({"GPU-a0": (OTHER, OTHER), "GPU-a1": (OTHER,)})
    with pytest.raises(DevicesInUseError) as refused:
        Claims(nodes, terms(), print).hold([make_device(index=n) for n in range(2)])
    told = str(refused.value)
    assert told.startswith("cuda:0 of host-a and 1 more device are used by run a-1 of bob")
    assert " and 1 more since" in told
    assert "CUDA_VISIBLE_DEVICES" in told


def test_the_devices_are_waited_for_as_long_as_told_and_that_is_said_once():
    nodes, said = FakeNodes(*[{CPU: (OTHER,)}] * 3), list[str]()
    Claims(nodes, terms(wait_s=60.0), said.append).hold(cpus())
    assert len(nodes.shared) == 4
    [line] = said
    assert line.startswith("waiting: the processors of host-a are used by run a-1")


def test_a_sweep_whose_driver_is_gone_is_waited_for_unasked():
    gone = replace(OTHER, host=socket.gethostname(), process_id=2**22 - 1)
    said = []
    Claims(FakeNodes({CPU: (gone,)}), terms(), said.append).hold(cpus())
    assert said[0].endswith(", and ends")


def test_who_shares_is_not_kept_out_and_told_who_is_there():
    nodes, said = FakeNodes({CPU: (OTHER,)}), list[str]()
    held = Claims(nodes, terms(shared=True), said.append)
    held.hold(cpus())
    assert (nodes.shared, nodes.released) == ([True], 0)
    assert said[0].startswith("not alone: the processors of host-a are used by run a-1")
    assert held.others == ("run a-1 of bob (process 7 on alpha)",)


def test_a_worker_that_comes_late_is_refused_where_others_are_and_not_waited_for():
    nodes = FakeNodes({CPU: (OTHER,)})
    assert "are used by run a-1" in Claims(nodes, terms(wait_s=60.0), print).refusal(cpus(1))
    assert Claims(nodes, terms(), print).refusal(cpus(1)) == ""


def test_a_host_without_locks_is_measured_and_that_is_said_once():
    said = []
    held = Claims(FakeNodes(problem="/tmp/x: Permission denied"), terms(), said.append)
    held.hold(cpus())
    held.hold(cpus())
    [line] = said
    assert "/tmp/x: Permission denied" in line


def test_without_terms_nothing_is_asked():
    nodes = FakeNodes({CPU: (OTHER,)})
    free = Claims(nodes, None, print)
    free.hold(cpus())
    assert (free.refusal(cpus()), nodes.shared) == ("", [])
