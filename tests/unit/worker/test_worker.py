"""The inside of a worker, driven in this process on the CPU."""

import os
import re
import socket
import sys
import threading
import time
from dataclasses import replace
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from fakes import ALONE, make_point
from state_changes import SET_BEFORE_EACH_BUILD, STATE_CHANGES, seen

from raybench.hardware.devices import DeviceReading
from raybench.job import registry
from raybench.job.model import Measure
from raybench.job.point import Precision
from raybench.measure import phases
from raybench.measure.profiling import FlopCount
from raybench.records.code import code_of
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.measurement import Failure, Measurement
from raybench.records.status import Status
from raybench.records.task import GroupSpec, Task
from raybench.worker.process_group import break_group, serve_store
from raybench.worker.worker import Worker
from raybench.workloads.base import apply_precision

MLP = {"workload": "mlp", "params": {"hidden": 16, "layers": 2}}


class Plain:
    """A workload that does nothing: each test overrides what it is about."""

    items_per_step = flops_per_step = 1

    def __init__(self, context) -> None: ...

    def step(self) -> None: ...


@pytest.fixture
def workload(monkeypatch):
    """Registers a class as `own_workloads:<name>`."""
    module = ModuleType("own_workloads")
    monkeypatch.setitem(sys.modules, "own_workloads", module)

    def register(workload_class):
        setattr(module, workload_class.__name__, workload_class)
        return f"own_workloads:{workload_class.__name__}"

    return register


@pytest.fixture
def host():
    return serve_store("127.0.0.1")


def make_group(host, name="group-0"):
    return GroupSpec(name=name, store_address=host.host, store_port=host.port)


def make_task(workload="mlp", **measure):
    given = MLP if workload == "mlp" else {"workload": workload, "params": {}}
    settings = Measure(**{"warmup": 1, "iterations": 1, "breakdown": False, **measure})
    return Task(point=make_point(**given), settings=settings)


def run(task, worker=None, group=None):
    return (worker or Worker("cpu", 0)).run(task, ALONE, group)


def measured(task, worker=None, group=None):
    answer = run(task, worker, group)
    assert isinstance(answer, Measurement), answer
    return answer


def failed(task, worker=None, group=None):
    answer = run(task, worker, group)
    assert isinstance(answer, Failure), answer
    return answer


def raising(error):
    class Raising(Plain):
        def step(self) -> None:
            raise error

    return Raising


def test_an_exception_in_init_has_line_and_traceback(workload):
    class Broken(Plain):
        def __init__(self, context) -> None:
            raise ValueError("no such thing\nmore of it")

    answer = failed(make_task(workload(Broken)))
    assert (answer.status, answer.error_type) == (Status.ERROR, "ValueError")
    assert answer.message.startswith("no such thing, at test_worker.py:")
    assert "more of it" in answer.detail
    assert answer.worker_reusable


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), Status.OOM),
        (MemoryError(), Status.OOM),
        (RuntimeError("[enforce fail] CPUAllocator: can't allocate memory: you"), Status.OOM),
        (RuntimeError("CUDA error: out of memory"), Status.OOM),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `x`"), Status.OOM),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), Status.ERROR),
    ],
)
def test_every_form_of_oom_has_status_oom(workload, error, status):
    answer = failed(make_task(workload(raising(error))))
    assert answer.status is status
    assert answer.message
    assert answer.worker_reusable == ("CUDA error" not in answer.message)


def test_switching_on_tf32_under_fp32_is_reported(workload):
    class Sly(Plain):
        def step(self) -> None:
            apply_precision(Precision.TF32)

    assert measured(make_task(workload(Sly))).doubts == (
        Doubt(kind=DoubtKind.OTHER_PRECISION, subject="tf32"),
    )


def test_twelve_batch_sizes_in_one_worker_are_compiled(workload):
    def count(graph, inputs):
        compiled.append(inputs[-1].shape[0])
        return graph.forward

    class Compiled(Plain):
        def __init__(self, context) -> None:
            self._rows = torch.ones(context.batch_size, 4)
            self._model = torch.compile(torch.nn.Linear(4, 4), backend=count, dynamic=False)

        def step(self) -> None:
            self._model(self._rows)

    compiled: list[int] = []
    worker, task, sizes = Worker("cpu", 0), make_task(workload(Compiled)), list(range(2, 14))
    for size in sizes:
        measured(replace(task, point=replace(task.point, batch_size=size)), worker)
    assert compiled == sizes


