"""One check beside an earlier one: what days alone do not explain."""

from typing import Any

import pytest
from builders import make_finding, make_subject

from raybench.health.comparison import FigureChange, trace_figures
from raybench.health.suite import WAIT_TEST


def compare(
    base: float, new: float, kind: str = "cuda", least: float = 1.015, **changes: Any
) -> FigureChange:
    checks = [[make_finding(value=value, **changes)] for value in (base, new)]
    [found] = trace_figures(checks, [kind], least)
    return found


GEMM = {"test": "gemm fp32 8192", "unit": "TFLOP/s"}


def test_a_rate_that_fell_is_slower_beyond_what_days_differ():
    assert compare(50.0, 46.0, **GEMM).verdict == "same"
    found = compare(50.0, 40.0, **GEMM)
    assert (found.verdict, found.ratio) == ("slower", 1.25)
    assert compare(40.0, 50.0, **GEMM).verdict == "faster"
    # Of a time the larger is slower; one H200, in two checks six minutes apart, is the same.
    step = {"test": "step compute", "unit": "ms", "stage": "straggler"}
    assert compare(5.0, 7.0, **step).verdict == "slower"
    assert compare(5.39, 6.23, **step).verdict == "same"


@pytest.mark.parametrize(
    ("kind", "settings", "limit"),
    [
        ("cuda", GEMM, 1.1),
        ("cuda", {"test": "gemm bf16 8192"}, 1.125),
        ("cuda", {"test": "both alone", "unit": "GB/s", "stage": "host-links"}, 1.5),
        ("cuda", {"test": "launch", "unit": "µs"}, 10),
        ("cpu", {"test": "gemm fp32 256"}, 10),
        ("cuda", {"test": "of a later version"}, 1.1),
    ],
)
def test_each_test_has_the_limit_of_its_verdict(kind, settings, limit):
    assert compare(1.0, 1.0, kind, **settings).limit == pytest.approx(limit)
    assert compare(1.0, 1.0, kind, least=20.0, **settings).limit == 20.0


def test_facts_waits_and_what_one_check_alone_has_are_no_figures():
    first = [
        make_finding(test="Xid errors", stage="facts", unit="errors"),
        make_finding(test=WAIT_TEST, unit="ms", stage="straggler"),
        make_finding(make_subject(0)),
        make_finding(make_subject(1), value=None),
        make_finding(make_subject(2), value=0.0),
    ]
    second = [*first[:2], make_finding(make_subject(1)), make_finding(make_subject(2))]
    assert trace_figures([first, second], ["cuda"], 1.0) == []
