"""SIGKILL of the driver, or of its Ray: real processes and signals; the run goes on after it."""

import os
import random
import signal
import subprocess
import time
from collections import Counter

import pytest

import raybench
from raybench.results.reader import RunStatus, read_runs
from raybench.results.tables import TABLES
from tests.integration import sweeps
from tests.integration.fault_injection import harmed_sweep
from tests.integration.fault_runs import rows, start_sweep, write_job
from tests.integration.sweeps import begin, count_rows, cpu_sweep, table, wait_for

POINTS = 8
SMALL = """\
workload: {kind: mlp, hidden: 64, layers: 2}
matrix: {world_size: [1, 2], batch_size: [1, 2, 3, 4]}
measure: {warmup: 3, iterations: 2000, max_seconds: 0.2, breakdown: false}
"""


class KilledSweep:
    """A sweep whose driver is killed again and again, and resumed each time."""

    def __init__(self, folder):
        sweeps.write_text(folder, SMALL)
        self.folder, self.results = folder, folder / "results"
        self._said = folder / "stderr.txt"

    def options(self):
        """Begin the run, or go on with it where there is one."""
        there = list(self.results.glob("runs/*/run.parquet"))
        return ["--resume", "latest"] if there else []

    def started(self):
        with self._said.open("wb") as said:
            return begin(self.folder, *self.options(), stdout=subprocess.DEVNULL, stderr=said)

    def killed(self, chance):
        """Kill its driver at a random moment and read every table; what it came after."""
        before = count_rows(self.folder)
        with self.started() as process:
            moment = chance.choice(["start", "workers", "row", "row"])
            if moment == "start":
                time.sleep(chance.uniform(0.5, 3.0))
            else:
                self.wait_until_it_has(process, before if moment == "workers" else before + 1)
                time.sleep(chance.uniform(0.0, 0.6))
            assert process.poll() is None, self._said.read_text()
            process.kill()
        self.check_readable()
        if self.results.exists():
            assert [run.status for run in read_runs(self.results)] in ([RunStatus.INTERRUPTED], [])
        return moment, count_rows(self.folder)

    def wait_until_it_has(self, process, count):
        """Wait until the driver has its cluster, and the run so many rows."""

        def has_them():
            assert process.poll() is None, self._said.read_text()
            return "; run " in self._said.read_text() and count_rows(self.folder) >= count

        wait_for(has_them, within_s=120)

    def check_readable(self):
        for name in TABLES:
            if list(self.results.glob(f"{name}/*/[!.]*.parquet")):
                table(self.folder, name)
                raybench.load(self.results, name)

    def finish(self):
        """Resume it once more, to its end, and read every table meanwhile."""
        with self.started() as process:
            while process.poll() is None:
                self.check_readable()
                time.sleep(0.1)
        assert process.returncode == 0, self._said.read_text()

    def check_each_point_once(self):
        found = table(self.folder)
        assert list(found["status"]) == ["ok"] * POINTS
        assert list(found["attempt"]) == [1] * POINTS
        assert found["point_id"].is_unique
        samples = table(self.folder, "samples")
        # What a killed attempt left is removed when the run goes on, and made again.
        counts = samples[~samples["is_warmup"]].groupby("point_id")["iteration"].nunique()
        assert counts.to_dict() == found.set_index("point_id")["iterations"].to_dict()
        (run,) = read_runs(self.results)
        assert (run.status, run.points_ok, run.points_total) == (RunStatus.OK, POINTS, POINTS)
        assert {path.name for path in self.results.rglob(".*")} <= {".driver"}


@pytest.mark.long
def test_after_each_sigkill_the_tables_are_whole_and_at_the_end_each_point_is_there_once(tmp_path):
    seed = random.randrange(1000)
    print("seed", seed)
    chance = random.Random(seed)
    sweep = KilledSweep(tmp_path)
    for _ in range(2):
        print(sweep.killed(chance))
    with sweep.started() as process:
        sweep.wait_until_it_has(process, 0)
        # Beside the first, which has the processors, or it would be refused for that.
        second = cpu_sweep(tmp_path, *sweep.options(), "--shared")
        process.kill()
    assert second.returncode == 2
    assert "is being written by another sweep" in second.stderr
    assert " interrupted " in sweeps.raybench("list", "--results", sweep.results).stdout
    sweep.finish()
    sweep.check_each_point_once()


FAULTS = [("none", 0), ("wait", 0), ("none", 0), ("none", 0)]


@pytest.mark.long
def test_when_its_own_raylet_is_killed_a_sweep_ends_in_seconds_and_can_be_resumed(tmp_path):
    def kill(process, _):
        # A raylet has the command lines of Ray's agents further on.
        there = sweeps.descendants(process.pid).items()
        [raylet] = [pid for pid, title in there if "/raylet/raylet" in title.split()[0]]
        os.kill(raylet, signal.SIGKILL)

    write_job(tmp_path, FAULTS, 2, timeout_s=90.0)
    command = sweeps.sweep_command(tmp_path, "--device", "cpu")
    ended = harmed_sweep(command, tmp_path, 1, 2, kill, stay_s=None)
    assert ended.code == 3, ended.said
    assert ended.end_s < 20
    assert ended.gone_s is not None, ended.left
    assert [row["status"] for row in rows(tmp_path)] == ["ok", "lost"]
    again = start_sweep([*command, "--resume", "latest"], tmp_path)
    _, said = again.communicate()
    assert again.returncode == 0, said
    count = Counter(row["number"] for row in rows(tmp_path) if row["status"] == "ok")
    assert count == dict.fromkeys(range(4), 1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_when_the_head_of_a_joined_cluster_is_killed_a_sweep_ends_in_seconds(tmp_path):
    from tests.integration.clusters import start_cluster

    cluster = start_cluster(num_cpus=2)
    head = cluster.head_node.all_processes["gcs_server"][0].process.pid
    write_job(tmp_path, FAULTS, 2, timeout_s=90.0)
    command = sweeps.sweep_command(tmp_path, "--device", "cpu", address=cluster.address)
    try:
        ended = harmed_sweep(
            command, tmp_path, 1, 2, lambda *_: os.kill(head, signal.SIGKILL), stay_s=5.0
        )
    finally:
        cluster.shutdown()
    assert ended.code == 3, ended.said
    assert ended.end_s < 20
    assert ended.gone_s is not None, ended.left
    assert [row["status"] for row in rows(tmp_path)] == ["ok", "lost"]
