"""Ray holds what is asked of every launcher; what else a fault of one rank costs there."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from raybench.cluster import Cluster, point_end
from raybench.records import Failure, Status
from tests.cluster_contract import GroupContract, failures, process_ids, run

# A machine that does other things too starts a process more slowly, and a rank that comes out of
# its collective may first have to read from the disk what it has not needed before.
SLACK_S = 25.0
PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def cluster(three_workers: Cluster) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(point_end, "GRACE_S", PATIENCE_S)
        yield three_workers


class TestRay(GroupContract):
    """Over two nodes; with the cluster of this module."""


@pytest.mark.parametrize(
    ("fault", "status", "error_type", "text"),
    [
        ("early", Status.ERROR, "ValueError", "not even built"),
        ("oom", Status.OOM, "MemoryError", "asked for more than there is"),
        ("sys_exit", Status.ERROR, "SystemExit", "enough"),
    ],
)
def test_what_a_rank_says_of_its_own_fault_comes_soon_and_costs_no_process(
    cluster, fault, status, error_type, text
):
    before = process_ids(cluster)
    started_s = time.monotonic()
    answers = run(cluster, 0, 1, 2, fault=fault, breakdown=True)
    took_s = time.monotonic() - started_s
    print(f"{fault}: the next point starts {took_s:.2f} s after this one")
    assert isinstance(answers[1], Failure)
    assert (answers[1].status, answers[1].error_type) == (status, error_type)
    assert text in answers[1].message
    assert [getattr(answers[rank], "error_type", "") for rank in (0, 2)] == ["PeerFailed"] * 2
    assert failures(run(cluster, 0, 1, 2, breakdown=True)) == []
    assert process_ids(cluster) == before
    assert took_s < 2 + SLACK_S
