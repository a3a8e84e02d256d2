"""Scripts on two ranks: of the real torch, with variables of their own, and with faults."""

import time
from pathlib import Path

import pytest

from raybench.job.model import Measure
from raybench.job.point import SCRIPT
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.measurement import Measurement
from raybench.records.task import Task
from tests.cluster_contract import process_ids
from tests.integration.sweeps import title_of
from tests.real_scripts import SCRIPTS, make_task
from tests.script_files import write_script
from tests.unit.builders import unscaled_point
from tests.unit.fakes import make_point

NO_GROUP = Doubt(kind=DoubtKind.MISSING_RANKS, value=1, limit=2)
# A new worker of Ray on a busy machine.
SLACK_S = 25.0


@pytest.fixture(scope="module")
def cluster(three_workers, tmp_path_factory):
    # After a class of an earlier file this costs its processes.
    run(three_workers, tmp_path_factory.mktemp("first"), "steps(10**9)")
    return three_workers


def run(cluster, folder, text, **measure):
    """The answers of two ranks of one node that run this script."""
    script = write_script(folder, text)
    point = unscaled_point(SCRIPT, 2, path=str(script), args="", items_per_step="", step_of="")
    settings = {"warmup": 5, "iterations": 10, "breakdown": False, **measure}
    return cluster.run(Task(point=point, settings=Measure(**settings)), (0, 1))


def counts(answer):
    (repetition,) = answer.repetitions
    return len(repetition.warmup.step_ns), len(repetition.timed.step_ns)


@pytest.mark.parametrize(
    ("fault", "error_type"),
    [
        ("raise ValueError('no')", "ValueError"),
        pytest.param("os._exit(3)", "ScriptExit", marks=pytest.mark.long),
        ("os.kill(os.getpid(), 9)", "WorkerDied"),
        # As gloo tells it of one whose loop was shorter.
        ("sys.exit()", "ScriptEnded"),
    ],
)
def test_a_fault_of_one_rank_costs_no_worker(cluster, tmp_path, fault, error_type):
    before = process_ids(cluster)
    lost = "raise RuntimeError('Connection closed by peer')" if error_type == "ScriptEnded" else ""
    text = f"steps(8)\nif rank == 1: {fault}\nsteps(99)\n{lost}\nsteps(10**9)"
    first, second = run(cluster, tmp_path, text, iterations=1000)
    assert (first.error_type, second.error_type) == ("PeerFailed", error_type)
    assert process_ids(cluster) == before


@pytest.mark.long
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
    assert title_of(script) is None


@pytest.mark.long
def test_rank_waiting_for_hung_rank_keeps_its_worker(cluster, tmp_path):
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


@pytest.mark.long
def test_hung_rank_is_named_with_its_line(cluster, tmp_path):
    before = process_ids(cluster)
    text = "steps(8)\nif rank == 1: time.sleep(1000)\nsteps(10**9)"
    began_s = time.monotonic()
    first, second = run(cluster, tmp_path, text, timeout_s=6.0, max_seconds=1.0)
    assert time.monotonic() - began_s < 19 + SLACK_S
    assert (first.error_type, second.error_type) == ("PeerFailed", "Timeout")
    assert "at train.py:" in second.message
    assert "rank 0 waited in a collective" in second.message
    assert second.hang is None
    after = process_ids(cluster)
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)


def test_ranks_end_after_the_same_iteration(cluster, tmp_path):
    text = "steps(9 - 2 * rank)"
    answers = run(cluster, tmp_path, text, warmup=4, iterations=100, breakdown=True)
    assert [counts(answer) for answer in answers] == [(2, 2), (2, 2)]
    assert {answer.breakdown.hooked_ms for answer in answers} == {()}
    assert NO_GROUP in answers[0].doubts


def environment(process_id):
    """As the process was started."""
    return Path(f"/proc/{process_id}/environ").read_text(encoding="utf-8").split("\0")


@pytest.mark.long
def test_processes_start_with_variables_of_their_points(three_workers, tmp_path):
    def answer_of(workload, env, **params):
        point = make_point(workload=workload, params=params, env=env)
        settings = Measure(warmup=2, iterations=4, breakdown=False)
        (answer,) = three_workers.run(Task(point=point, settings=settings, precisions=None), [2])
        return answer

    def process_of(workload, env, **params):
        answer = answer_of(workload, env, **params)
        assert isinstance(answer, Measurement), answer
        return three_workers.devices[2].process_id

    # With which torch cannot be imported. The device is there for the next point all the same.
    refused = answer_of("mlp", {"TORCH_LOGS": "no_such_log"})
    assert (refused.error_type, three_workers.lost) == ("NoStart", frozenset())
    assert "with TORCH_LOGS=no_such_log of env, a worker could not start on " in refused.message

    with_a = process_of("mlp", {"OURS": "a", "OMP_NUM_THREADS": "2"})
    assert {"OURS=a", "OMP_NUM_THREADS=2"} <= set(environment(with_a))
    assert process_of("mlp", {"OURS": "a", "OMP_NUM_THREADS": "2"}) == with_a
    text = "assert os.environ['OURS'] == 'c'\nsteps(10**9)"
    script = str(write_script(tmp_path, text))
    params = {"path": script, "args": "", "items_per_step": "", "step_of": ""}
    # Its process is a new one anyway; its worker is one that has no variables.
    of_script = process_of("script", {"OURS": "c"}, **params)
    assert not [entry for entry in environment(of_script) if entry.startswith("OURS=")]
    assert process_of("mlp", {}) == of_script


def run_real(cluster, name, world_size, args=""):
    answers = cluster.run(make_task(name, world_size, args), range(world_size))
    assert all(isinstance(answer, Measurement) for answer in answers), answers
    return [answer for answer in answers if isinstance(answer, Measurement)]


def test_real_torch_script_gives_samples_and_parts(three_workers):
    for measurement in run_real(three_workers, "ddp.py", 2, "--accumulation 2"):
        (repetition,) = measurement.repetitions
        assert len(repetition.timed.step_ns) == 30
        assert measurement.doubts == ()
        assert measurement.items_per_step == 8
        assert len(measurement.breakdown.comm_ms) == len(measurement.breakdown.hooked_ms) > 2
        assert all(map(len, measurement.breakdown.local_ms))
        assert measurement.breakdown.optimizer_ms > 0


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_measured_unchanged(three_workers, name, world_size):
    for measurement in run_real(three_workers, name, world_size):
        assert measurement.doubts == ()
        assert min(measurement.repetitions[0].timed.step_ns) > 0
