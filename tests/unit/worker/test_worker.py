"""The inside of a worker, driven in this process on the CPU."""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from fakes import make_point
from state_changes import STATE_CHANGES, seen

from raybench.cluster.local import this_process
from raybench.hardware.counters import Reading
from raybench.job import registry
from raybench.job.model import Measure
from raybench.job.point import Precision
from raybench.measure import phases
from raybench.records import Failure, Group, Measurement, RankInfo, Status, Task
from raybench.records.environment import code_of
from raybench.worker.rendezvous import StoreHost
from raybench.worker.worker import Worker

ALONE = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0)
MLP = {"hidden": 16, "layers": 2}


def run(point, **measure):
    task = Task(point=point, settings=Measure(**{"warmup": 2, "iterations": 3, **measure}))
    return Worker("cpu", 0).run(task, ALONE, None)


@pytest.fixture
def workload(monkeypatch):
    """Registers a class as `own_workloads:<name>`."""
    module = ModuleType("own_workloads")
    monkeypatch.setitem(sys.modules, "own_workloads", module)

    def register(workload_class: type) -> str:
        setattr(module, workload_class.__name__, workload_class)
        return f"own_workloads:{workload_class.__name__}"

    return register


def test_a_point_gives_warm_up_and_samples(workload):
    answer = run(make_point(workload="mlp", params=MLP))
    assert isinstance(answer, Measurement), answer
    (repetition,) = answer.repetitions
    assert (len(repetition.warmup.step_ns), len(repetition.timed.step_ns)) == (2, 3)
    assert answer.items_per_step == 8
    assert answer.peak_mem_allocated_bytes is None


def test_an_exception_in_init_or_step_is_a_failure_with_its_first_line_and_traceback(workload):
    class Broken:
        def __init__(self, context) -> None:
            raise ValueError("no such thing\nmore of it")

        def step(self) -> None: ...

    answer = run(make_point(workload=workload(Broken), params={}))
    assert isinstance(answer, Failure)
    assert (answer.status, answer.error_type) == (Status.ERROR, "ValueError")
    assert answer.message == "no such thing"
    assert "more of it" in answer.detail
    assert answer.worker_reusable


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_out_of_memory_has_a_status_of_its_own(workload, error):
    class Greedy:
        items_per_step = 1

        def __init__(self, context) -> None: ...

        def step(self) -> None:
            raise error

    answer = run(make_point(workload=workload(Greedy), params={}))
    assert isinstance(answer, Failure)
    assert answer.status is Status.OOM
    assert answer.message
    assert answer.worker_reusable == ("CUDA error" not in answer.message)


