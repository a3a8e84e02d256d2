"""`raybench.sweep` and `raybench.measure` where users call them: a script, `python -c`, a notebook,
a Ray job, and a process that has joined a Ray; each interrupted once.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from tests.integration.python_runs import EVERYTHING, JOB, SWEEP_AND_MEASURE, interrupted_program
from tests.integration.sweeps import count_rows, table, wait_for_rows

PIPE = subprocess.PIPE


def as_script(program, folder):
    """The command of a script with arguments that would be options of raybench."""
    (folder / "script.py").write_text(program)
    return [sys.executable, "script.py", "--set", "nonsense"]


def as_text(program, folder):
    """The command of `python -c`."""
    return [sys.executable, "-c", program, "--help"]


def variables_of(address):
    """The environment of the driver of a Ray job on the cluster at this address."""
    config = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {}})}
    return os.environ | ({} if address is None else config | {"RAY_ADDRESS": address})


@pytest.fixture
def folder(tmp_path):
    # JSON is YAML.
    (tmp_path / "job.yaml").write_text(json.dumps({"version": 1, **JOB}))
    return tmp_path


def test_everything_works_in_a_script(folder):
    done = subprocess.run(
        as_script(EVERYTHING, folder), cwd=folder, capture_output=True, text=True, timeout=280
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "Traceback" not in done.stderr
    # Neither a driver nor a worker has run the program again.
    assert (folder / "times_run").read_text() == "x"
    assert done.stderr.count("private Ray on this host, up to ") == 4
    runs = table(folder, "runs")
    assert list(runs["job_name"]) == ["small", "small"]
    assert "--set=matrix.world_size=[1, 2]" in list(runs["argv"].iloc[0])
    assert not [word for argv in runs["argv"] for word in argv if "nonsense" in word]


@pytest.mark.long
@pytest.mark.parametrize("where", ["text", "ray job"])
def test_sweeps_and_timings_work_elsewhere(folder, where, request):
    address = request.getfixturevalue("three_nodes") if where == "ray job" else None
    command_of = as_text if where == "text" else as_script
    done = subprocess.run(
        command_of(SWEEP_AND_MEASURE, folder),
        cwd=folder,
        env=variables_of(address),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    cluster = f"Ray cluster at {address}, up to 6 CPU" if address else "private Ray on this host,"
    assert done.stderr.count(cluster) == 2
    assert (folder / "times_run").read_text() == "x"


@pytest.mark.long
@pytest.mark.parametrize(
    "where",
    ["script", *(pytest.param(where, marks=pytest.mark.long) for where in ("text", "ray job"))],
)
def test_an_interrupt_returns_what_was_measured(tmp_path, where, request):
    address = request.getfixturevalue("three_nodes") if where == "ray job" else None
    program = interrupted_program(tmp_path / "results")
    command = (as_text if where == "text" else as_script)(program, tmp_path)
    with subprocess.Popen(
        command, cwd=tmp_path, env=variables_of(address), stdout=PIPE, stderr=PIPE, text=True
    ) as process:
        wait_for_rows(process, tmp_path, 2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, ""), err
    assert "then stopping; an interrupt again stops now" in err
    assert "go on with: save the job as job.yaml, then: raybench sweep job.yaml --device=cpu" in err
    status, *points = (tmp_path / "statuses").read_text().split()
    assert status == "interrupted"
    assert 2 <= points.count("ok") < 8
    assert set(points) <= {"ok", "cancelled"}
    assert (tmp_path / "went_on").read_text() == "yes"


# The user's Ray keeps its actors, and their output reaches the driver, before and after.
JOINED = f"""
import sys, time
import ray
import raybench

JOB = {JOB!r}
ray.init(num_cpus=3, include_dashboard=False)

@ray.remote(num_cpus=0)
class Counter:
    count = 0
    def add(self):
        self.count += 1
        return self.count

@ray.remote(num_cpus=0)
def sweep_in_task():
    run = raybench.sweep(JOB, results="in_task", device="cpu")
    return [run.status, *run.points["status"]]

