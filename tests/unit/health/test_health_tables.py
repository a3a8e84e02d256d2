"""What a health check says, as rows and back."""

from builders import (
    make_finding,
    make_measure,
    make_pair,
    make_run,
    make_subject,
)

import raybench
from raybench.health.references import read_findings
from raybench.records.health import Action, Verdict
from raybench.results.writer import RunStore

BAD = make_finding(
    make_subject(3),
    value=470.0,
    ratio=1.6,
    verdict=Verdict.BAD,
    reason="takes 1.6 times as long as the others",
    evidence="in each of 3 passes",
    action=Action.RESET,
    command="nvidia-smi --gpu-reset -i 3",
)
UNTESTED = make_finding(make_pair(0, 1), value=None, ratio=None, verdict=Verdict.UNTESTED)
HEALTHY = make_finding(make_subject(1))


def test_findings_come_back_as_they_were_written(tmp_path):
    assert read_findings(tmp_path) == []
    store = RunStore.create(tmp_path, make_run("health-1"), make_measure())
    store.write_health([BAD, UNTESTED, HEALTHY])
    found = [finding for _, finding in read_findings(tmp_path, "health-1")]
    assert found == [BAD, UNTESTED, HEALTHY]
    # The same tables as all others.
    health = raybench.load(tmp_path, "health")
    assert list(health["verdict"]) == ["bad", "untested", "healthy"]
    assert list(health["uuids"].iloc[0]) == ["GPU-3"]
