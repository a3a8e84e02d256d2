"""docs/claims.md says what the committed runs say; what a verdict follows from."""

from __future__ import annotations

import re

import pytest

from benchmarks.claims.__main__ import PAGE
from benchmarks.claims.model import Case, Claim, Figure, Verdict, Within, at_least, near
from benchmarks.claims.page import ARTICLES, page

AS_ONE = near(1)
CLAIMS = [claim for article in ARTICLES for claim in article.claims]
# How many lines each article has in the list of what it leads its readers to expect.
LINES = {1: 10, 2: 7, 3: 10, 4: 10, 5: 34}


def figure(value, half=None, **more):
    low, high = (None, None) if half is None else (value - half, value + half)
    return Figure(value=value, low=low, high=high, runs=("run",), **more)


def claim(*cases, **more):
    return Claim(
        id="1", text="text", published="1x", ask="job", measure=lambda: cases or None, **more
    )


def case(value, half=None, name="case", rule=AS_ONE):
    return Case(name=name, figure=figure(value, half), rule=rule)


def test_the_page_is_what_the_committed_runs_say():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m benchmarks.claims"


def test_no_line_of_an_article_is_without_a_claim():
    ids = {re.sub("[a-z]$", "", claim.id) for claim in CLAIMS}
    assert ids == {f"{n}.{line}" for n, count in LINES.items() for line in range(1, count + 1)}


def test_each_claim_has_one_id():
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_words_hold_no_measured_figure(claim):
    assert not re.search(r"\d\.\d(?!B)", claim.says + claim.untested + claim.missing)


@pytest.mark.parametrize(
    ("cases", "verdict"),
    [
        ([case(1.0, 0.05)], Verdict.HOLDS),
        ([case(2.0, 0.05)], Verdict.FAILS),
        ([case(1.1, 0.05)], Verdict.OPEN),
        ([case(1.0), case(2.0)], Verdict.CONDITION),
        ([case(1.0), case(1.1, 0.05)], Verdict.CONDITION),
        ([case(2.0), case(1.1, 0.05)], Verdict.OPEN),
        ([case(1.0, rule=None)], Verdict.MEASURED),
        ([case(2.0, rule=None), case(1.0)], Verdict.HOLDS),
    ],
)
def test_the_verdict_follows_from_all_figures_and_their_intervals(cases, verdict):
    assert claim(*cases).find().verdict is verdict


def test_a_condition_names_the_cases_that_hold():
    found = claim(case(1.0, name="alone"), case(2.0, name="together")).find()
    assert found.condition == "only: alone"


def test_what_nothing_here_can_tell_has_no_verdict_by_its_figures():
    found = claim(case(1.0), untested="no such machine").find()
    assert (found.verdict, found.condition) == (Verdict.UNTESTED, "no such machine")


def test_an_interval_that_crosses_the_end_of_a_range_tells_nothing():
    rule = Within(least=1.5, most=3)
    assert [rule.holds(figure(v, 0.1)) for v in (2, 1.45, 1.3, 2.95, 3.2)] == [
        True,
        None,
        False,
        None,
        False,
    ]
    assert at_least(1).holds(figure(1e9, 1)) is True


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (figure(1.906, 0.09, unit="x"), "1.91x ±4.7%"),
        (figure(-2.58, 5.7, unit="%"), "-2.58 ±5.7 %"),
        (figure(12.3, unit="ms"), "12.3 ms (± not known)"),
        (figure(140, is_exact=True, unit="GiB"), "140 GiB"),
        (figure(6.2556e-8), "6.3e-08 (± not known)"),
    ],
)
def test_a_figure_says_what_is_known_of_it(shown, text):
    assert str(shown) == text
