"""A process is brought back to what it was, whatever a workload does to it."""

from __future__ import annotations

import builtins
import gc
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from forked import run_ranks, run_script
from state_changes import STATE_CHANGES, STATE_CHANGES_WITH_CUDA

from raybench.worker.state import ProcessState, seed_all
from raybench.worker.state.process_settings import python_settings, system_settings
from raybench.worker.state.torch_settings import torch_settings

CPU = torch.device("cpu")
SETTINGS = {
    setting.name: setting for setting in (*python_settings(), *system_settings(), *torch_settings())
}
# What only a new process has back, or cannot be changed here.
NOT_BY_A_MESS = {
    "inference mode",
    "inter-op threads",
    "torch profiler",
    "niceness",
    "scheduling policy",
    "monitoring tools",
    *STATE_CHANGES_WITH_CUDA,
}


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in NOT_BY_A_MESS])
def test_a_changed_setting_is_put_back_without_a_word(name):
    state, before = ProcessState(CPU), SETTINGS[name].read()
    STATE_CHANGES[name]()
    changed = SETTINGS[name].read() != before
    assert state.restore() == ()
    assert changed
    assert SETTINGS[name].read() == before


def test_no_setting_is_there_twice():
    names = [setting.name for setting in torch_settings()]
    assert sorted(names) == sorted(set(names))


def test_no_mess_is_without_its_setting():
    # cuDNN depthwise_kernel is newer than torch 2.11.
    assert STATE_CHANGES.keys() - {"cuDNN depthwise_kernel"} <= SETTINGS.keys() - NOT_BY_A_MESS
    assert SETTINGS.keys() - NOT_BY_A_MESS <= STATE_CHANGES.keys()


def _least_cpu_s(call: Callable[[], object]) -> float:
    """The fastest of five calls, with what is loaded now frozen as in a worker."""
    times_s = []
    gc.collect()
    gc.freeze()
    for _ in range(5):
        start_s = time.process_time()
        call()
        times_s.append(time.process_time() - start_s)
    gc.unfreeze()
    return min(times_s)


def _store_half_a_million_items() -> None:
    # 40 ms where a core is alone; as much slower as the tested code where a thread shares it.
    stored = {}
    for i in range(500_000):
        stored[i & 1023] = i


def test_a_clean_process_is_restored_sooner_than_half_a_million_items_are_stored():
    state = ProcessState(CPU)
    assert state.restore() == ()
    assert _least_cpu_s(state.restore) < _least_cpu_s(_store_half_a_million_items)


def test_all_at_once_is_put_back_too():
    state, before = ProcessState(CPU), {name: s.read() for name, s in SETTINGS.items()}
    for name, mess in STATE_CHANGES.items():
        if (
            name in SETTINGS and name != "ban of saved-tensor hooks"
        ):  # which cannot be had beside such hooks
            mess()
    assert state.restore() == ()
    assert {name: setting.read() for name, setting in SETTINGS.items()} == before


def test_inference_mode_that_somebody_holds_is_told():
    state = ProcessState(CPU)
    mode = torch.inference_mode()
    mode.__enter__()
    assert state.restore() == ("a changed inference mode",)
    mode.__exit__(None, None, None)
    assert state.restore() == ()


def test_a_limit_that_cannot_be_raised_again_is_told():
    done = run_script("""
import os, resource
from raybench.worker.state import ProcessState
state = ProcessState(torch.device("cpu"))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.setgid(65534), os.setuid(65534) if os.getuid() == 0 else None
print(state.restore())
""")
    assert done == "('a changed resource limits',)\n"


def test_a_scheduling_policy_is_put_back_on_all_threads():
    done = run_script("""
import os, threading
from raybench.worker.state import ProcessState
state = ProcessState(torch.device("cpu"))
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
stop = threading.Event()
thread = threading.Thread(target=stop.wait, name="left")
thread.start()
print(state.restore(), os.sched_getscheduler(0), os.sched_getscheduler(thread.native_id))
stop.set()
""")
    assert done == "('1 running thread (left)',) 0 0\n"


def test_many_files_left_open_are_told_and_a_few_are_not(tmp_path):
    state = ProcessState(CPU)
    with ExitStack() as files:
        for number in range(200):
            files.enter_context((tmp_path / str(number)).open("w"))
            if number == 20:
                assert state.restore() == ()
        assert state.restore() == ("200 open files",)
    assert state.restore() == ()


