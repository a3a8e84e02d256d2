"""A sweep whose driver is killed again and again, and resumed each time."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

import raybench
from raybench.results.reader import read_runs
from raybench.results.run import RunStatus
from raybench.results.schema import TABLES

_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A SIGKILL: after what it came, and how many rows the run had then."""

    moment: str
    rows: int


class KilledSweep:
    """A sweep of small points on CPU workers, in a folder of its own."""

    def __init__(self, folder: Path, points: int) -> None:
        self.results = folder / "results"
        self._said = folder / "stderr.txt"
        self._job = folder / "job.yaml"
        batches = list(range(1, points // 2 + 1))
        self._job.write_text(
            "version: 1\nname: small\nworkload: {kind: mlp, hidden: 64, layers: 2}\n"
            f"matrix: {{world_size: [1, 2], batch_size: {batches}}}\n"
            "measure: {warmup: 3, iterations: 2000, max_seconds: 0.2, breakdown: false}\n"
        )

    @property
    def command(self) -> list[str]:
        """Begins the run, or goes on with it where there is one."""
        where = ["-o", str(self.results), "--address", "local", "--device", "cpu"]
        again = ["--resume", "latest"] if list(self.results.glob("runs/*/run.parquet")) else []
        return [sys.executable, "-m", "raybench", "sweep", str(self._job), *where, *again]

    def rows(self) -> int:
        return len(list(self.results.glob("points/*/[!.]*.parquet")))

    def killed(self, chance: random.Random) -> Kill:
        """Start or resume it, kill its driver at a random moment, read every table."""
        before = self.rows()
        with self.started() as process:
            moment = chance.choice(["start", "workers", "row", "row"])
            if moment == "start":
                time.sleep(chance.uniform(0.5, 3.0))
            else:
                self.wait_for(process, before if moment == "workers" else before + 1)
                time.sleep(chance.uniform(0.0, 0.6))
            assert process.poll() is None, self._said.read_text()
            process.kill()
        self.check_readable()
        if self.results.exists():
            assert [run.status for run in read_runs(self.results)] in ([RunStatus.INTERRUPTED], [])
        return Kill(moment=moment, rows=self.rows())

    def started(self) -> subprocess.Popen[bytes]:
        with self._said.open("wb") as said:
            return subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=said)

    def wait_for(self, process: subprocess.Popen[bytes], rows: int) -> None:
        """Until the driver has its cluster, and the run so many rows."""
        deadline_s = time.monotonic() + _LIMIT_S
        while "; run " not in self._said.read_text() or self.rows() < rows:
            assert time.monotonic() < deadline_s
            assert process.poll() is None, self._said.read_text()
            time.sleep(0.01)

    def check_readable(self) -> None:
        for table in TABLES:
            if list(self.results.glob(f"{table}/*/[!.]*.parquet")):
                pd.read_parquet(self.results / table)
                raybench.load(self.results, table)

    def finish(self) -> None:
        """Resume it once more, to its end, and read every table meanwhile."""
        with self.started() as process:
            while process.poll() is None:
                self.check_readable()
                time.sleep(0.1)
        assert process.returncode == 0, self._said.read_text()

    def check_each_point_once(self, points: int) -> None:
        found = pd.read_parquet(self.results / "points")
        assert list(found["status"]) == ["ok"] * points
        assert list(found["attempt"]) == [1] * points
        assert found["point_id"].is_unique
        samples = pd.read_parquet(self.results / "samples")
        # What a killed attempt left is removed when the run goes on, and made again.
        counts = samples[~samples["is_warmup"]].groupby("point_id")["iteration"].nunique()
        iterations = found.set_index("point_id")["iterations"]
        assert counts.to_dict() == iterations.to_dict()
        (run,) = read_runs(self.results)
        assert (run.status, run.points_ok, run.points_total) == (RunStatus.OK, points, points)
        left = {path.name for path in self.results.rglob(".*")}
        assert left <= {".driver"}
