"""Four committed runs of a busy machine: what they found, and why it is doubtful."""

import re
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.slim_runs import without_folders
from raybench.analysis.answer import Next, decide
from raybench.analysis.ranking import Ranking, RankingVerdict
from raybench.analysis.run_data import load_run_data
from raybench.records.doubts import DoubtKind
from raybench.records.status import RunStatus, Status

FOLDER = Path(__file__).parent / "noisy_runs"
SCALING = "ddp_scaling-20261129-162012-b1f2"
INTERRUPTED = "ddp_scaling-20261129-161811-272f"
SCRIPT = "ddp-20261129-161041-772d"
RANKING = "accumulation_or_batch-20261129-161446-3417"
# Run -> kind -> how many of its points have the doubt.
DOUBTS = {
    SCALING: {
        DoubtKind.BASE_UNSTEADY: 2,
        DoubtKind.BUSY_CORES: 8,
        DoubtKind.IMPOSSIBLE: 1,
        DoubtKind.LATE_IN_TURN: 1,
        DoubtKind.NO_BREAKDOWN: 2,
        DoubtKind.STALLS: 8,
        DoubtKind.UNSTEADY: 1,
        DoubtKind.WIDE: 5,
    },
    INTERRUPTED: {
        DoubtKind.BUSY_CORES: 8,
        DoubtKind.LATE_IN_TURN: 1,
        DoubtKind.NO_BREAKDOWN: 1,
        DoubtKind.STALLS: 7,
        DoubtKind.WIDE: 6,
    },
    SCRIPT: {
        DoubtKind.BUSY_CORES: 4,
        DoubtKind.LATE_IN_TURN: 1,
        DoubtKind.SCRIPT_ENDED: 2,
        DoubtKind.SHORT: 2,
        DoubtKind.STALLS: 3,
        DoubtKind.TOO_FEW_STEPS: 2,
        DoubtKind.WIDE: 2,
    },
    RANKING: {
        DoubtKind.BUSY_CORES: 4,
        DoubtKind.CROWDED: 4,
        DoubtKind.LATE_IN_TURN: 2,
        DoubtKind.NO_BREAKDOWN: 1,
        DoubtKind.STALLS: 4,
        DoubtKind.WIDE: 4,
    },
}


@pytest.mark.parametrize("run", DOUBTS)
def test_a_noisy_run_has_these_doubts(run):
    rows = load_run_data(FOLDER, run).rows
    assert Counter(doubt.kind for row in rows for doubt in row.doubts or ()) == DOUBTS[run]


def test_an_interrupted_run_has_points_without_second_round():
    data = load_run_data(FOLDER, INTERRUPTED)
    assert data.run.status is RunStatus.INTERRUPTED
    rounds = Counter(len(data.trials.rounds(row)) for row in data.ok_rows)
    assert rounds == {1: 5, 2: 3}
    answer = decide(data)
    assert (answer.single_starts, answer.next_command.kind) == (5, Next.RESUME)


def test_a_failed_script_point_stands_beside_ended_ones():
    data = load_run_data(FOLDER, SCRIPT)
    failed = [row for row in data.rows if row.status is not Status.OK]
    assert [(row.status, row.error_type) for row in failed] == [(Status.ERROR, "RuntimeError")]
    assert decide(data).next_command.kind is Next.RETRY
    ended = {
        row.params["steps"]
        for row in data.ok_rows
        for doubt in row.doubts or ()
        if doubt.kind is DoubtKind.SCRIPT_ENDED
    }
    assert ended == {"20"}


def test_crowded_workers_leave_the_winner_open():
    data = load_run_data(FOLDER, RANKING)
    ranking = decide(data).conclusion
    assert isinstance(ranking, Ranking)
    (case,) = ranking.cases
    assert case.verdict is RankingVerdict.UNDECIDED
    assert len(case.rivals) == 3
    (drift,) = [group for group in data.doubts if group.worst.kind is DoubtKind.DRIFT]
    assert (drift.count, drift.worst.subject) == (2, "round 1 with 4")


def test_committed_noisy_runs_hold_no_absolute_paths():
    paths = list(FOLDER.rglob("*.parquet"))
    assert len(paths) == 16
    texts = {path.parent: str(pq.read_table(path).to_pylist()) for path in paths}
    assert 'File "ddp.py", line 28, in main' in texts[FOLDER / "points" / SCRIPT]
    for text in texts.values():
        assert re.findall(r"(?<![\w.*])/\w+/\w+", text) == []


def test_slim_runs_cut_folders_of_absolute_paths_only():
    rows = pa.table({"error_detail": ['File "/a/b.c/d.py", line 1, MB/s, and/or/not', None]})
    cut = without_folders(rows)["error_detail"].to_pylist()
    assert cut == ['File "d.py", line 1, MB/s, and/or/not', None]