def test_a_single_rank_sees_world_size_one(workload, monkeypatch):
    class Reader(Plain):
        def step(self) -> None:
            places.append((os.environ["RANK"], os.environ["WORLD_SIZE"]))

    places: list[tuple[str, str]] = []
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    measured(make_task(workload(Reader)))
    assert set(places) == {("0", "1")}


def test_destroying_the_process_group_is_refused(workload, host):
    class Destroyer(Plain):
        def close(self) -> None:
            dist.destroy_process_group()

    answer = failed(make_task(workload(Destroyer)), group=make_group(host))
    assert answer.message.startswith("workload own_workloads:Destroyer destroyed the process group")


def test_groups_of_a_workload_end_with_its_point(workload, host):
    class Grouping(Plain):
        def __init__(self, context) -> None:
            counts.append(len(dist.distributed_c10d._world.pg_map))
            worlds.append(dist.group.WORLD)
            dist.new_group([0])
            dist.new_group([0])

    counts: list[int] = []
    worlds: list[object] = []
    worker, task, group = Worker("cpu", 0), make_task(workload(Grouping)), make_group(host)
    for _ in range(2):
        measured(task, worker, group)
    worker.leave()
    assert counts == [1, 1]
    assert worlds[0] is worlds[1] is not None
    assert not dist.is_initialized()


def test_a_messy_workload_does_not_affect_the_next(workload):
    class Seeing(Plain):
        def __init__(self, context) -> None:
            views.append(seen())

    class Messy(Plain):
        def close(self) -> None:
            for change in (SET_BEFORE_EACH_BUILD | STATE_CHANGES).values():
                change()

    views: list[dict[str, object]] = []
    worker = Worker("cpu", 0)
    seeing, messing = make_task(workload(Seeing)), make_task(workload(Messy))
    for task in (seeing, messing, seeing):
        answer = measured(task, worker)
        assert answer.worker_reusable, answer.doubts
    assert views[0] == views[1]


def test_only_the_first_point_has_a_new_process(workload):
    worker, task = Worker("cpu", 0), make_task(workload(Plain))
    answers = [measured(task, worker) for _ in range(3)]
    assert [answer.is_of_new_process for answer in answers] == [True, False, False]


