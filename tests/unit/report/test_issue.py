"""A run as ten lines for an issue thread."""

import pytest
from builders import make_failed, make_point, make_run, make_steady, make_summary

from raybench.analysis.answer import decide
from raybench.report.issue import MOST_LINES, format_issue
from raybench.report.run_report import RunReport

BY_BATCH = """\
version: 1
name: test
question: Which batch is the best?
answer: {metric: throughput}
workload: {kind: mlp}
"""


def text_of(records, **changes):
    run = make_run("run-a", baseline={}, **{"job_text": BY_BATCH, **changes})
    return format_issue(RunReport(answer=decide(make_summary(records, run))))


def lines_of(records, **changes):
    return [line for line in text_of(records, **changes).splitlines() if line]


def points(count):
    return [make_steady(1, 10.0, batch_size=2**power) for power in range(count)]


def test_lines_have_question_machine_versions_and_answer():
    question, facts, versions, head, rule, first, second, last = lines_of(points(2))
    assert question == "**Which batch is the best?**"
    assert "run `run-a`" in facts
    assert "torch 2.11.0" in versions
    assert head.count("|") == rule.count("|") == first.count("|") == second.count("|")
    assert not last.startswith("|")


@pytest.mark.parametrize("count", [1, 5, 20])
def test_ten_lines_are_the_most(count):
    lines = lines_of(points(count))
    assert len(lines) <= MOST_LINES
    assert ("more value" in lines[-1]) is (count > 4)


def test_table_stands_between_blank_lines():
    blocks = text_of(points(3)).split("\n\n")
    assert [block.startswith("| ") for block in blocks] == [False, True, False]


def test_run_without_a_measured_point_has_no_table():
    lines = lines_of([make_failed(make_point(batch_size=8))])
    assert not any(line.startswith("|") for line in lines)
    assert "CUDA out of memory" in lines[-1]


def test_markup_of_a_job_is_escaped():
    question = "Is <b> `x` | y *faster*?"
    job = BY_BATCH.replace("Which batch is the best?", f"'{question}'")
    first = lines_of(points(2), job_text=job)[0]
    assert "\\<b\\>" in first
    assert "\\|" in first