def test_an_error_of_the_device_costs_the_process(workload):
    class Illegal:
        items_per_step = 1

        def __init__(self, context) -> None: ...

        def step(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    answer = run(make_point(workload=workload(Illegal), params={}))
    assert isinstance(answer, Failure)
    assert not answer.worker_reusable


def test_a_workload_that_switches_tf32_on_under_fp32_is_told(workload):
    class Sly:
        items_per_step = 1

        def __init__(self, context) -> None: ...

        def step(self) -> None:
            from raybench.workloads import precision

            precision.apply(Precision.TF32)

    answer = run(make_point(workload=workload(Sly), params={}))
    assert isinstance(answer, Measurement), answer
    assert answer.warnings == (
        "precision fp32 asked, but fp32 arithmetic was tf32 after the last step",
    )
    clean = run(make_point(workload="mlp", params=MLP))
    assert isinstance(clean, Measurement)
    assert clean.warnings == ()


def test_compiled_code_is_forgotten_after_the_point(workload):
    class Compiled:
        items_per_step = 1

        def __init__(self, context) -> None:
            self._double = torch.compile(lambda x: x * 2, backend="eager")

        def step(self) -> None:
            self._double(torch.ones(2))
            frames.append(torch._dynamo.convert_frame.FRAME_COUNTER)

    frames: list[int] = []
    answer = run(make_point(workload=workload(Compiled), params={}))
    assert isinstance(answer, Measurement), answer
    assert frames[0] > 0
    assert torch._dynamo.convert_frame.FRAME_COUNTER == 0


def test_a_lone_rank_is_told_its_place_after_a_bigger_group(workload, monkeypatch):
    class Reader:
        items_per_step = 1

        def __init__(self, context) -> None: ...

        def step(self) -> None:
            seen.append((os.environ["RANK"], os.environ["WORLD_SIZE"]))

    seen: list[tuple[str, str]] = []
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    run(make_point(workload=workload(Reader), params={}))
    assert set(seen) == {("0", "1")}


def test_a_workload_that_destroys_the_process_group_is_refused_and_not_measured_alone(workload):
    class Destroyer:
        items_per_step = 1

        def __init__(self, context) -> None: ...

        def step(self) -> None: ...

        def close(self) -> None:
            dist.destroy_process_group()

    address, port = (store := StoreHost("127.0.0.1")).endpoint()
    group = Group(name="group-0", store_address=address, store_port=port)
    point = make_point(workload=workload(Destroyer), params={})
    task = Task(point=point, settings=Measure(warmup=1, iterations=1))
    answer = Worker("cpu", 0).run(task, ALONE, group)
    del store
    assert isinstance(answer, Failure), answer
    assert answer.message.startswith("workload own_workloads:Destroyer destroyed the process group")


def test_a_process_group_that_a_lone_workload_made_is_gone_at_its_next_point(workload):
    class Own:
        items_per_step = 1

        def __init__(self, context) -> None:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

        def step(self) -> None: ...

    name = workload(Own)
    for _ in range(2):
        answer = run(make_point(workload=name, params={}))
        assert isinstance(answer, Measurement), answer
    assert not dist.is_initialized()


def test_groups_that_a_workload_made_are_gone_at_its_next_point_and_ours_stays(workload):
    class Grouping:
        items_per_step = flops_per_step = 1

        def __init__(self, context) -> None:
            counts.append(dist.get_pg_count() and len(dist.distributed_c10d._world.pg_map))
            worlds.append(dist.group.WORLD)
            dist.new_group([0])
            dist.new_group([0])

        def step(self) -> None: ...

    counts: list[int] = []
    worlds: list[object] = []
    address, port = (store := StoreHost("127.0.0.1")).endpoint()
    group = Group(name="group-own", store_address=address, store_port=port)
    task = Task(
        point=make_point(workload=workload(Grouping), params={}),
        settings=Measure(warmup=1, iterations=1),
    )
    worker = Worker("cpu", 0)
    for _ in range(2):
        answer = worker.run(task, ALONE, group)
        assert isinstance(answer, Measurement), answer
    worker.leave()
    del store
    assert counts == [1, 1]
    assert worlds[0] is worlds[1] is not None
    assert not dist.is_initialized()


def test_a_workload_that_makes_a_mess_does_not_change_the_next_point(workload):
    class Seeing:
        items_per_step = flops_per_step = 1

        def __init__(self, context) -> None:
            views.append(seen())

        def step(self) -> None: ...

    class Messy:
        items_per_step = flops_per_step = 1

        def __init__(self, context) -> None: ...

        def step(self) -> None: ...

        def close(self) -> None:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            torch.backends.cudnn.conv.fp32_precision = "tf32"
            torch.backends.mkldnn.conv.fp32_precision = "bf16"
            for name, mess in STATE_CHANGES.items():
                if name != "ban of saved-tensor hooks":
                    mess()
            messy.append(True)

    views: list[dict[str, object]] = []
    messy: list[bool] = []
    worker = Worker("cpu", 0)
    seeing, messing = (
        Task(
            point=make_point(workload=workload(one), params={}),
            settings=Measure(warmup=1, iterations=1, breakdown=False),
        )
        for one in (Seeing, Messy)
    )
    answers = [worker.run(task, ALONE, None) for task in (seeing, messing, seeing)]
    for answer in answers:
        assert isinstance(answer, Measurement), answer
        assert answer.worker_reusable, answer.warnings
    assert messy
    assert views[0] == views[1]


def test_a_process_is_new_at_its_first_point_alone(workload):
    class Plain:
        items_per_step = flops_per_step = 1

        def __init__(self, context) -> None: ...

        def step(self) -> None: ...

    worker = Worker("cpu", 0)
    task = Task(
        point=make_point(workload=workload(Plain), params={}),
        settings=Measure(warmup=1, iterations=1, breakdown=False),
    )
    answers = [worker.run(task, ALONE, None) for _ in range(3)]
    assert [answer.is_of_new_process for answer in answers] == [True, False, False]


def test_what_the_module_of_a_workload_sets_is_there_at_every_point(tmp_path, monkeypatch):
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
    task = Task(
        point=make_point(workload="setting_module:Seeing", params={}),
        settings=Measure(warmup=1, iterations=1, breakdown=False),
    )
    worker = Worker("cpu", 0)
    for _ in range(2):
        answer = worker.run(task, ALONE, None)
        assert isinstance(answer, Measurement), answer
    assert sys.modules.pop("setting_module").seen == [True, True]


def test_what_a_workload_leaves_behind_is_told_and_costs_the_process(workload):
    class Threaded:
        items_per_step = flops_per_step = 1

        def __init__(self, context) -> None:
            threading.Thread(target=stop.wait, name="left").start()

        def step(self) -> None: ...

    stop = threading.Event()
    answer = run(make_point(workload=workload(Threaded), params={}), repeats=2)
    stop.set()
    assert isinstance(answer, Measurement), answer
    assert not answer.worker_reusable
    assert answer.warnings == (
        "the workload left 2 running threads (left, left) behind: "
        "the next point gets new processes; end or undo it in close()",
    )


def test_a_failed_point_that_leaves_something_behind_costs_the_process_too(workload):
    class Broken:
        def __init__(self, context) -> None:
            threading.Thread(target=stop.wait).start()
            raise ValueError("no such thing")

        def step(self) -> None: ...

    stop = threading.Event()
    answer = run(make_point(workload=workload(Broken), params={}))
    stop.set()
    assert isinstance(answer, Failure)
    assert answer.message == "no such thing"
    assert not answer.worker_reusable


def test_every_repeat_and_every_point_starts_with_the_same_random_numbers(workload):
    class Random:
        items_per_step = flops_per_step = 1

        def __init__(self, context) -> None:
            drawn.append(seen()["random"])

        def step(self) -> None:
            torch.rand(1)

    drawn: list[object] = []
    point = make_point(workload=workload(Random), params={})
    for _ in range(2):
        run(point, repeats=2)
    assert drawn == [drawn[0]] * 4


def test_declared_operations_win_over_counted_ones(workload):
    class Declaring:
        items_per_step = 1
        flops_per_step = 1234.0

        def __init__(self, context) -> None: ...

        def step(self) -> None: ...

    answer = run(make_point(workload=workload(Declaring), params={}))
    assert isinstance(answer, Measurement), answer
    assert answer.flops_per_step == 1234.0
    assert answer.breakdown is not None
    assert answer.breakdown.methods["flops_per_step"] == "declared by the workload"


def test_operations_are_counted_once_for_equal_points(monkeypatch):
    from raybench.measure.flops import Counted
    from raybench.worker import worker as worker_module

    calls = []

    def counted(workload_class, params, context):
        calls.append(context.batch_size)
        return Counted(flops=5.0, method="by hand")

    monkeypatch.setattr(worker_module, "step_flops", counted)
    worker = Worker("cpu", 0)
    settings = Measure(warmup=1, iterations=1)
    first = Task(point=make_point(workload="mlp", params=MLP), settings=settings)
    tasks = [
        first,
        replace(first, point=replace(first.point, precision=Precision.BF16)),
        replace(first, point=replace(first.point, batch_size=4)),
    ]
    for task in tasks:
        answer = worker.run(task, ALONE, None)
        assert isinstance(answer, Measurement), answer
        assert answer.flops_per_step == 5.0
    assert calls == [8, 4]


def test_a_note_to_an_error_is_in_its_message(workload):
    class Noted:
        def __init__(self, context) -> None:
            error = ValueError("no such thing\nmore of it")
            error.add_note("leave it out")
            raise error

        def step(self) -> None: ...

    answer = run(make_point(workload=workload(Noted), params={}))
    assert isinstance(answer, Failure)
    assert answer.message == "no such thing; leave it out"


def test_a_worker_knows_its_process_and_its_versions():
    device = Worker("cpu", 0).identity(node_id="n", address="127.0.0.1")
    assert device.process_id == os.getpid()
    assert device.uuid == f"n/{os.getpid()}"
    # A CUDA build has a local part in __version__ that the installed package has not.
    assert torch.__version__.startswith(device.versions["torch"])
    assert device.name


def test_the_cluster_of_this_process_runs_a_real_point():
    cluster = this_process()
    cluster.start(1, "pack")
    task = Task(
        point=make_point(workload="mlp", params=MLP), settings=Measure(warmup=1, iterations=2)
    )
    (answer,) = cluster.run(task, (0,))
    assert isinstance(answer, Measurement), answer
    cluster.close()
    assert cluster.devices == ()


def test_a_worker_that_has_loaded_other_code_measures_nothing_and_names_node_and_file(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "edited_workload_x.py"
    module.write_text("class W:\n    def __init__(self, context): ...\n    def step(self): pass\n")
    point = make_point(workload="edited_workload_x:W", params={})
    registry.load(point.workload)
    task = Task(
        point=point,
        settings=Measure(warmup=1, iterations=1, breakdown=False),
        code=code_of("edited_workload_x"),
    )
    worker = Worker("cpu", 0)
    assert isinstance(worker.run(task, ALONE, None), Measurement)
    module.write_text(module.read_text() + "# edited while the sweep runs\n")
    # This process has loaded what the driver has; one that starts now has not.
    assert isinstance(worker.run(task, ALONE, None), Measurement)
    answer = Worker("cpu", 0).run(task, ALONE, None)
    assert isinstance(answer, Failure)
    assert answer.status is Status.ERROR
    assert answer.message.startswith(
        f"the code on {socket.gethostname()} is not that of the run: edited_workload_x.py differs;"
    )
    assert answer.worker_reusable


@pytest.mark.parametrize("value", ["many", -3, math.nan, True])
def test_a_workload_that_declares_no_number_is_one_clear_line(workload, value):
    class Odd:
        items_per_step = value

        def __init__(self, context) -> None: ...

        def step(self) -> None: ...

    answer = run(make_point(workload=workload(Odd), params={}))
    assert isinstance(answer, Failure)
    assert answer.message == (
        f"workload Odd: items_per_step must be a number from 0 to 1e+30, given {value!r}"
    )


def test_a_breakdown_that_fails_alone_leaves_the_samples_and_a_warning(workload):
    class Brittle:
        items_per_step, flops_per_step = 1, 1

        def __init__(self, context) -> None:
            self._left = 2 + 2 + 3  # two lead into the samples

        def step(self) -> None:
            time.sleep(0.002)  # long enough to be timed one by one
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("worn out")

    answer = run(make_point(workload=workload(Brittle), params={}))
    assert isinstance(answer, Measurement), answer
    assert answer.breakdown is None
    assert answer.warnings == ("the breakdown failed: RuntimeError: worn out",)


def test_an_exception_whose_text_is_a_key_alone_says_what_it_is(workload):
    class Keyless:
        def __init__(self, context) -> None:
            raise KeyError("x")

        def step(self) -> None: ...

    answer = run(make_point(workload=workload(Keyless), params={}))
    assert isinstance(answer, Failure)
    assert answer.message == "no such key: 'x'"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class Wordless(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


def _noted(notes: object) -> Exception:
    error = ValueError("said")
    error.__notes__ = notes
    return error


@pytest.mark.parametrize(
    ("error", "error_type", "message"),
    [
        (Mute(), "Mute", "Mute: no message"),
        (Wordless(), "Wordless", "Wordless: no message"),
        (ValueError(), "ValueError", "ValueError: no message"),
        (ValueError(" \n "), "ValueError", "ValueError: no message"),
        (KeyError(), "KeyError", "KeyError: no message"),
        (_noted([5, "", "a note\nof two lines"]), "ValueError", "said; a note"),
        (_noted(5), "ValueError", "said"),
        (type("E" * 500, (Exception,), {})("x"), f"{'E' * 174} ... [cut: 500 characters]", "x"),
    ],
    ids=lambda value: type(value).__name__[:20] if isinstance(value, Exception) else "",
)
def test_an_exception_that_cannot_say_what_it_is_costs_no_process(
    workload, error, error_type, message
):
    class Raising:
        items_per_step = flops_per_step = 1

        def __init__(self, context) -> None: ...

        def step(self) -> None:
            raise error

        def close(self) -> None:
            raise Mute

    worker = Worker("cpu", 0)
    task = Task(
        point=make_point(workload=workload(Raising), params={}),
        settings=Measure(warmup=1, iterations=1),
    )
    answer = worker.run(task, ALONE, None)
    assert isinstance(answer, Failure)
    assert (answer.status, answer.error_type) == (Status.ERROR, error_type)
    closing = "" if message == "said" else "; close() then raised Mute: no message"
    assert answer.message == message + closing
    assert answer.worker_reusable


def test_the_text_of_an_exception_is_cut_and_says_so(workload):
    class Verbose:
        def __init__(self, context) -> None:
            error = ValueError("x" * 10_000_000)
            error.add_note("y" * 10_000_000)
            raise error

        def step(self) -> None: ...

    answer = run(make_point(workload=workload(Verbose), params={}))
    assert isinstance(answer, Failure)
    assert len(answer.message) == 2000
    assert answer.message.endswith("x ... [cut: 20,000,002 characters]")
    assert len(answer.detail) == 4000
    assert answer.detail.startswith("[cut: 20,00")


def test_a_group_that_another_rank_has_taken_down_is_no_error_of_the_point(workload):
    class Fails:
        items_per_step = flops_per_step = 1

        def __init__(self, context) -> None: ...

        def step(self) -> None:
            raise ValueError("no")

    address, port = (store := StoreHost("127.0.0.1")).endpoint()
    group = Group(name="group-0", store_address=address, store_port=port)
    settings = Measure(warmup=1, iterations=1)
    worker = Worker("cpu", 0)
    failing = Task(point=make_point(workload=workload(Fails), params={}), settings=settings)
    assert isinstance(worker.run(failing, ALONE, group), Failure)
    sound = Task(point=make_point(workload="mlp", params=MLP), settings=settings)
    answer = worker.run(sound, ALONE, group)
    assert isinstance(answer, Failure)
    assert (answer.status, answer.error_type) == (Status.LOST, "PeerFailed")
    assert answer.worker_reusable
    del store


def test_what_a_rank_measures_in_a_group_that_was_ended_is_dropped_and_the_worker_goes_on(workload):
    class Ended:
        items_per_step = flops_per_step = 1

        def __init__(self, context) -> None: ...

        def step(self) -> None: ...

        def close(self) -> None:
            store.tell_abort(groups[0])
            time.sleep(0.3)

    address, port = (store := StoreHost("127.0.0.1")).endpoint()
    groups = [
        Group(name=f"group-{number}", store_address=address, store_port=port) for number in range(2)
    ]
    settings = Measure(warmup=1, iterations=1)
    ended = Task(point=make_point(workload=workload(Ended), params={}), settings=settings)
    sound = Task(point=make_point(workload="mlp", params=MLP), settings=settings)
    worker = Worker("cpu", 0)
    answer = worker.run(ended, ALONE, groups[0])
    assert isinstance(answer, Failure)
    assert (answer.error_type, answer.worker_reusable) == ("PeerFailed", True)
    assert not dist.is_initialized()
    for group in (None, groups[1]):
        again = worker.run(sound, ALONE, group)
        assert isinstance(again, Measurement), again
    worker.leave()


def test_a_module_that_is_missing_on_this_node_is_an_error_of_its_own_type():
    answer = run(make_point(workload="no_such_module_here:Net", params={}))
    assert isinstance(answer, Failure)
    assert answer.error_type == "ModuleNotFoundError"
    assert answer.message.startswith("cannot import module 'no_such_module_here'")


def test_a_workload_that_exits_is_a_failure_and_the_process_stays(workload):
    class Exiting:
        def __init__(self, context) -> None:
            sys.exit("enough")

        def step(self) -> None: ...

    answer = run(make_point(workload=workload(Exiting), params={}))
    assert isinstance(answer, Failure)
    assert (answer.error_type, answer.message) == ("SystemExit", "enough")
    assert answer.worker_reusable


def test_a_point_whose_time_is_up_writes_where_it_is(workload, capfd):
    class Slow:
        def __init__(self, context) -> None:
            time.sleep(1.0)

        def step(self) -> None: ...

    run(make_point(workload=workload(Slow), params={}), timeout_s=0.5)
    assert "test_worker.py" in capfd.readouterr().err


def test_matrix_products_are_timed_once_before_the_first_point_and_never_between_two(
    workload, monkeypatch
):
    done = []

    def sustained(device, precisions):
        done.append(tuple(precisions))
        return dict.fromkeys(precisions, 700.0)

    monkeypatch.setattr("raybench.worker.worker.tflops_sustained", sustained)

    class Watched:
        items_per_step = 1

        def __init__(self, context) -> None:
            done.append("built")

        def step(self) -> None: ...

    name, worker = workload(Watched), Worker("cpu", 0)
    settings = Measure(warmup=1, iterations=1, breakdown=False)
    both = (Precision.FP32, Precision.BF16)
    answers = [
        worker.run(
            Task(
                point=make_point(workload=name, params={}, precision=precision),
                settings=settings,
                precisions=both,
            ),
            ALONE,
            None,
        )
        for precision in both
    ]
    assert [answer.gemm_tflops for answer in answers] == [700.0, 700.0]
    products = [one for one in done if isinstance(one, tuple) and one]
    assert products == [both]
    assert done[0] == both


def test_no_matrix_products_are_timed_where_nothing_is_to_be_found_out(workload, monkeypatch):
    monkeypatch.setattr(
        "raybench.worker.worker.tflops_sustained", lambda *_: pytest.fail("it was timed")
    )

    class Plain:
        items_per_step = 1

        def __init__(self, context) -> None: ...

        def step(self) -> None: ...

    point = make_point(workload=workload(Plain), params={})
    settings = Measure(warmup=1, iterations=1, breakdown=False)
    task = Task(point=point, settings=settings, precisions=None)
    assert Worker("cpu", 0).run(task, ALONE, None).gemm_tflops is None


@pytest.mark.parametrize(("limited_each_s", "since"), [(0.1, [1, 2, 3]), (0.0, [1, 1, 1])])
def test_a_device_rests_from_the_end_of_the_last_point_in_which_its_clocks_were_limited(
    monkeypatch, limited_each_s, since
):
    readings = iter(range(1, 100))
    rested = []
    measure = phases.measure

    class Counted:
        def read(self):
            number = next(readings)
            return Reading(time_s=number, limited_s={"power_cap": number * limited_each_s})

    def watched(*given, **named):
        rested.append(named["rested"])
        return measure(*given, **named)

    monkeypatch.setattr("raybench.worker.worker.open_counters", lambda device: Counted())
    monkeypatch.setattr(phases, "measure", watched)
    worker = Worker("cpu", 0)
    settings = Measure(warmup=1, iterations=1, breakdown=False)
    for _ in range(3):
        task = Task(point=make_point(workload="mlp", params=MLP), settings=settings)
        assert isinstance(worker.run(task, ALONE, None), Measurement)
    # The first reading follows the matrix products, then there is one after each point.
    assert [reading.time_s for reading in rested] == since


def test_a_refusal_of_nccl_names_the_variables_of_the_job_and_what_to_write(workload, monkeypatch):
    class Refused:
        items_per_step = 1

        def __init__(self, context) -> None: ...

        def step(self) -> None:
            raise RuntimeError("NCCL error in: x.cpp:1, invalid usage (run with NCCL_DEBUG=WARN)")

    monkeypatch.setenv("NCCL_ALGO", "Tree")
    name = workload(Refused)
    answer = run(make_point(workload=name, params={}, env={"NCCL_ALGO": "Tree"}))
    assert isinstance(answer, Failure)
    assert "NCCL_ALGO=Tree of env may ask for what NCCL does not have here" in answer.message
    assert answer.message.endswith("as in NCCL_ALGO: allreduce:tree")
    without = run(make_point(workload=name, params={}))
    assert isinstance(without, Failure)
    assert "of env" not in without.message


def test_a_process_without_the_variables_of_the_job_measures_nothing():
    answer = run(make_point(workload="mlp", params=MLP, env={"NOT_SET_HERE": "1"}))
    assert isinstance(answer, Failure)
    assert answer.message == "env: this process was not started with NOT_SET_HERE=1"
