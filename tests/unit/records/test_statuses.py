"""What follows from how an attempt ended, said once for all rooms."""

import pickle

import pytest

from raybench.records import FAILURES, NOT_RUN, Cause, Failure, Status


def statuses(fact: str) -> set[str]:
    return {status.value for status in Status if getattr(status, fact)}


def test_the_facts_of_each_status_are_those_that_resume_rounds_and_reports_go_by():
    assert statuses("is_failure") == {"oom", "error", "timeout", "lost"} == FAILURES
    assert statuses("is_retried") == {"lost", "skipped", "cancelled"}
    assert statuses("is_lasting") == {"oom", "error", "timeout", "skipped"}
    assert statuses("is_failure").isdisjoint(NOT_RUN)
    assert {"skipped", "cancelled"} == NOT_RUN
    assert Status.OOM.label == "out of memory"


@pytest.mark.parametrize("cause", Cause)
def test_a_failure_has_the_status_of_its_cause_also_when_it_has_travelled(cause):
    failure = Failure.of(cause, rank=3, message="so it was")
    assert (failure.status, failure.error_type) == (cause.status, cause.value)
    assert pickle.loads(pickle.dumps(failure)) == failure
    assert not failure.worker_reusable


def test_a_process_that_died_is_told_from_one_that_its_node_took_along():
    assert {cause for cause in Cause if cause.is_death} == {"WorkerDied", "HostOutOfMemory"}