def test_settings_of_a_workload_module_are_kept(tmp_path, monkeypatch):
    (tmp_path / "setting_module.py").write_text(
        "import torch\n"
        "torch.backends.cudnn.benchmark = True\n"
        "seen = []\n"
        "class Seeing:\n"
        "    flops_per_step = 1\n"
        "    def __init__(self, context):\n"
        "        seen.append(torch.backends.cudnn.benchmark)\n"
        "    def step(self):\n"
        "        torch.backends.cudnn.benchmark = False\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    worker = Worker("cpu", 0)
    for _ in range(2):
        measured(make_task("setting_module:Seeing"), worker)
    assert sys.modules.pop("setting_module").seen == [True, True]


@pytest.mark.parametrize("fails", [False, True])
def test_leftover_threads_cost_the_process(workload, fails):
    class Threaded(Plain):
        def __init__(self, context) -> None:
            threading.Thread(target=stop.wait, name="left").start()
            if fails:
                raise ValueError("no such thing")

    stop = threading.Event()
    answer = run(make_task(workload(Threaded), repeats=2))
    stop.set()
    assert not answer.worker_reusable
    if isinstance(answer, Failure):
        assert answer.message.startswith("no such thing, at test_worker.py:")
    else:
        told = "2 running threads (left, left)"
        assert answer.doubts == (Doubt(kind=DoubtKind.LEFT_BEHIND, subject=told),)


def test_every_repeat_starts_with_the_same_seed(workload):
    class Random(Plain):
        def __init__(self, context) -> None:
            drawn.append(seen()["random"])

        def step(self) -> None:
            torch.rand(1)

    drawn: list[object] = []
    for _ in range(2):
        measured(make_task(workload(Random), repeats=2))
    assert drawn == [drawn[0]] * 4


def test_operations_are_counted_once_for_equal_points(monkeypatch):
    counted = Mock(return_value=FlopCount(flops=5.0, method="by hand"))
    monkeypatch.setattr("raybench.worker.worker.step_flops", counted)
    worker, first = Worker("cpu", 0), make_task()
    for changes in ({}, {"precision": Precision.BF16}, {"batch_size": 4}):
        task = replace(first, point=replace(first.point, **changes))
        assert measured(task, worker).flops_per_step == 5.0
    assert [call.args[-1].batch_size for call in counted.call_args_list] == [8, 4]


def test_a_worker_with_other_code_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "edited_workload_x.py"
    module.write_text("class W:\n    def __init__(self, context): ...\n    def step(self): pass\n")
    registry.load_workload("edited_workload_x:W")
    task = replace(make_task("edited_workload_x:W"), code=code_of("edited_workload_x"))
    worker = Worker("cpu", 0)
    measured(task, worker)
    module.write_text(module.read_text() + "# edited while the sweep runs\n")
    # This process has loaded what the driver has; one that starts now has not.
    measured(task, worker)
    answer = failed(task)
    assert answer.status is Status.ERROR
    assert answer.message.startswith(
        f"the code on {socket.gethostname()} is not that of the run: edited_workload_x.py differs;"
    )
    assert answer.worker_reusable


def test_a_failed_breakdown_keeps_the_samples(workload):
    class Brittle(Plain):
        def __init__(self, context) -> None:
            self._left = 2 + 2 + 3  # two lead into the samples

        def step(self) -> None:
            time.sleep(0.002)  # long enough to be timed one by one
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("worn out")

    answer = measured(make_task(workload(Brittle), warmup=2, iterations=3, breakdown=True))
    assert answer.breakdown is None
    (doubt,) = answer.doubts
    assert doubt.kind is DoubtKind.CHECK_FAILED
    assert doubt.subject == "breakdown: RuntimeError: worn out"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")

    def __getattr__(self, name: str) -> object:
        return getattr(self._without_end, name)


def _noted(notes):
    error = ValueError("said")
    error.__notes__ = notes
    return error


@pytest.mark.parametrize(
    ("error", "error_type", "message"),
    [
        (Mute(), "Mute", "Mute: no message"),
        (ValueError(" \n "), "ValueError", "ValueError: no message"),
        (KeyError(), "KeyError", "KeyError: no message"),
        (KeyError("x"), "KeyError", "no such key: 'x'"),
        (_noted([5, "", "a note\nof two lines"]), "ValueError", "said; a note"),
        (_noted(5), "ValueError", "said"),
        (SystemExit("enough"), "SystemExit", "enough"),
    ],
    ids=lambda value: type(value).__name__[:20] if isinstance(value, BaseException) else "",
)
def test_any_exception_has_type_message_and_place(workload, error, error_type, message):
    answer = failed(make_task(workload(raising(error))))
    assert (answer.status, answer.error_type) == (Status.ERROR, error_type)
    told, _, place = answer.message.rpartition(", at ")
    assert told == message
    assert re.fullmatch(r"test_worker\.py:\d+ in step", place)
    assert answer.worker_reusable


def test_a_long_exception_text_is_cut(workload):
    error = ValueError("x" * 10_000_000)
    error.add_note("y" * 10_000_000)
    answer = failed(make_task(workload(raising(error))))
    told, _, place = answer.message.rpartition(", at ")
    assert len(told) == 2000
    assert told.endswith("x ... [cut: 20,000,002 characters]")
    assert place.startswith("test_worker.py:")
    assert len(answer.detail) == 4000
    assert answer.detail.startswith("[cut: 20,00")


def test_a_point_is_lost_when_its_group_ended(workload, host):
    worker, group = Worker("cpu", 0), make_group(host)
    failed(make_task(workload(raising(ValueError("no")))), worker, group)
    answer = failed(make_task(), worker, group)
    assert (answer.status, answer.error_type) == (Status.LOST, "PeerFailed")
    assert answer.worker_reusable


def test_measurements_in_an_ended_group_are_discarded(workload, host):
    class Ended(Plain):
        def close(self) -> None:
            break_group(host, groups[0])
            time.sleep(0.3)

    groups = [make_group(host, name) for name in ("group-0", "group-1")]
    worker = Worker("cpu", 0)
    answer = failed(make_task(workload(Ended)), worker, groups[0])
    assert (answer.error_type, answer.worker_reusable) == ("PeerFailed", True)
    assert not dist.is_initialized()
    for group in (None, groups[1]):
        measured(make_task(), worker, group)
    worker.leave()


def test_a_timeout_prints_the_stack(workload, capfd):
    class Slow(Plain):
        def __init__(self, context) -> None:
            time.sleep(1.0)

    run(make_task(workload(Slow), timeout_s=0.5))
    assert "test_worker.py" in capfd.readouterr().err


@pytest.mark.parametrize("is_asked", [True, False])
def test_matrix_products_are_timed_once_if_requested(workload, monkeypatch, is_asked):
    def sustained(device, precisions):
        done.append(tuple(precisions))
        return dict.fromkeys(precisions, 700.0)

    class Watched(Plain):
        def __init__(self, context) -> None:
            done.append("built")

    done: list[object] = []
    monkeypatch.setattr("raybench.worker.worker.tflops_sustained", sustained)
    worker, both = Worker("cpu", 0), (Precision.FP32, Precision.BF16)
    task = replace(make_task(workload(Watched)), precisions=both if is_asked else None)
    points = [replace(task.point, precision=precision) for precision in both]
    answers = [measured(replace(task, point=point), worker) for point in points]
    assert [answer.gemm_tflops for answer in answers] == [700.0 if is_asked else None] * 2
    assert [one for one in done if one] == ([both] if is_asked else []) + ["built"] * 2


@pytest.mark.parametrize(("limited_each_s", "since"), [(0.1, [1, 2, 3]), (0.0, [1, 1, 1])])
def test_a_device_rests_since_its_last_throttled_point(monkeypatch, limited_each_s, since):
    readings = iter(range(1, 100))
    rested = []
    measure = phases.measure

    class Counters:
        def read(self, *, with_energy):
            number = next(readings)
            return DeviceReading(time_s=number, limited_s={"power_cap": number * limited_each_s})

    def watched(*given, **named):
        rested.append(named["start"].unlimited_since)
        return measure(*given, **named)

    monkeypatch.setattr("raybench.worker.worker.Counters", lambda device: Counters())
    monkeypatch.setattr(phases, "measure", watched)
    worker = Worker("cpu", 0)
    for _ in range(3):
        measured(make_task(), worker)
    # The first reading follows the matrix products, then there is one after each point.
    assert [reading.time_s for reading in rested] == since


def test_an_nccl_refusal_names_variables_of_the_job(workload, monkeypatch):
    error = RuntimeError("NCCL error in: x.cpp:1, invalid usage (run with NCCL_DEBUG=WARN)")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    task = make_task(workload(raising(error)))
    answer = failed(replace(task, point=replace(task.point, env={"NCCL_ALGO": "Tree"})))
    assert "NCCL_ALGO=Tree of env may ask for what NCCL does not have here" in answer.message
    assert answer.message.endswith("as in NCCL_ALGO: allreduce:tree")
    assert "of env" not in failed(task).message


def test_a_process_without_job_variables_measures_nothing():
    task = make_task()
    answer = failed(replace(task, point=replace(task.point, env={"NOT_SET_HERE": "1"})))
    assert answer.message == "env: this process was not started with NOT_SET_HERE=1"


@pytest.mark.parametrize(
    ("workload", "user_class"),
    [
        ("gemm", ""),
        ("raybench.workloads.pairs:TransportProbe", ""),
        ("my.module:Mine", "my.module:Mine"),
    ],
)
def test_only_user_classes_need_own_processes(workload, user_class):
    task = Task(point=make_point(workload=workload), settings=Measure())
    assert task.user_class == user_class
