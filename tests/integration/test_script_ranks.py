"""Scripts on two ranks, of which one fails, hangs or ends before the other."""

import time

import psutil
import pytest

from raybench.cluster import point_end
from raybench.job.model import Measure
from raybench.job.point import SCRIPT, Point
from raybench.records import Task
from tests.cluster_contract import process_ids
from tests.script_files import write_script

NO_GROUP = "the script's process group has 1 of 2 ranks: each may have trained alone"
# A new worker of Ray on a busy machine.
SLACK_S = 25.0


@pytest.fixture(scope="module")
def cluster(three_workers, tmp_path_factory):
    # After a class of an earlier file this costs its processes.
    run(three_workers, tmp_path_factory.mktemp("first"), "steps(10**9)")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(point_end, "GRACE_S", 10.0)
        yield three_workers


def run(cluster, folder, text, **measure):
    """The answers of two ranks of one node that run this script."""
    script = write_script(folder, text)
    point = Point(
        workload=SCRIPT,
        params={"path": str(script), "args": "", "items_per_step": "", "step_of": ""},
        world_size=2,
        batch_size=None,
        global_batch_size=None,
        scaling=None,
    )
    settings = {"warmup": 5, "iterations": 10, "breakdown": False, **measure}
    return cluster.run(Task(point=point, settings=Measure(**settings)), (0, 1))


def counts(answer):
    (repetition,) = answer.repetitions
    return len(repetition.warmup.step_ns), len(repetition.timed.step_ns)


def is_running(process_id):
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("fault", "error_type"),
    [
        ("raise ValueError('no')", "ValueError"),
        pytest.param("os._exit(3)", "ScriptExit", marks=pytest.mark.long),
        ("os.kill(os.getpid(), 9)", "WorkerDied"),
    ],
)
def test_a_fault_of_one_rank_costs_no_worker(cluster, tmp_path, fault, error_type):
    before = process_ids(cluster)
    text = f"steps(8)\nif rank == 1: {fault}\nsteps(10**9)"
    first, second = run(cluster, tmp_path, text)
    assert (first.error_type, second.error_type) == ("PeerFailed", error_type)
    assert process_ids(cluster) == before


def test_a_script_ends_with_its_worker(cluster, tmp_path):
    text = f"""
        open("{tmp_path}/pid", "w").write(str(os.getpid())) if rank == 1 else None
        steps(8)
        if rank == 1:
            os.kill(os.getppid(), 9)
        steps(10**9)
    """
    first, second = run(cluster, tmp_path, text)
    assert (first.error_type, second.error_type) == ("PeerFailed", "WorkerDied")
    script = int((tmp_path / "pid").read_text(encoding="utf-8"))
    assert not is_running(script)


@pytest.mark.long
def test_a_rank_whose_script_waits_for_one_that_hangs_keeps_its_worker(cluster, tmp_path):
    before = process_ids(cluster)
    waits = tmp_path / "torch" / "distributed"
    waits.mkdir(parents=True)
    (waits / "__init__.py").write_text("import time\ndef wait(): time.sleep(1000)\n")
    text = """
        steps(8)
        if rank == 1:
            time.sleep(1000)
        import torch.distributed
        torch.distributed.wait()
    """
    first, second = run(cluster, tmp_path, text, timeout_s=5.0, max_seconds=1.0)
    assert (first.error_type, second.error_type) == ("PeerFailed", "Timeout")
    assert "waited in a collective" in second.message
    after = process_ids(cluster)
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)


def test_a_rank_that_hangs_is_named_with_its_line(cluster, tmp_path):
    before = process_ids(cluster)
    text = "steps(8)\nif rank == 1: time.sleep(1000)\nsteps(10**9)"
    began_s = time.monotonic()
    first, second = run(cluster, tmp_path, text, timeout_s=2.0, max_seconds=1.0)
    assert time.monotonic() - began_s < 15 + SLACK_S
    assert (first.error_type, second.error_type) == ("PeerFailed", "Timeout")
    assert "at train.py:" in second.message
    assert "rank 0 waited in a collective" in second.message
    after = process_ids(cluster)
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)


def test_ranks_end_after_the_same_iteration(cluster, tmp_path):
    text = "steps(9 - 2 * rank)"
    answers = run(cluster, tmp_path, text, warmup=4, iterations=100, breakdown=True)
    assert [counts(answer) for answer in answers] == [(2, 2), (2, 2)]
    assert {answer.breakdown.hooked_ms for answer in answers} == {()}
    assert NO_GROUP in answers[0].warnings
