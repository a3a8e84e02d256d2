"""A tour says of each question what its run found, in a terminal and as a page."""

from __future__ import annotations

import html
import re
from pathlib import Path

from raybench.cli.results import load_summary
from raybench.report.html.tour import format_page
from raybench.report.text.terminal import render
from raybench.report.tour import Answer, tour_blocks
from raybench.results import reader

RESULTS = Path(__file__).parents[3] / "results" / "examples"


def answer_of(job, results):
    summary = load_summary(RESULTS, job)
    devices = reader.load(RESULTS, "devices", summary.run.run_id)
    question = f"What of {job}?"
    return Answer(
        question=question, template=job, results=results, summary=summary, devices=devices
    )


def test_a_tour_has_each_question_with_its_answer_its_picture_and_its_tables():
    answers = [answer_of("mixed_precision", Path("results")), answer_of("collectives", RESULTS)]
    page = format_page(answers)
    text = html.unescape(page)
    assert page.count("<svg") >= len(answers)
    ids = re.findall(r" id=\"([^\"]*)\"", re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL))
    assert len(ids) == len(set(ids))
    for answer in answers:
        assert f"<h2>{answer.question}</h2>" in text
        assert answer.lead in text
        assert all(cell in text for cell in answer.report.tables[0][1][0].texts[-1])
    assert "default-src 'none'" in page
    assert re.findall(r"https?:", re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)) == []
    lines = render(tour_blocks(answers)).splitlines()
    assert "What of mixed_precision?" in lines
    assert " ".join(answers[0].lead.split()) in " ".join(lines)
    assert f"all of it: raybench report {answers[0].summary.run.run_id}" in lines
    assert "the job, to change it: raybench init --template mixed_precision" in lines
    assert answers[1].commands[0][1].endswith(f"--results {RESULTS}")