counter = Counter.remote()
assert ray.get(counter.add.remote()) == 1
run = raybench.sweep(JOB, results="in_driver", device="cpu")
assert run.status == "ok", run
assert ray.is_initialized() and ray.get(counter.add.remote()) == 2
assert ray.get(sweep_in_task.remote()) == ["ok", "ok", "ok"]
deadline_s = time.monotonic() + 30
while ray.available_resources().get("CPU", 0) < 3:
    assert time.monotonic() < deadline_s, ray.available_resources()
    time.sleep(0.2)
try:
    raybench.sweep(JOB, address="local", device="cpu")
except raybench.errors.ClusterError as error:
    assert "this process has joined the Ray at" in str(error), error
else:
    raise AssertionError("a second Ray was started")
ray.shutdown()

# A private Ray, and then a Ray of the user's again.
assert raybench.sweep(JOB, results="private", device="cpu").status == "ok"
assert not ray.is_initialized()
ray.init(num_cpus=1, include_dashboard=False)

@ray.remote(num_cpus=1)
def greet():
    print("hello of a task", flush=True)
    time.sleep(2)

ray.get(greet.remote())
"""


@pytest.mark.long
def test_a_joined_ray_is_used_and_stays(tmp_path):
    done = subprocess.run(
        as_script(JOINED, tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "hello of a task" in done.stdout
    assert " joined before, up to 3 CPU workers; run small-" in done.stderr


def notebook_of(*cells):
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    return notebook


def texts_of(cell):
    """The outputs of a cell by MIME type, and what it wrote to stdout and stderr."""
    texts = {"stdout": "", "stderr": ""}
    for output in cell.outputs:
        if output.output_type == "stream":
            texts[output.name] += output.text
        else:
            texts |= output.data
    return texts


@pytest.mark.long
def test_a_notebook_shows_the_report(folder):
    notebook = notebook_of(SWEEP_AND_MEASURE, "run", "run.chart()", "timing")
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(folder)}}).execute()
    everything, run, chart, timing = map(texts_of, notebook.cells)
    assert everything["stdout"] == ""
    assert "raybench" not in everything["stderr"]
    assert "1 of 1 points" in everything["text/plain"]
    assert "Speed-up from 1 worker" in run["text/html"]
    assert "<img" in run["text/html"]
    assert run["text/plain"].startswith("<RunResult small-")
    assert chart["image/svg+xml"].startswith("<svg")
    assert "2 ranks" in timing["text/html"]
    assert (folder / "times_run").read_text() == "x"


@pytest.mark.long
def test_a_kernel_interrupt_returns_what_was_measured(tmp_path):
    notebook = notebook_of(interrupted_program(tmp_path / "results"), "run")
    client = NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}})

    async def interrupt_after_two_points():
        while count_rows(tmp_path) < 2:
            await asyncio.sleep(0.2)
        await client.km.interrupt_kernel()

    async def both():
        interrupt = asyncio.ensure_future(interrupt_after_two_points())
        await client.async_execute()
        await interrupt

    asyncio.run(both())
    first, second = map(texts_of, notebook.cells)
    assert "then stopping; an interrupt again stops now" in first["text/plain"]
    assert "interrupted" in second["text/plain"]
    status, *points = (tmp_path / "statuses").read_text().split()
    assert status == "interrupted"
    assert 2 <= points.count("ok") < 8


@pytest.mark.long
def test_sigterm_ends_a_script_after_writing_rows(tmp_path):
    command = as_script(interrupted_program(tmp_path / "results"), tmp_path)
    with subprocess.Popen(command, cwd=tmp_path, stdout=PIPE, stderr=PIPE, text=True) as process:
        wait_for_rows(process, tmp_path, 1)
        process.terminate()
        _, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM, err
    assert list(table(tmp_path, "runs")["status"]) == ["interrupted"]
    assert not (tmp_path / "statuses").exists()
