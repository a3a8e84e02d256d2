"""The flight recorder of torch, read as a responder would send it."""

import pickle
import time

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from raybench.hangs import recorder
from raybench.hangs.processes import Dumps
from raybench.hangs.recorder import Stage


def dumps(**data):
    return Dumps(now_ns=time.time_ns(), data=data)


def recorded():
    data = c10d._dump_fr_trace(includeCollectives=True, includeStackTraces=False, onlyActive=False)
    return recorder.read(dumps(_dump_fr_trace=data))


@pytest.fixture
def group(tmp_path):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_calls_of_gloo_have_shape_and_stage():
    for size in (4, 5):
        dist.all_reduce(torch.ones(size, 2))
    dist.broadcast(torch.ones(3, dtype=torch.int64), 0)
    # gloo's thread may note the end of a call a moment after it has returned.
    deadline_s = time.monotonic() + 10
    recording = recorded()
    while recording.calls[-1].stage is not Stage.DONE and time.monotonic() < deadline_s:
        recording = recorded()
    assert recording.is_on
    *_, first, second, third = recording.calls
    assert second.number == first.number + 1
    assert third.number == recording.last_number(third.group)
    assert [call.shape.operation for call in (first, third)] == ["all_reduce", "broadcast"]
    assert (second.shape.sizes, third.shape.dtypes) == (((5, 2),), ("Long",))
    assert third.stage is Stage.DONE
    assert 0 <= third.age_s < 60


def test_calls_of_a_former_group_are_dropped(tmp_path):
    for count in (5, 2):
        store = f"file://{tmp_path / str(count)}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        for _ in range(count):
            dist.all_reduce(torch.ones(1))
        recording = recorded()
        dist.destroy_process_group()
    assert recording.last_number(recording.calls[-1].group) == 2


ENTRY = {
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 118,
    "profiling_name": "nccl:all_reduce",
    "time_created_ns": 0,
    "input_sizes": [[4096]],
    "input_dtypes": ["Float"],
    "state": "started",
    "retired": False,
    "is_p2p": False,
}


def test_calls_of_nccl_have_stage_and_members():
    content = {
        "entries": [ENTRY, {**ENTRY, "is_p2p": True}],
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    }
    recording = recorder.read(dumps(_dump_nccl_trace=pickle.dumps(content)))
    (call,) = recording.calls
    assert (call.number, call.stage) == (118, Stage.BEGUN)
    assert recording.members == {"0": frozenset({0, 1})}
    assert recording.pending("0") == [call]


class Hostile:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize("data", [b"", b"garbage", pickle.dumps(Hostile()), pickle.dumps([1])])
def test_an_unreadable_dump_counts_as_empty(data, capsys):
    assert not recorder.read(dumps(_dump_fr_trace=data)).is_on
    assert capsys.readouterr().out == ""