def test_a_finder_that_a_library_brings_along_stays(monkeypatch):
    state, library = ProcessState(CPU), ModuleType("late_library")
    monkeypatch.setitem(sys.modules, "late_library", library)
    finder = type("Finder", (), {"__module__": "late_library"})()
    sys.meta_path.append(finder)
    assert state.restore() == ()
    assert sys.meta_path.pop() is finder


class Layer:
    def forward(self) -> int:
        return 1


def _doubled(*arguments: object) -> int:
    return 2


@pytest.mark.parametrize(
    ("owner", "name", "told"),
    [
        (torch.nn.functional, "gelu", "torch.nn.functional.gelu"),
        (torch.nn, "LayerNorm", "torch.nn.LayerNorm"),
        (torch.nn.Linear, "forward", "torch.nn.modules.linear.Linear.forward"),
        (torch.nn.Linear, "parameters", "torch.nn.modules.linear.Linear.parameters"),
        (torch.optim.SGD, "step", "torch.optim.sgd.SGD.step"),
        (torch.distributed, "all_reduce", "torch.distributed.all_reduce"),
        (time, "sleep", "time.sleep"),
        (time, "perf_counter_ns", "time.perf_counter_ns"),
        (np, "asarray", "numpy.asarray"),
        (builtins, "print", "builtins.print"),
        (sys, "excepthook", "sys.excepthook"),
    ],
)
def test_a_replaced_function_is_told_until_it_is_back(monkeypatch, owner, name, told):
    state = ProcessState(CPU)
    state.begin()
    assert state.functions_replaced("own") == ()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, _doubled)
        if told == "sys.excepthook":  # which pytest looks at
            assert state.functions_replaced("own")
        else:
            assert state.functions_replaced("own") == (f"1 replaced function ({told})",)
    assert state.functions_replaced("own") == ()


def test_a_module_that_came_with_the_point_is_searched_for_what_is_the_workloads(monkeypatch):
    state, library = ProcessState(CPU), ModuleType("late_library")
    state.begin()
    monkeypatch.setitem(sys.modules, "late_library", library)
    library.attention, library.Layer = _doubled, Layer
    assert state.functions_replaced("other") == ()
    library.attention = lambda: 3
    assert state.functions_replaced("other") == ("1 replaced function (late_library.attention)",)
    state, package = ProcessState(CPU), __name__.partition(".")[0]
    monkeypatch.delitem(sys.modules, "late_library")
    state.begin()
    monkeypatch.setitem(sys.modules, "late_library", library)
    assert state.functions_replaced(package)[0].startswith("2 replaced functions (late_library.")


def test_a_class_that_raises_when_it_is_looked_at_hides_no_replaced_function(monkeypatch):
    class Unfriendly(type):
        def __getattribute__(cls, name):
            raise RuntimeError(f"no {name}")

    library = ModuleType("unfriendly_library")
    library.Odd, library.Layer = Unfriendly("Odd", (), {"forward": _doubled}), Layer
    monkeypatch.setitem(sys.modules, "unfriendly_library", library)
    state = ProcessState(CPU)
    state.begin()
    assert state.functions_replaced("own") == ()
    monkeypatch.setattr(library, "Layer", _doubled)
    assert state.functions_replaced("own") == ("1 replaced function (unfriendly_library.Layer)",)


def test_the_first_optimizer_of_a_class_replaces_nothing():
    done = run_script("""
from raybench.worker.state import ProcessState
state = ProcessState(torch.device("cpu"))
state.begin()
parameter = torch.zeros(1, 1, requires_grad=True)
for optimizer in ("AdamW", "Adam", "SGD", "Adafactor", "LBFGS", "RMSprop", "NAdam"):
    made = getattr(torch.optim, optimizer)([parameter])
    assert made.step.hooked
print(state.functions_replaced("own"))
torch.optim.AdamW.step = lambda self: None
print(state.functions_replaced("own"))
""")
    assert done == "()\n('1 replaced function (torch.optim.adamw.AdamW.step)',)\n"


def test_what_the_compiler_wraps_is_put_back_and_wrapped_again_by_the_next_use():
    # In a process of its own: others have compiled in this one.
    done = run_script("""
from raybench.worker.state import ProcessState
state = ProcessState(torch.device("cpu"))
state.begin()
step, init = torch.optim.SparseAdam.step, torch.nn.Module.__init__
for _ in range(2):
    model = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    model(torch.ones(1, 2))
    print(torch.optim.SparseAdam.step is step, torch.nn.Module.__init__ is init)
    print(state.restore(), state.functions_replaced("own"))
    print(torch.optim.SparseAdam.step is step, torch.nn.Module.__init__ is init)
""")
    assert done == 2 * "False False\n() ()\nTrue True\n"


