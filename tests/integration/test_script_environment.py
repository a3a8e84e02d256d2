"""Variables of a job reach the processes of a point when these start, and no other point's."""

from pathlib import Path
from typing import TYPE_CHECKING

from raybench.job.model import Measure
from raybench.records import Measurement, Task
from tests.script_files import write_script
from tests.unit.fakes import make_point

if TYPE_CHECKING:
    pass

SETTINGS = Measure.model_validate({"warmup": 2, "iterations": 4, "breakdown": False})


def make_task(workload, *, env, **params):
    point = make_point(workload=workload, params=params, env=env)
    return Task(point=point, settings=SETTINGS, precisions=None)


def environment(process_id):
    """As the process was started."""
    return Path(f"/proc/{process_id}/environ").read_text(encoding="utf-8").split("\0")


def test_processes_are_started_with_the_variables_of_their_points(three_workers, tmp_path):
    def run(task):
        (answer,) = three_workers.run(task, [2])
        assert isinstance(answer, Measurement), answer
        return three_workers.devices[2].process_id

    with_a = run(make_task("mlp", env={"OURS": "a", "OMP_NUM_THREADS": "2"}))
    assert {"OURS=a", "OMP_NUM_THREADS=2"} <= set(environment(with_a))
    assert run(make_task("mlp", env={"OURS": "a", "OMP_NUM_THREADS": "2"})) == with_a
    text = "assert os.environ['OURS'] == 'c'\nsteps(10**9)"
    script = str(write_script(tmp_path, text))
    params = {"path": script, "args": "", "items_per_step": "", "step_of": ""}
    # Its process is a new one anyway; its worker is one that has no variables.
    of_script = run(make_task("script", env={"OURS": "c"}, **params))
    assert not [entry for entry in environment(of_script) if entry.startswith("OURS=")]
    assert run(make_task("mlp", env={})) == of_script
