"""Faults of ranks in a real `raybench sweep`: each costs its point alone, and its row says what."""

import pytest

from tests.integration.fault_runs import (
    CASES,
    IMPORT_ERROR,
    marks,
    outcomes,
    rank_right,
    rows,
    start_sweep,
    write_failing_import,
    write_job,
)
from tests.integration.soak import soaked
from tests.integration.sweeps import sweep_command, title_of

TIMEOUT_S = 4.0
# The limits are of a machine that does nothing else; the benchmark holds them. Here other test
# files start clusters on the same cores.
SLACK_S = 45.0
CHOSEN = [case for case in CASES if case.fault in ("mismatch", "hold_gil")]
NUMBERED = {0: IMPORT_ERROR} | {2 * place + 2: case for place, case in enumerate(CHOSEN)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of one sweep: the import fails once, and then each fault stands between points that work."""
    made = tmp_path_factory.mktemp("faults")
    faults = [("none", 0)] * (2 * len(CHOSEN) + 2)
    for number, case in NUMBERED.items():
        if number:
            faults[number] = (case.fault, case.rank)
    kind = write_failing_import(made, IMPORT_ERROR)
    write_job(made, faults, 2, kind=kind, timeout_s=TIMEOUT_S)
    process = start_sweep(sweep_command(made, "--device", "cpu"), made)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 1, said
    assert "Traceback" not in said
    return made


def attempts(folder, number):
    return [each for each in outcomes(folder, NUMBERED, TIMEOUT_S) if each.number == number]


@pytest.mark.parametrize(
    ("number", "case"), NUMBERED.items(), ids=[case.fault for case in NUMBERED.values()]
)
def test_row_names_the_fault_and_next_point_follows(folder, number, case):
    told = attempts(folder, number)
    assert len(told) == (2 if "lost" in case.wanted else 1)
    for each in told:
        assert each.status in case.wanted
        assert each.error_type
        assert rank_right(case, each) is not False
        assert 0 <= each.next_row_s <= case.limit_s + SLACK_S


def test_the_other_points_are_right(folder):
    good = [row for row in rows(folder) if row["number"] not in NUMBERED]
    assert len(good) == len(CHOSEN) + 1
    assert {row["status"] for row in good} == {"ok"}


def test_no_process_of_the_sweep_is_left(folder):
    titles = {title_of(each["pid"]) or "" for each in marks(folder)}
    assert not [title for title in titles if title.startswith("ray::")]


@pytest.mark.long
@pytest.mark.timeout(1500)  # 40 points and the processes that they cost, on two cores
def test_forty_points_with_seeded_faults_are_complete(tmp_path):
    found = soaked(tmp_path, points=40, seed=1, isolation="device")
    assert found["checks"] == dict.fromkeys(found["checks"], True), found