def test_code_that_was_compiled_before_the_point_may_be_forgotten_in_it():
    done = run_script("""
import sys, types
from raybench.worker.state import ProcessState
mine = sys.modules["mine"] = types.ModuleType("mine")
exec("def double(x): return x * 2", vars(mine))
torch.compile(mine.double, backend="eager")(torch.ones(1))
(compiled,) = (name for name in vars(mine) if name.startswith("__compiled_fn"))
state = ProcessState(torch.device("cpu"))
state.begin()
torch._dynamo.reset()
print(hasattr(mine, compiled), state.functions_replaced("own"))
del mine.double
print(state.functions_replaced("own"))
""")
    assert done == "False ()\n('1 replaced function (mine.double)',)\n"


def _time_look_at_functions(_: int) -> tuple[float, float]:
    state = ProcessState(CPU)
    state.begin()
    assert state.functions_replaced("own") == ()
    looked_s = _least_cpu_s(lambda: state.functions_replaced("own"))
    return looked_s, _least_cpu_s(_store_half_a_million_items)


def test_all_functions_are_looked_at_sooner_than_half_a_million_items_are_stored():
    # In a new process: this one has loaded what other tests need, with many more functions.
    ((looked_s, stored_s),) = run_ranks(_time_look_at_functions, 1)
    assert looked_s < stored_s


def test_a_running_profiler_is_told():
    state = ProcessState(CPU)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True):
        assert state.restore() == ("a changed torch profiler",)
    assert state.restore() == ()


def test_a_setting_that_refuses_to_be_put_back_is_told():
    done = run_script("""
from raybench.worker.state import ProcessState
state = ProcessState(torch.device("cpu"))
torch.set_num_interop_threads(torch.get_num_interop_threads() + 1)
print(state.restore())
""")
    assert done == "('a changed inter-op threads',)\n"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")
def test_a_monitoring_tool_left_on_is_ended():
    state = ProcessState(CPU)
    monitoring = sys.monitoring
    monitoring.use_tool_id(monitoring.PROFILER_ID, "left on")
    monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.PY_START)
    assert state.restore() == ()
    assert monitoring.get_tool(monitoring.PROFILER_ID) is None


def test_a_thread_left_running_is_told_until_it_ends():
    state = ProcessState(CPU)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left")
    thread.start()
    assert state.restore() == ("1 running thread (left)",)
    stop.set()
    thread.join()
    assert state.restore() == ()


def test_the_thread_that_a_progress_bar_starts_is_ended(monkeypatch):
    stop = threading.Event()
    monitor = SimpleNamespace(exit=stop.set)
    bars = SimpleNamespace(tqdm=SimpleNamespace(monitor=monitor))
    monkeypatch.setitem(sys.modules, "tqdm.std", bars)
    state = ProcessState(CPU)
    threading.Thread(target=stop.wait, name="tqdm_monitor").start()
    assert state.restore() == ()
    assert bars.tqdm.monitor is None


def test_a_thread_that_is_about_to_end_is_waited_for():
    state = ProcessState(CPU)
    threading.Thread(target=time.sleep, args=(0.1,)).start()
    assert state.restore() == ()


def test_a_timer_of_the_compiler_that_still_sleeps_is_not_the_workloads():
    from torch._inductor.compile_worker.timer import Timer

    state, timer = ProcessState(CPU), Timer(4, lambda: None)
    timer.record_call()
    timer.quit()
    assert state.restore() == ()


def test_a_child_process_left_running_is_told_and_an_ended_one_is_not():
    state = ProcessState(CPU)
    with subprocess.Popen(["sleep", "60"]) as child:
        assert state.restore() == ("1 child process (sleep)",)
        child.kill()
        time.sleep(0.1)
        assert state.restore() == ()


def test_a_child_process_may_give_itself_any_bytes_for_a_name():
    rename = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'odd\\xff) Z', 0, 0, 0)"
    script = f"{rename}; print(flush=True); sys.stdin.read()"
    state = ProcessState(CPU)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert state.restore() == ("1 child process (odd\ufffd) Z)",)
        child.communicate()


def test_what_ran_before_the_point_is_not_the_workloads():
    state = ProcessState(CPU)
    with subprocess.Popen(["sleep", "60"]) as child:
        state.begin()
        assert state.restore() == ()
        child.kill()


def test_a_seed_fixes_every_global_generator():
    drawn = []
    for _ in range(2):
        seed_all(7)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]
