"""A tour says of each question what its run found, in a terminal and as a page."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from raybench.cli.results import load_summary
from raybench.report.html.tour import format_page
from raybench.report.text.terminal import lay_out, render
from raybench.report.tour import Answer, tour_blocks
from raybench.results import reader

RESULTS = Path(__file__).parents[3] / "results" / "examples"
RUNS = {"gemm": "gemm-20261122-143010-684e", "collectives": "collectives-20261121-113112-4db3"}


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    return [
        Answer(
            question=f"What of {job}?",
            template=job,
            results=folder,
            summary=load_summary(RESULTS, run_id),
            devices=reader.load(RESULTS, "devices", run_id),
        )
        for (job, run_id), folder in zip(RUNS.items(), (Path("results"), RESULTS), strict=True)
    ]


def test_the_page_has_each_question_with_its_answer_its_picture_and_its_tables(
    answers: list[Answer],
) -> None:
    page = format_page(answers)
    text = html.unescape(page)
    assert page.count("<svg") >= len(answers)
    ids = re.findall(r" id=\"([^\"]*)\"", re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL))
    assert len(ids) == len(set(ids))
    for answer in answers:
        assert f"<h2>{answer.question}</h2>" in text
        assert answer.lead in text
        assert all(cell in text for cell in answer.summary.tables[0].rows[-1])
    assert "default-src 'none'" in page
    assert re.findall(r"https?:", re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)) == []


def test_a_terminal_shows_the_answers_and_the_commands_that_fit_on_a_line(
    answers: list[Answer],
) -> None:
    lines = render(lay_out(tour_blocks(answers[:1])), 80, False).splitlines()
    assert "What of gemm?" in lines
    assert " ".join(answers[0].lead.split()) in " ".join(lines)
    assert "all of it: raybench report gemm-20261122-143010-684e" in lines
    assert "the job, to change it: raybench init --template gemm" in lines
    typed = answers[1].commands[0][1]
    assert typed.endswith(f"--results {RESULTS}")
    narrow = render(lay_out(tour_blocks(answers)), 40, False).splitlines()
    assert f"all of it: {typed}" in narrow
