"""Scripts as points of a worker: real processes, with a torch that has the optimizers' hooks alone.

Those of several ranks are in tests/integration/test_script_ranks.py.
"""

import time

import psutil
import pytest
from fakes import ALONE, make_point

from raybench.job.model import Measure
from raybench.measure import phases
from raybench.records.doubts import DoubtKind, NotMeasured
from raybench.records.measurement import Breakdown, Measurement
from raybench.records.status import Status
from raybench.records.task import Task
from raybench.worker.worker import Worker
from raybench.workloads.scripts.running import RunningScript
from tests.script_files import write_script


def make_task(script, measure=None, **params):
    given = {"path": str(script), "args": "", "items_per_step": "", "step_of": "", **params}
    point = make_point(workload="script", params=given)
    settings = {"warmup": 5, "iterations": 10, "breakdown": False, **(measure or {})}
    return Task(point=point, settings=Measure(**settings))


def run(tmp_path, text, measure=None, **params):
    """The answer of a worker alone."""
    script = write_script(tmp_path, text)
    return Worker("cpu", 0).run(make_task(script, measure=measure, **params), ALONE, None)


def counts(answer):
    (repetition,) = answer.repetitions
    return len(repetition.warmup.step_ns), len(repetition.timed.step_ns)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_script_runs_like_torchrun_until_measured(tmp_path):
    text = """
        import json
        wanted = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_PORT TORCHELASTIC_RUN_ID"
        seen = {name: os.environ[name] for name in wanted.split()}
        seen |= {"argv": sys.argv[1:], "main": __name__, "file": __file__}
        seen |= {"path": sys.path[0], "ours": "raybench" in sys.modules}
        open(f"seen-{rank}", "w").write(json.dumps(seen))
        steps(10**9)
    """
    answer = run(
        tmp_path, text, args="--batch {batch_size} --name 'a b'", items_per_step="{batch_size} * 3"
    )
    assert isinstance(answer, Measurement), answer
    assert counts(answer) == (5, 10)
    assert answer.items_per_step == 24
    assert answer.doubts == ()
    seen = (tmp_path / "seen-0").read_text(encoding="utf-8")
    assert '"argv": ["--batch", "8", "--name", "a b"]' in seen
    assert '"main": "__main__"' in seen
    assert f'"file": "{tmp_path}/train.py", "path": "{tmp_path}", "ours": false' in seen
    assert '"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"' in seen


TWO = """
    adam = Adam()
    while True:
        time.sleep(0.01)
        optimizer.step()
        optimizer.step()
        time.sleep(0.01)
        adam.step()
"""


def test_step_of_names_another_one(tmp_path):
    answer = run(tmp_path, TWO, step_of="SGD")
    assert isinstance(answer, Measurement), answer
    assert min(answer.repetitions[0].timed.step_ns) < 10_000_000


def test_missing_step_of_names_the_optimizers_that_stepped(tmp_path):
    answer = run(tmp_path, "steps(3)", step_of="AdamW")
    assert (answer.status, answer.error_type) == (Status.ERROR, "NoSteps")
    assert "no optimizer AdamW has stepped" in answer.message
    assert answer.message.endswith("those that did: SGD")


@pytest.mark.parametrize(
    ("text", "status", "error_type", "message"),
    [
        ("raise ValueError('no such\\nthing')", Status.ERROR, "ValueError", "no such, at "),
        ("steps(8)\nraise ValueError('later')", Status.ERROR, "ValueError", "later"),
        ("raise MemoryError", Status.OOM, "MemoryError", "MemoryError: no message"),
        ("sys.exit('bad data')", Status.ERROR, "ScriptExit", "with exit code 1"),
        ("sys.exit(-1)", Status.ERROR, "ScriptExit", "with exit code 255"),
        ("steps(8)\nos._exit(7)", Status.ERROR, "ScriptExit", "with exit code 7"),
        ("steps(8)\nos.kill(os.getpid(), 9)", Status.LOST, "WorkerDied", "died by SIGKILL"),
        ("os.kill(os.getpid(), 40)", Status.LOST, "WorkerDied", "died by signal 40"),
        ("pass", Status.ERROR, "NoSteps", "no optimizer of torch.optim has stepped"),
        ("steps(1)", Status.ERROR, "NoSteps", "after its first step"),
        ("this is no python", Status.ERROR, "SyntaxError", "invalid syntax"),
    ],
)
def test_a_failed_script_gives_a_failure(tmp_path, text, status, error_type, message):
    answer = run(tmp_path, text)
    assert (answer.status, answer.error_type) == (status, error_type)
    assert message in answer.message
    assert answer.worker_reusable
    assert "scripts/child.py" not in answer.detail


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "os._exit(0)"])
def test_a_script_that_ends_early_keeps_its_steps(tmp_path, end):
    measure = {"warmup": 4, "iterations": 100, "breakdown": True}
    answer = run(tmp_path, f"steps(9)\n{end}", measure=measure)
    assert isinstance(answer, Measurement), answer
    # What a process had that ended at once is what it had answered.
    assert counts(answer) == ((2, 2) if end == "os._exit(0)" else (3, 3))
    (doubt,) = answer.doubts
    assert doubt.kind is DoubtKind.SCRIPT_ENDED
    assert (doubt.limit, doubt.value) == counts(answer)
    assert answer.breakdown.not_measured["local_step_ms"] is NotMeasured.SCRIPT_ENDED


def test_settling_is_known_when_a_script_ends_early(tmp_path):
    answer = run(tmp_path, "steps(60)", measure={"warmup": 4, "iterations": 100})
    assert answer.repetitions[0].settled is not None


def test_a_script_that_catches_everything_is_still_ended(tmp_path):
    text = """
        import atexit, signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            try:
                steps(10**9)
            except BaseException:
                pass
    """
    assert isinstance(run(tmp_path, text), Measurement)
    assert no_children()


def test_what_a_script_has_started_ends_with_it(tmp_path):
    text = """
        import subprocess
        children = [subprocess.Popen(["sleep", "1000"]),
                    subprocess.Popen(["sleep", "1000"], start_new_session=True)]
        open("children", "w").write(" ".join(str(child.pid) for child in children))
        steps(10**9)
    """
    assert isinstance(run(tmp_path, text), Measurement)
    children = [int(pid) for pid in (tmp_path / "children").read_text(encoding="utf-8").split()]
    assert len(children) == 2
    deadline_s = time.monotonic() + 10.0  # a killed process ends a moment later
    while any(map(is_running, children)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not any(map(is_running, children))
    assert no_children()


def is_running(process_id):
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def no_children():
    return not [c for c in psutil.Process().children() if "train.py" in " ".join(c.cmdline())]


def test_peak_memory_of_a_script_covers_all_repeats(tmp_path, monkeypatch):
    peaks, in_turn = {}, iter([(0, 8), (0, 6)])

    def keep(script, _):
        return script in peaks or peaks.update({script: next(in_turn)})

    def take_apart(timer, context, extent):
        timer.allocated_bytes = timer.reserved_bytes = 9
        return Breakdown()

    monkeypatch.setattr(RunningScript, "peaks", property(peaks.get, keep), raising=False)
    monkeypatch.setattr(phases, "break_down_script", take_apart)
    text = "print('x' * 10_000_000)\nsteps(10**9)"
    answer = run(tmp_path, text, {"repeats": 2, "breakdown": True})
    assert isinstance(answer, Measurement), answer
    assert (answer.peak_mem_allocated_bytes, answer.peak_mem_reserved_bytes) == (0, 8)
